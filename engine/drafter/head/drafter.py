"""Drafts with a head for all rows together: one ragged catching-up pass, then one pass per token.

A pair of the head is (token t + 1, hidden states of token t). What a request's pairs add to
the head's cache is decided by committed tokens alone; keys that drafting writes beyond them
are overwritten by the true ones in the next round. Rounds in which the request does not draft
only collect hidden states, the last `window` of them; a reused prefix, whose states nobody
captured, or a longer pause makes the head's context begin later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.block_pool import OutOfBlocksError
from engine.drafter.base import NO_PROPOSAL, DraftJob, Proposal
from engine.drafter.drawing import DraftPosition, draw, is_plain
from engine.drafter.head.calibration import Calibration
from engine.drafter.head.features import PendingFeatures
from engine.drafter.head.runner import HeadRunner
from engine.drafter.head.tap import HiddenStateTap
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest
from engine.sampler import Sampler
from engine.upload import upload


@dataclass(slots=True)
class _Place:
    """A request's row in the head's cache. The row's entry j is the pair of token first + j."""

    row: int
    first: int
    pending: PendingFeatures


@dataclass(slots=True)
class _Draft:
    """A proposal in the making."""

    index: int
    job: DraftJob
    place: _Place
    forward: ForwardRow
    captured: torch.Tensor  # [n, 3H]
    reach: float = 1.0
    token_ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    num_positions: int = 0


