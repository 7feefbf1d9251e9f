"""One target forward over all rows of a step, then the acceptance rule.

A forward or a draw that raises is tried again row by row, so that the requests that cause the
failure end and no others; nothing is committed here, so there is hardly anything to undo. What
breaks a target over several processes is raised: it ends the engine.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.acceptance import accept_by_rejection, accept_coupled
from engine.drafter.base import Proposal
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest
from engine.logprobs import token_logprobs
from engine.noise import Stream, gumbel_noise, noise_key, uniform_noise
from engine.prepared_row import PreparedRow, RowOutcome, prepare
from engine.request import AcceptanceRule, TokenLogprob
from engine.sampler import RowSampling, Sampler
from engine.scheduler import PlannedRow
from engine.shards import BrokenShardsError
from engine.target_runner import TargetRunner
from engine.upload import upload, upload_together


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcomes in the order of the plan, and where the time went."""

    outcomes: list[RowOutcome]
    verify_nanoseconds: int
    sample_nanoseconds: int


class Verifier:
    """Runs the target and decides what is emitted."""

    def __init__(
        self,
        runner: TargetRunner,
        sampler: Sampler,
        after_forward: Callable[[Sequence[tuple[LiveRequest, ForwardRow]]], None] | None = None,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self._after_forward = after_forward

    def verify(self, plan: Sequence[PlannedRow], proposals: Sequence[Proposal]) -> Verification:
        """proposals has one entry per planned row; empty where nothing was drafted.

        Raises BrokenShardsError when the processes that share the target have lost each other.
        """
        outcomes: list[RowOutcome | None] = []
        ready: list[PreparedRow] = []
        for planned, proposal in zip(plan, proposals, strict=True):
            row = prepare(planned, proposal)
            outcomes.append(row if isinstance(row, RowOutcome) else None)
            if isinstance(row, PreparedRow):
                ready.append(row)
        verification = self._verify(ready) if ready else Verification([], 0, 0)
        found = iter(verification.outcomes)
        complete = [outcome or next(found) for outcome in outcomes]
        return replace(verification, outcomes=complete)

    def _verify(self, rows: Sequence[PreparedRow]) -> Verification:
        known = [len(row.planned.live.prompt_logprobs) for row in rows]
        try:
            return self._verify_together(rows)
        except BrokenShardsError:
            raise  # no row alone would do better: the other processes are lost
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        # From here on nothing holds the memory of the attempt that failed.
        for row, count in zip(rows, known, strict=True):
            del row.planned.live.prompt_logprobs[count:]
        return self._verify_apart(rows, message)

    def _verify_together(self, rows: Sequence[PreparedRow]) -> Verification:
        started = time.perf_counter_ns()
        logits = self.runner.forward([row.forward for row in rows])
        if self._after_forward is not None:
            self._after_forward([(row.planned.live, row.forward) for row in rows])
        computed = time.perf_counter_ns()
        outcomes = self._decide(rows, self._take_prompt_logprobs(rows, logits))
        decided = time.perf_counter_ns()
        return Verification(outcomes, computed - started, decided - computed)

    def _verify_apart(self, rows: Sequence[PreparedRow], message: str) -> Verification:
        if len(rows) == 1:
            row = rows[0]
            outcome = RowOutcome(row.planned, len(row.proposal.token_ids), error=message)
            return Verification([outcome], 0, 0)
        parts = [self._verify([row]) for row in rows]
        return Verification(
            [outcome for part in parts for outcome in part.outcomes],
            sum(part.verify_nanoseconds for part in parts),
            sum(part.sample_nanoseconds for part in parts),
        )

    @torch.inference_mode()
    def _take_prompt_logprobs(
        self, rows: Sequence[PreparedRow], logits: torch.Tensor
    ) -> torch.Tensor:
        """Book the logprobs of prompt tokens; returns the logits of emitting rows alone."""
        if not any(row.planned.live.num_missing_prompt_logprobs for row in rows):
            return logits
        kept: list[torch.Tensor] = []
        start = 0
        for row in rows:
            live, part = row.planned.live, logits[start : start + row.forward.num_logits]
            start += row.forward.num_logits
            num_missing = live.num_missing_prompt_logprobs
            if not num_missing:
                kept.append(part)
                continue
            known = len(live.prompt_logprobs)  # the row's first logits are of this position
            token_ids = live.token_ids[known + 1 : known + 1 + min(num_missing, len(part))]
            num_top = live.request.sampling.num_top_logprobs or 0
            live.prompt_logprobs.extend(token_logprobs(part[: len(token_ids)], token_ids, num_top))
            if row.planned.emits:
                kept.append(part[-1:])
        return torch.cat(kept) if kept else logits[:0]

    @torch.inference_mode()
    def _decide(self, rows: Sequence[PreparedRow], logits: torch.Tensor) -> list[RowOutcome]:
        emitting = [row for row in rows if row.sampling is not None]
        found = iter(self._accept(emitting, logits) if emitting else ())
        return [RowOutcome(row.planned, 0) if row.sampling is None else next(found) for row in rows]

    def _accept(self, rows: Sequence[PreparedRow], logits: torch.Tensor) -> list[RowOutcome]:
        """Outcomes of rows whose logits [sum of K + 1, V] these are."""
        batch = [(row.planned, row.proposal) for row in rows]
        sampling = [row.sampling for row in rows if row.sampling is not None]
        longest = max(len(p.token_ids) for _, p in batch)
        padded = [[*p.token_ids, *[0] * (longest - len(p.token_ids))] for _, p in batch]
        num_drafts, drafts = upload_together(
            [[len(p.token_ids) for _, p in batch], list(itertools.chain.from_iterable(padded))],
            logits.device,
        )
        drafts = drafts.view(len(batch), longest)
        token_ids, is_sound = self.sampler.draw(logits, sampling)
        # [R, K + 1] places of each row's positions in the forward's logits
        first = torch.cumsum(num_drafts + 1, 0) - (num_drafts + 1)
        places = first.unsqueeze(1) + torch.arange(longest + 1, device=logits.device)
        places = torch.minimum(places, (first + num_drafts).unsqueeze(1))
        target_token_ids = token_ids[places]
        num_accepted = accept_coupled(target_token_ids, drafts, num_drafts)
        next_token_ids = target_token_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        if any(_uses_rejection(s) for s in sampling):
            num_accepted, next_token_ids = self._reject(
                batch, sampling, logits, drafts, num_drafts, num_accepted, next_token_ids
            )
        sound = is_sound[places].all(dim=1)
        # The one copy of a step from the device: [R, 3].
        result = torch.stack([num_accepted, next_token_ids, sound.long()], dim=1).tolist()
        logprobs = self._logprobs(batch, sampling, logits, result)
        outcomes = []
        for (planned, proposal), (accepted, next_token_id, is_row_sound), row_logprobs in zip(
            batch, result, logprobs, strict=True
        ):
            error = None if is_row_sound else "the model's logits are not finite"
            emitted = (*proposal.token_ids[:accepted], next_token_id)
            outcomes.append(
                RowOutcome(
                    planned,
                    len(proposal.token_ids),
                    () if error else emitted,
                    0 if error else accepted,
                    row_logprobs,
                    error,
                )
            )
        return outcomes

    def _reject(
        self,
        batch: Sequence[tuple[PlannedRow, Proposal]],
        sampling: Sequence[RowSampling],
        logits: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        num_accepted: torch.Tensor,
        next_token_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace the coupled decision by the rejection rule in the rows that asked for it."""
        chosen = [index for index, row in enumerate(sampling) if _uses_rejection(row)]
        index = upload(chosen, logits.device)
        rows = [sampling[i] for i in chosen]
        longest = drafts.shape[1]
        positions, padded = upload_together(
            _decided_positions(batch, chosen, longest), logits.device
        )
        processed = self.sampler.process(logits.index_select(0, positions), rows)
        probs = torch.softmax(processed, dim=-1)
        vocab_size = probs.shape[-1]
        # What is beyond a row's drafts repeats its last position, and no rule reads it.
        target_probs = probs[padded.view(len(chosen), longest + 1)]
        draft_probs = probs.new_zeros(len(chosen), longest, vocab_size)
        draft_probs.scatter_(2, drafts[index].unsqueeze(2), 1.0)
        for n, i in enumerate(chosen):
            given = batch[i][1].draft_probs
            if given is not None:
                draft_probs[n, : len(given)] = given
        token_ids = torch.arange(vocab_size, device=logits.device)
        zero = torch.zeros(1, dtype=torch.long, device=logits.device)
        uniform = uniform_noise(_keys(rows, longest, Stream.ACCEPT), zero)
        noise = gumbel_noise(_keys(rows, longest + 1, Stream.RECOVER), token_ids)
        accepted, recovered = accept_by_rejection(
            target_probs,
            draft_probs,
            drafts[index],
            num_drafts[index],
            uniform.view(len(chosen), longest),
            noise.view(len(chosen), longest + 1, vocab_size),
        )
        return (
            num_accepted.index_copy(0, index, accepted),
            next_token_ids.index_copy(0, index, recovered),
        )

    def _logprobs(
        self,
        batch: Sequence[tuple[PlannedRow, Proposal]],
        sampling: Sequence[RowSampling],
        logits: torch.Tensor,
        result: Sequence[Sequence[int]],
    ) -> list[tuple[TokenLogprob, ...]]:
        """Of the emitted tokens of the rows that asked, from the logits before any processor;
        those who want as many alternatives are computed together."""
        found: list[tuple[TokenLogprob, ...]] = [()] * len(batch)
        wanted: dict[int, list[int]] = {}
        for i, row in enumerate(sampling):
            if row.params.num_top_logprobs is not None:
                wanted.setdefault(row.params.num_top_logprobs, []).append(i)
        starts = list(itertools.accumulate((r.num_positions for r in sampling), initial=0))
        for num_top, chosen in wanted.items():
            places: list[int] = []
            emitted: list[int] = []
            ends = [0]
            for i in chosen:
                accepted, next_token_id, _ = result[i]
                places += range(starts[i], starts[i] + accepted + 1)
                emitted += [*batch[i][1].token_ids[:accepted], next_token_id]
                ends.append(len(emitted))
            of_these = logits.index_select(0, upload(places, logits.device))
            entries = token_logprobs(of_these, emitted, num_top)
            for i, (start, end) in zip(chosen, itertools.pairwise(ends), strict=True):
                found[i] = entries[start:end]
        return found


def _decided_positions(
    batch: Sequence[tuple[PlannedRow, Proposal]], chosen: Sequence[int], longest: int
) -> tuple[list[int], list[int]]:
    """The places in the forward's logits of the chosen rows' K + 1 positions; and for each
    chosen row `longest` + 1 places among those, its last one repeated."""
    positions: list[int] = []
    padded: list[int] = []
    counts = [len(proposal.token_ids) + 1 for _, proposal in batch]
    starts = list(itertools.accumulate(counts, initial=0))
    for i in chosen:
        last = len(positions) + counts[i] - 1
        padded += [min(len(positions) + at, last) for at in range(longest + 1)]
        positions += range(starts[i], starts[i + 1])
    return positions, padded


def _uses_rejection(row: RowSampling) -> bool:
    params = row.params
    return not params.is_greedy and params.acceptance_rule is AcceptanceRule.REJECTION


def _keys(rows: Sequence[RowSampling], num_positions: int, stream: Stream) -> list[int]:
    return [
        noise_key(row.params.seed, row.first_position + offset, stream)
        for row in rows
        for offset in range(num_positions)
    ]
