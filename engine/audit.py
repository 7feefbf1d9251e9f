"""The equivalence auditor: does a finished request hold the tokens of the target alone?

A teacher-forced reading of prompt and output, through the model's own attention and without any
cache of ours, gives the logits at every emitted position. With the request's processors, its
seed and the history of each position, the target's own choice follows; an emitted token that is
not it is a mismatch. So is an output that ends where nothing ends it, goes on after its end, or
names another reason (engine/audit_ending.py).

  exact         every token is the target's choice, and the last one is where the output ends
  numeric_tie   tokens differ where the two choices are closer than rounding can move them
  divergence    anything else: a bug

The limit `epsilon` is calibrated on the loaded model: how far its own attention and ours differ
on the same tokens. Where the engine is bit-exact, a tie must moreover be explained: our own
forward of the whole sequence, in a cache of its own, has to choose the emitted tokens; else it is
a divergence, however close.

All of it comes in slices of a bounded number of positions, so that whoever has other work in
between waits for no more than one.
"""

import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import torch

from engine.agreement import agrees
from engine.audit_ending import Ending, EndingRules
from engine.audit_tokens import Mismatch, TokenCheck
from engine.grammar import GrammarCompiler
from engine.reading import Reading
from engine.request import GenerationRequest
from engine.sampler import Sampler
from engine.shards import BrokenShardsError
from engine.suitability import sample_token_ids
from engine.target_runner import TargetRunner

_logger = logging.getLogger(__name__)

SLICE_TOKENS = 64  # positions of a forward that nobody waits for
_EPSILON_OVER_DIFFERENCE = 4.0  # two logits move, and others than those measured
_CALIBRATION_LENGTHS = (128, 61, 24, 7)  # kernels, and so roundings, change with the length

_Found = TypeVar("_Found")


class AuditVerdict(StrEnum):
    EXACT = "exact"
    NUMERIC_TIE = "numeric_tie"
    DIVERGENCE = "divergence"


