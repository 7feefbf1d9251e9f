"""The equivalence auditor: does a finished request hold the tokens of the target alone?

One teacher-forced forward over prompt and output, through the model's own attention and without
any cache of ours, gives the logits at every emitted position. With the request's processors, its
seed and the history of each position, the target's own choice follows; an emitted token that is
not it is a mismatch.

  exact         every token is the target's choice
  numeric_tie   tokens differ where the two choices are closer than rounding can move them
  divergence    anything else: a bug

The limit `epsilon` is calibrated on the loaded model: how far its own attention and ours differ
on the same tokens. Where the engine is bit-exact, a tie must moreover be explained: our own
forward of the whole sequence, in a cache of its own, has to choose the emitted tokens; else it is
a divergence, however close.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from engine.grammar import Grammar, GrammarCompiler
from engine.noise import Stream
from engine.request import AcceptanceRule, GenerationRequest
from engine.sampler import RowSampling, Sampler, TokenHistory, uses_penalties
from engine.suitability import sample_token_ids
from engine.target_runner import TargetRunner

_EPSILON_OVER_DIFFERENCE = 4.0  # two logits move, and others than those measured
_CALIBRATION_LENGTHS = (128, 61, 24, 7)  # kernels, and so roundings, change with the length
_CHUNK = 64  # positions whose processed logits exist at the same time


class AuditVerdict(StrEnum):
    EXACT = "exact"
    NUMERIC_TIE = "numeric_tie"
    DIVERGENCE = "divergence"


@dataclass(frozen=True, slots=True)
class AuditJob:
    """A finished request as it was served."""

    request: GenerationRequest
    output_token_ids: tuple[int, ...]
    guarded_token_ids: tuple[int, ...]
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The verdict. Indices count output tokens; margins are differences of scores, in logits.

    expected_token_id and first_margin are of the first mismatch, the other margins of whichever
    has the smallest and the largest; None where no token differed. job is what it takes to decode
    a divergence again, prompt and output included; None for every other verdict.
    """

    request_id: str
    verdict: AuditVerdict
    num_checked_tokens: int
    num_mismatched_tokens: int
    first_mismatch_index: int | None
    expected_token_id: int | None
    first_margin: float | None
    smallest_margin: float | None
    largest_margin: float | None
    epsilon: float
    audit_seconds: float
    drafter: str
    job: AuditJob | None = None


class AuditQueue:
    """Jobs waiting for idle time: bounded, the oldest give way and are counted."""

    def __init__(self, max_jobs: int) -> None:
        self._jobs: deque[AuditJob] = deque()
        self._max_jobs = max_jobs
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: AuditJob) -> None:
        if len(self._jobs) >= self._max_jobs:
            self._jobs.popleft()
            self.num_dropped += 1
        self._jobs.append(job)

    def take(self) -> AuditJob | None:
        return self._jobs.popleft() if self._jobs else None


