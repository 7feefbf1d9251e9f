"""A smaller causal model with the target's vocabulary drafts token by token.

Its cache persists between steps. Before drafting it computes the committed tokens that it
has not seen: one after a rejection, two after a full acceptance (the last draft was never
fed), a whole chunk while the target computes a prompt. Under the coupled rule it draws with
the target's own noise, so the two agree wherever their distributions are close.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.block_pool import OutOfBlocksError
from engine.drafter.base import NO_PROPOSAL, DraftJob, Proposal
from engine.drafter.drawing import DraftPosition, draw
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest
from engine.sampler import Sampler
from engine.target_runner import TargetRunner


@dataclass(slots=True)
class _Place:
    """A request's row in the draft model's cache, and the drafts that were fed there."""

    row: int
    fed_drafts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """A proposal in the making."""

    job: DraftJob
    place: _Place
    token_ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    num_positions: int = 0


class DraftModelDrafter:
    """Drafts for all rows together: one catching-up forward, then one per further token."""

    name = "draft_model"

    def __init__(self, runner: TargetRunner, sampler: Sampler, *, max_step_tokens: int) -> None:
        self.runner = runner
        self.cache = runner.cache
        self._sampler = sampler
        self._max_step_tokens = max_step_tokens
        self._places: dict[str, _Place] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        drafts: dict[str, _Draft] = {}
        rows: list[ForwardRow] = []
        budget = self._max_step_tokens
        for job in sorted(jobs, key=lambda job: not job.max_drafts):
            draft, row = self._catch_up(job, budget)
            if draft is None or row is None:
                continue
            drafts[job.live.request_id] = draft
            rows.append(row)
            budget -= len(row.token_ids)
        if rows:
            self._run(list(drafts.values()), rows)
        return [self._proposal(drafts.get(job.live.request_id)) for job in jobs]

    def forget(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self.cache.free_row(place.row)

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        if len(self._places) + self.cache.num_free_rows != self.cache.max_num_rows:
            raise RuntimeError("a row of the draft model's cache belongs to no request")

    def _catch_up(self, job: DraftJob, budget: int) -> tuple[_Draft | None, ForwardRow | None]:
        """Bring the cache's length in line and say which tokens to compute next."""
        live = job.live
        place = self._place(live)
        if place is None or budget <= 0:
            return None, None
        length = self._settle(live, place)
        count = min(job.end - length, budget)
        # The draft model may hold fewer tokens than the target; the target then goes on alone.
        room = self.cache.max_tokens - length
        if count <= 0 or count > room:
            return None, None
        reaches_end = length + count == live.num_tokens
        max_drafts = min(job.max_drafts, room - count) if reaches_end else 0
        try:
            self.cache.reserve(place.row, length + count + max_drafts)
        except OutOfBlocksError:
            return None, None
        row = ForwardRow(
            place.row, live.token_ids[length : length + count], length, int(max_drafts > 0)
        )
        job = DraftJob(live, job.end, max_drafts)
        return _Draft(job, place, num_positions=count), row

    def _place(self, live: LiveRequest) -> _Place | None:
        place = self._places.get(live.request_id)
        if place is None and self.cache.num_free_rows:
            try:
                row, _ = self.cache.allocate_row(live.token_ids, live.request.tenant)
            except OutOfBlocksError:
                return None
            place = self._places[live.request_id] = _Place(row)
        return place

    def _settle(self, live: LiveRequest, place: _Place) -> int:
        """The cache's length, moved over the fed drafts that were committed since."""
        length = self.cache.length(place.row)
        limit = live.num_tokens - 1
        for token_id in place.fed_drafts:
            if length >= limit or live.token_ids[length] != token_id:
                break
            length += 1
        place.fed_drafts.clear()
        length = min(length, limit)
        self.cache.commit(place.row, live.token_ids, length)
        return length

    def _run(self, drafts: list[_Draft], rows: list[ForwardRow]) -> None:
        logits = self.runner.forward(rows)
        for draft, row in zip(drafts, rows, strict=True):
            self.cache.commit(row.row, draft.job.live.token_ids, row.start + len(row.token_ids))
        active = [draft for draft in drafts if draft.job.max_drafts]
        while active:
            self._extend(active, logits)
            active = [d for d in active if len(d.token_ids) < d.job.max_drafts]
            if not active:
                break
            rows = [
                ForwardRow(
                    d.place.row,
                    d.token_ids[-1:],
                    d.job.live.num_tokens + len(d.token_ids) - 1,
                    1,
                )
                for d in active
            ]
            logits = self.runner.forward(rows)
            for draft in active:
                draft.place.fed_drafts.append(draft.token_ids[-1])
                draft.num_positions += 1

    def _extend(self, drafts: list[_Draft], logits: torch.Tensor) -> None:
        """Draw the next token of every draft from its row of logits [R, V]."""
        positions = [DraftPosition(draft.job.live, draft.token_ids) for draft in drafts]
        token_ids, probs = draw(self._sampler, self._fit_vocabulary(logits), positions)
        for draft, token_id, row_probs in zip(drafts, token_ids, probs, strict=True):
            draft.token_ids.append(token_id)
            if row_probs is not None:
                draft.probs.append(row_probs)

    def _fit_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self._sampler.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._sampler.vocab_size]

    def _proposal(self, draft: _Draft | None) -> Proposal:
        if draft is None:
            return NO_PROPOSAL
        probs = torch.stack(draft.probs) if draft.probs else None
        return Proposal(tuple(draft.token_ids), probs, draft.num_positions, self.name)