class HeadDrafter:
    """See the module's words. It hears of every forward of the target, where its tap listens."""

    def __init__(
        self,
        name: str,
        runner: HeadRunner,
        tap: HiddenStateTap,
        sampler: Sampler,
        calibration: Calibration,
        *,
        window: int,
        is_by_name_only: bool = False,
    ) -> None:
        """is_by_name_only: requests that name no drafter are none of this one's."""
        self.name = name
        self._is_by_name_only = is_by_name_only
        self.runner = runner
        self._tap = tap
        self.cache = runner.cache
        self._sampler = sampler
        self._calibration = calibration
        self._window = window
        self._draft_token_ids = runner.head.draft_token_ids
        self._places: dict[str, _Place] = {}

    def after_forward(self, rows: Sequence[tuple[LiveRequest, ForwardRow]]) -> None:
        """Keep the states of a forward that laid its rows' tokens end to end."""
        captured = self.take_states()
        first = 0
        for live, row in rows:
            stop = first + len(row.token_ids)
            if self._serves(live):
                self.hear(live, row.start, captured[first:stop])
            first = stop

    def take_states(self) -> torch.Tensor:
        """[N, 3H] of the target's latest forward, padding behind; once per forward."""
        return self._tap.take()[0]

    def hear(self, live: LiveRequest, start: int, captured: torch.Tensor) -> None:
        """Keep the states [n, 3H] of a request's positions start.. for when it drafts."""
        place = self._places.get(live.request_id)
        if place is None:
            place = _Place(-1, 0, PendingFeatures(self._window))
            self._places[live.request_id] = place
        place.pending.hear(start, captured)

    def _serves(self, live: LiveRequest) -> bool:
        named = live.request.speculation.named_drafters
        is_meant = not self._is_by_name_only if named is None else self.name in named
        return live.speculates and is_meant

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        drafts = [
            draft
            for index, job in enumerate(jobs)
            if job.max_drafts and (draft := self._catch_up(index, job)) is not None
        ]
        if drafts:
            self._run(drafts)
        proposals = [NO_PROPOSAL] * len(jobs)
        for draft in drafts:
            probs = torch.stack(draft.probs) if draft.probs else None
            proposals[draft.index] = Proposal(
                tuple(draft.token_ids), probs, draft.num_positions, self.name
            )
        return proposals

    def forget(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None and place.row >= 0:
            self.cache.free_row(place.row, keep=False)

    def close(self) -> None:
        """Listen to the target no more."""
        self._tap.close()

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        num_rows = sum(place.row >= 0 for place in self._places.values())
        if num_rows + self.cache.num_free_rows != self.cache.max_num_rows:
            raise RuntimeError("a row of the head's cache belongs to no request")

    def _catch_up(self, index: int, job: DraftJob) -> _Draft | None:
        """The pairs that the request's head has not read, laid out behind those it has."""
        live = job.live
        place = self._places.get(live.request_id)
        if place is None:
            return None
        num_pairs = live.num_tokens - 1  # the newest token has no states yet
        taken = place.pending.take(num_pairs)
        if taken is None:
            return None
        start, captured = taken
        length = start - place.first
        if place.row >= 0 and length != self.cache.length(place.row):
            self.cache.free_row(place.row, keep=False)
            place.row = -1
        try:
            if place.row < 0:
                if not self.cache.num_free_rows:
                    return None
                place.row, _ = self.cache.allocate_row([0], live.request_id)
                place.first, length = start, 0
            stop = length + len(captured)
            room = self.cache.max_tokens - stop
            if room < 0:
                return None
            job = DraftJob(live, job.end, min(job.max_drafts, room + 1), job.min_reach)
            self.cache.reserve(place.row, stop + job.max_drafts - 1)
        except OutOfBlocksError:
            return None
        token_ids = live.token_ids[start + 1 : start + 1 + len(captured)]
        forward = ForwardRow(place.row, token_ids, length, 1)
        return _Draft(index, job, place, forward, captured, num_positions=len(captured))

    def _run(self, drafts: list[_Draft]) -> None:
        fused = self.runner.fuse(torch.cat([draft.captured for draft in drafts]))
        logits, states = self.runner.forward([draft.forward for draft in drafts], fused)
        for draft in drafts:
            stop = draft.forward.start + len(draft.forward.token_ids)
            first = draft.place.first + 1
            self.cache.commit(draft.place.row, draft.job.live.token_ids[first:], stop)
        while True:
            going_on = self._extend(drafts, logits)
            if not going_on:
                return
            drafts = [drafts[index] for index in going_on]
            rows = [
                ForwardRow(
                    draft.place.row,
                    draft.token_ids[-1:],
                    self.cache.length(draft.place.row) + len(draft.token_ids) - 1,
                    1,
                )
                for draft in drafts
            ]
            states = states.index_select(0, upload(going_on, states.device))
            logits, states = self.runner.forward(rows, states)
            for draft in drafts:
                draft.num_positions += 1

    def _extend(self, drafts: Sequence[_Draft], logits: torch.Tensor) -> list[int]:
        """Add a token to every draft that is worth it; the places of those that want more."""
        best, best_index = logits.max(dim=-1)
        confidence = torch.exp(best.float() - torch.logsumexp(logits.float(), dim=-1))
        drafted = self._draft_token_ids[best_index]
        # One copy from the device; float64 holds any token id.
        read = torch.stack([drafted.double(), confidence.double()]).tolist()
        token_ids = [int(token_id) for token_id in read[0]]
        positions = [DraftPosition(d.job.live, d.token_ids) for d in drafts]
        special = [i for i, position in enumerate(positions) if not is_plain(position)]
        probs: dict[int, torch.Tensor] = {}
        if special:
            drawn, found = draw(
                self._sampler,
                self._over_vocabulary(logits[upload(special, logits.device)]),
                [positions[i] for i in special],
            )
            for index, token_id, row_probs in zip(special, drawn, found, strict=True):
                token_ids[index] = token_id
                if row_probs is not None:
                    probs[index] = row_probs
        going_on = []
        for index, (draft, sure) in enumerate(zip(drafts, read[1], strict=True)):
            draft.reach *= self._calibration.acceptance_of(sure)
            if draft.reach < draft.job.min_reach:
                continue
            draft.token_ids.append(token_ids[index])
            if index in probs:
                draft.probs.append(probs[index])
            if len(draft.token_ids) < draft.job.max_drafts:
                going_on.append(index)
        return going_on

    def _over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V]: what cannot be drafted has no probability."""
        size = (len(logits), self._sampler.vocab_size)
        wide = torch.full(size, float("-inf"), device=logits.device)
        return wide.index_copy_(1, self._draft_token_ids, logits.float())