class Auditor:
    """Checks finished requests against the target alone. Runs on the engine's thread."""

    def __init__(
        self,
        runner: TargetRunner,
        sampler: Sampler,
        grammars: GrammarCompiler,
        *,
        is_bit_exact: bool,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._is_bit_exact = is_bit_exact
        self._epsilon: float | None = None

    @property
    def epsilon(self) -> float:
        """Calibrated when first needed."""
        if self._epsilon is None:
            self._epsilon = self._calibrate()
        return self._epsilon

    def _calibrate(self) -> float:
        """The largest difference found, with a margin; one unit in the last place at least."""
        found = 0.0
        for length in _CALIBRATION_LENGTHS:
            num_tokens = min(length, self._runner.cache.max_tokens - 1)
            token_ids = sample_token_ids(self._sampler.vocab_size, num_tokens, seed=length)
            own = self._runner.logits_by_own_attention(token_ids, 0)
            difference = (own.float() - self._runner.logits_afresh(token_ids, 0).float()).abs()
            unit = torch.finfo(own.dtype).eps * own.float().abs().max().item()
            found = max(found, _EPSILON_OVER_DIFFERENCE * difference.max().item(), unit)
        return found

    @torch.inference_mode()
    def audit(self, job: AuditJob) -> AuditFinding:
        started = time.perf_counter()
        prompt = list(job.request.prompt_token_ids)
        token_ids = [*prompt, *job.output_token_ids]
        first = len(prompt) - 1
        epsilon = self.epsilon
        own = self._runner.logits_by_own_attention(token_ids[:-1], first)
        mismatches = self._mismatches(job, own)
        margins = [margin for _, _, margin in mismatches]
        verdict = AuditVerdict.EXACT
        if mismatches:
            verdict = AuditVerdict.DIVERGENCE
            is_close = max(margins) < epsilon
            if is_close and self._is_explained(job, token_ids, first):
                verdict = AuditVerdict.NUMERIC_TIE
        return AuditFinding(
            request_id=job.request.request_id,
            verdict=verdict,
            num_checked_tokens=len(job.output_token_ids),
            num_mismatched_tokens=len(mismatches),
            first_mismatch_index=mismatches[0][0] if mismatches else None,
            expected_token_id=mismatches[0][1] if mismatches else None,
            first_margin=margins[0] if margins else None,
            smallest_margin=min(margins, default=None),
            largest_margin=max(margins, default=None),
            epsilon=epsilon,
            audit_seconds=time.perf_counter() - started,
            drafter=job.drafter,
            job=job if verdict is AuditVerdict.DIVERGENCE else None,
        )

    def _is_explained(self, job: AuditJob, token_ids: Sequence[int], first: int) -> bool:
        if not self._is_bit_exact:
            return True
        return not self._mismatches(job, self._runner.logits_afresh(token_ids[:-1], first))

    def _mismatches(self, job: AuditJob, logits: torch.Tensor) -> list[tuple[int, int, float]]:
        """(index, expected token, margin) of every emitted token that is not the target's choice.

        Under the rejection rule any token of the target's distribution may be emitted: a mismatch
        is one that has no probability there, with an infinite margin; see `_at_the_edge` for those
        that a filter would let pass if rounding had fallen otherwise.
        """
        found: list[tuple[int, int, float]] = []
        emitted = job.output_token_ids
        history, grammar = self._history(job), self._grammar(job)
        for start in range(0, len(emitted), _CHUNK):
            chunk = emitted[start : start + _CHUNK]
            row = self._row(job, start, chunk, history, grammar)
            scores = self._sampler.process(logits[start : start + len(chunk)].clone(), [row])
            index = torch.tensor(chunk, device=scores.device).unsqueeze(1)
            if _draws_by_rejection(job.request):
                chosen = scores.gather(1, index).squeeze(1)
                best, expected = scores.max(dim=1)
                is_wrong = torch.isinf(chosen)
            else:
                scores += self._sampler.noise([(row, Stream.TARGET)])
                chosen = scores.gather(1, index).squeeze(1)
                best, expected = scores.max(dim=1)
                is_wrong = expected != index.squeeze(1)
            wrong = is_wrong.nonzero().flatten()
            if len(wrong):
                margins = best - chosen
                edge = self._at_the_edge(job, logits[start:], row, wrong, index, expected)
                margins[wrong] = torch.where(edge.isnan(), margins[wrong], edge)
                for offset in wrong.tolist():
                    found.append((start + offset, int(expected[offset]), margins[offset].item()))
            if history is not None:
                history.append(chunk)
            if grammar is not None:
                grammar.commit(chunk)
        return found

    def _at_the_edge(
        self,
        job: AuditJob,
        logits: torch.Tensor,  # [n, V], n at least the row's positions
        row: RowSampling,
        wrong: torch.Tensor,  # [M] offsets of mismatches
        emitted: torch.Tensor,  # [positions, 1]
        expected: torch.Tensor,  # [positions]
    ) -> torch.Tensor:
        """[M] margins of mismatches that hang on a filter (top_k, top_p, ...), NaN of the others.

        A filter keeps or drops a token as a whole, so a difference in the last bits may turn
        certainty into nothing. Whether that happened is seen by moving the emitted token up and
        the expected one down by epsilon: if that changes which of the two the filters keep, the
        margin is that between the moved ones.
        """
        nudged = logits[: row.num_positions].clone()
        chosen = emitted.squeeze(1)[wrong]
        before = self._sampler.process(nudged.clone(), [row])[wrong]
        nudged[wrong, chosen] += self.epsilon
        nudged[wrong, expected[wrong]] -= self.epsilon
        scores = self._sampler.process(nudged, [row])
        if not _draws_by_rejection(job.request):
            scores += self._sampler.noise([(row, Stream.TARGET)])
        scores = scores[wrong]
        each = torch.arange(len(wrong), device=scores.device)
        is_let_in = before[each, chosen].isinf() & scores[each, chosen].isfinite()
        is_left_out = scores[each, expected[wrong]].isinf() & scores[each, chosen].isfinite()
        margins = scores.max(dim=1).values - scores[each, chosen]
        if _draws_by_rejection(job.request):
            margins = torch.zeros_like(margins)  # kept is all that this rule asks of a token
        return torch.where(is_let_in | is_left_out, margins, torch.full_like(margins, torch.nan))

    def _row(
        self,
        job: AuditJob,
        start: int,
        chunk: Sequence[int],
        history: TokenHistory | None,
        grammar: Grammar | None,
    ) -> RowSampling:
        request = job.request
        return RowSampling(
            params=request.sampling,
            num_positions=len(chunk),
            first_position=len(request.prompt_token_ids) + start,
            draft_token_ids=chunk[:-1],
            history=history,
            num_guarded_positions=max(0, min(len(chunk), request.stopping.min_tokens - start)),
            guarded_token_ids=job.guarded_token_ids,
            allowed=grammar.masks(chunk[:-1]) if grammar is not None else None,
        )

    def _history(self, job: AuditJob) -> TokenHistory | None:
        if not uses_penalties(job.request.sampling):
            return None
        return TokenHistory.of_prompt(
            job.request.prompt_token_ids, self._sampler.vocab_size, self._sampler.device
        )

    def _grammar(self, job: AuditJob) -> Grammar | None:
        wanted = job.request.structured_output
        return self._grammars.compile(wanted) if wanted is not None else None


def _draws_by_rejection(request: GenerationRequest) -> bool:
    sampling = request.sampling
    return not sampling.is_greedy and sampling.acceptance_rule is AcceptanceRule.REJECTION