@dataclass(frozen=True, slots=True)
class AuditJob:
    """A finished request as it was served. Without an ending, that of tokens somebody made up,
    only the tokens are checked."""

    request: GenerationRequest
    output_token_ids: tuple[int, ...]
    ending: Ending | None = None
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The verdict. Indices count output tokens; margins are differences of scores, in logits.

    expected_token_id and first_margin are of the first mismatch, the other margins of whichever
    has the smallest and the largest; None where no token differed. wrong_ending says what is
    wrong with where the output ends, for people, and is empty otherwise; its tokens are counted
    with the mismatched ones. job is what it takes to decode a divergence again, prompt and output
    included; None for every other verdict.
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
    wrong_ending: str = ""
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
        rules: EndingRules,
        *,
        is_bit_exact: bool,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._rules = rules
        self._is_bit_exact = is_bit_exact
        self._epsilon: float | None = None
        self._reads_whole = False

    @property
    def epsilon(self) -> float:
        """Calibrated when first needed."""
        _finish(self._calibrate())
        assert self._epsilon is not None  # noqa: S101 - for the type checker
        return self._epsilon

    def audit(self, job: AuditJob) -> AuditFinding:
        """All of it at once."""
        return _finish(self.slices(job))

    def slices(self, job: AuditJob) -> Generator[None, None, AuditFinding]:
        """The audit of one request. A step of the generator is one forward of at most
        SLICE_TOKENS positions, the first ones of all, which calibrate, as many as 128 positions;
        nothing of it is seen by what runs in between. Where the model cannot read over its own
        cache, its own reading is one forward of the whole text."""
        work, seconds = self._work(job), 0.0
        while True:
            started = time.perf_counter()
            try:
                next(work)
            except StopIteration as end:
                finding: AuditFinding = end.value
                seconds += time.perf_counter() - started
                return replace(finding, audit_seconds=seconds)
            seconds += time.perf_counter() - started
            yield

    def _work(self, job: AuditJob) -> Generator[None, None, AuditFinding]:
        yield from self._calibrate()
        mismatches: list[Mismatch] = []
        for found in self._mismatches(job, self._own_reading(), is_own=True):
            mismatches += found
            yield
        is_tie = all(mismatch.margin < self.epsilon for mismatch in mismatches)
        if mismatches and is_tie and self._is_bit_exact:
            num_tokens = len(job.request.prompt_token_ids) + len(job.output_token_ids)
            fresh = self._runner.fresh_reading(num_tokens)
            for found in self._mismatches(job, fresh, is_own=False):
                is_tie = is_tie and not found
                yield
        return self._finding(job, mismatches, is_tie=is_tie)

    def _finding(
        self, job: AuditJob, mismatches: Sequence[Mismatch], *, is_tie: bool
    ) -> AuditFinding:
        wrong = None
        if job.ending is not None:
            wrong = self._rules.check(job.request, job.output_token_ids, job.ending)
        verdict = AuditVerdict.EXACT
        if wrong is not None or (mismatches and not is_tie):
            verdict = AuditVerdict.DIVERGENCE
        elif mismatches:
            verdict = AuditVerdict.NUMERIC_TIE
        margins = [mismatch.margin for mismatch in mismatches]
        first = mismatches[0] if mismatches else None
        indices = [m.index for m in mismatches[:1]] + ([wrong.index] if wrong else [])
        return AuditFinding(
            request_id=job.request.request_id,
            verdict=verdict,
            num_checked_tokens=len(job.output_token_ids),
            num_mismatched_tokens=len(mismatches) + (wrong.num_tokens if wrong else 0),
            first_mismatch_index=min(indices, default=None),
            expected_token_id=first.expected_token_id if first else None,
            first_margin=first.margin if first else None,
            smallest_margin=min(margins, default=None),
            largest_margin=max(margins, default=None),
            epsilon=self.epsilon,
            audit_seconds=0.0,
            drafter=job.drafter,
            wrong_ending=wrong.what if wrong else "",
            job=job if verdict is AuditVerdict.DIVERGENCE else None,
        )

    def _mismatches(
        self, job: AuditJob, reading: Reading, *, is_own: bool
    ) -> Generator[list[Mismatch], None, None]:
        """Those of each slice."""
        request, wanted = job.request, job.request.structured_output
        check = TokenCheck(
            self._sampler,
            request,
            job.output_token_ids,
            self._rules.stop_token_ids(request),
            self._grammars.compile(wanted) if wanted is not None else None,
            self.epsilon,
        )
        token_ids = [*request.prompt_token_ids, *job.output_token_ids][:-1]
        first = len(request.prompt_token_ids) - 1
        if not job.output_token_ids:
            return
        size = len(token_ids) if is_own and self._reads_whole else SLICE_TOKENS
        for start in range(0, len(token_ids), size):
            chunk = token_ids[start : start + size]
            num_logits = max(0, start + len(chunk) - max(start, first))
            logits = reading.read(chunk, num_logits)
            found: list[Mismatch] = []
            for part in torch.split(logits, SLICE_TOKENS):  # what is processed is in float32
                found += check.check(part)
            yield found

    # ---- calibration ------------------------------------------------------------------

    def _calibrate(self) -> Generator[None, None, None]:
        """Sets epsilon, if it is not yet: the largest difference found, with a margin; one unit
        in the last place at least."""
        if self._epsilon is not None:
            return
        epsilon = 0.0
        for length in _CALIBRATION_LENGTHS:
            num_tokens = min(length, self._runner.cache.max_tokens - 1)
            token_ids = sample_token_ids(self._sampler.vocab_size, num_tokens, seed=length)
            if length == max(_CALIBRATION_LENGTHS):
                whole = self._runner.own_reading(is_whole=True).read(token_ids, num_tokens)
                yield
                self._reads_whole = not self._reads_in_slices(token_ids, whole)
                yield
            own = self._read(self._own_reading(), token_ids)
            yield
            fresh = self._runner.fresh_reading(num_tokens)
            difference = (own.float() - self._read(fresh, token_ids).float()).abs()
            unit = torch.finfo(own.dtype).eps * own.float().abs().max().item()
            epsilon = max(epsilon, _EPSILON_OVER_DIFFERENCE * difference.max().item(), unit)
            yield
        self._epsilon = epsilon

    def _reads_in_slices(self, token_ids: Sequence[int], whole: torch.Tensor) -> bool:
        """Whether over its own kind of cache the model gives the logits `whole`, as without."""
        try:
            sliced = self._read(self._runner.own_reading(is_whole=False), token_ids)
        except BrokenShardsError:
            raise
        except Exception:
            _logger.warning("the target cannot read over its own cache: audits read whole texts")
            return False
        return agrees(whole, sliced)

    def _own_reading(self) -> Reading:
        return self._runner.own_reading(is_whole=self._reads_whole)

    def _read(self, reading: Reading, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] of all tokens."""
        size = len(token_ids) if self._reads_whole else SLICE_TOKENS
        parts = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
        return torch.cat([reading.read(part, len(part)) for part in parts])


def _finish(work: Generator[None, None, _Found]) -> _Found:
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: _Found = end.value
            return found
