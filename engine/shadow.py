"""Measures heads on finished requests: what each would have drafted, and what was the target's own.

The output of a lossless engine is the target's whatever drafted it, so a replay over a finished
request's tokens gives the acceptance that a head would have had, exactly: the hidden states are
computed by our own forward, and the drafts are the head's own code over them. Rounds are full
ones (K drafts, less before the end), with all of the context heard, so that heads measured on the
same request can be compared; a live round may draft fewer.

Nothing of it is seen by requests. It runs in idle time, in slices no longer than a step; a step
that comes puts the replay aside, and its rows in the heads' caches are free again.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.config import ShadowPlan
from engine.drafter.base import DraftJob
from engine.drafter.drawing import draws_by_rejection
from engine.drafter.head.drafter import HeadDrafter
from engine.kv_cache import KVCache
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest
from engine.model_runner import ModelRunner
from engine.request import GenerationRequest
from engine.sampler import Sampler, TokenHistory, uses_penalties

_CHUNK_TOKENS = 64  # of a forward that nobody waits for
_ROUNDS_PER_SLICE = 4
_MAX_TOKENS = 4096
_MAX_INTERRUPTIONS = 8


@dataclass(frozen=True, slots=True)
class ShadowJob:
    """A finished request as it was served, and who shall be measured on it."""

    request: GenerationRequest
    output_token_ids: tuple[int, ...]
    guarded_token_ids: tuple[int, ...]
    drafters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShadowFinding:
    """One head on one request. num_given_up: chosen requests that were not measured, since the
    finding before this one."""

    request_id: str
    drafter: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    replay_seconds: float
    num_given_up: int = 0


class ShadowQueue:
    """Requests that wait for idle time: bounded, the oldest give way and are counted."""

    def __init__(self, max_jobs: int) -> None:
        self.plans: tuple[ShadowPlan, ...] = ()
        self._jobs: deque[ShadowJob] = deque()
        self._max_jobs = max_jobs
        self._num_given_up = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def offer(self, live: LiveRequest) -> None:
        """Take a request that a plan chooses, by its id alone, and that a replay can measure.

        Under the rejection rule the tokens depend on the drafts, so they tell nothing of others';
        a grammar would have to be replayed beside.
        """
        chance = zlib.crc32(f"shadow {live.request_id}".encode()) / 2**32
        names = [name for plan in self.plans if chance < plan.share for name in plan.drafters]
        if not names or live.num_output_tokens < 2:
            return
        if draws_by_rejection(live) or live.grammar is not None or live.num_tokens > _MAX_TOKENS:
            self.give_up()
            return
        if len(self._jobs) >= self._max_jobs:
            self._jobs.popleft()
            self.give_up()
        output = tuple(live.token_ids[live.num_prompt_tokens :])
        drafters = tuple(dict.fromkeys(names))
        self._jobs.append(ShadowJob(live.request, output, live.guarded_token_ids, drafters))

    def take(self) -> ShadowJob | None:
        return self._jobs.popleft() if self._jobs else None

    def give_up(self) -> None:
        self._num_given_up += 1

    def take_num_given_up(self) -> int:
        count, self._num_given_up = self._num_given_up, 0
        return count


class ShadowReplay:
    """One job, a slice at a time."""

    def __init__(
        self,
        job: ShadowJob,
        heads: Sequence[HeadDrafter],
        runner: ModelRunner,
        sampler: Sampler,
        num_drafts: int,
    ) -> None:
        self._job = job
        self._heads = tuple(heads)
        self._runner = runner
        self._sampler = sampler
        self._num_drafts = num_drafts
        self._token_ids = [*job.request.prompt_token_ids, *job.output_token_ids]
        self._request = replace(job.request, request_id=f"shadow {job.request.request_id}")
        self._captured: list[torch.Tensor] | None = None  # [T - 1, 3H] per head
        self._findings: list[ShadowFinding] = []
        self._work = self._slices()
        self._is_begun = False
        self._num_interruptions = 0

    def is_with(self, find: Callable[[str], HeadDrafter | None]) -> bool:
        """Whether its heads are the engine's still."""
        return all(find(head.name) is head for head in self._heads)

    def advance(self) -> tuple[ShadowFinding, ...] | None:
        """Do a slice; the findings when it was the last one, else None."""
        self._is_begun = True
        if next(self._work, None) is None:
            return tuple(self._findings)
        return None

    def interrupt(self) -> bool:
        """Let go of everything that a step may need; False when this was once too often."""
        if not self._is_begun:
            return True
        self._is_begun = False
        self._work.close()
        for head in self._heads:
            head.forget(self._request.request_id)
        self._work = self._slices()
        self._num_interruptions += 1
        return self._num_interruptions <= _MAX_INTERRUPTIONS

    def _slices(self) -> Generator[bool, None, None]:
        if self._captured is None:
            yield from self._capture()
        for head, captured in zip(
            self._heads[len(self._findings) :],
            (self._captured or [])[len(self._findings) :],
            strict=True,
        ):
            yield from self._rounds(head, captured)

    def _capture(self) -> Generator[bool, None, None]:
        """The target over the whole text, in a cache of its own, as it computes requests."""
        token_ids = self._token_ids[:-1]
        served = self._runner.cache
        scratch = KVCache(
            served.shape, max_num_rows=1, max_tokens=max(len(token_ids), 2), num_blocks=1
        )
        row, _ = scratch.allocate_row(token_ids[:1])
        parts: list[list[torch.Tensor]] = [[] for _ in self._heads]
        for start in range(0, len(token_ids), _CHUNK_TOKENS):
            chunk = token_ids[start : start + _CHUNK_TOKENS]
            self._runner.cache = scratch
            try:
                self._runner.forward([ForwardRow(row, chunk, start, 1)])
            finally:
                self._runner.cache = served
            scratch.commit(row, token_ids, start + len(chunk))
            for found, head in zip(parts, self._heads, strict=True):
                found.append(head.take_states()[: len(chunk)].clone())
            yield True
        self._captured = [torch.cat(found) for found in parts]

    def _rounds(self, head: HeadDrafter, captured: torch.Tensor) -> Generator[bool, None, None]:
        """Rounds as the engine makes them: n accepted drafts, then n + 1 tokens further."""
        started, seconds = time.perf_counter(), 0.0
        job, token_ids = self._job, self._token_ids
        known = len(job.request.prompt_token_ids) + 1
        live = self._live(known)
        num_heard = num_rounds = num_drafted = num_accepted = 0
        while known < len(token_ids):
            head.hear(live, num_heard, captured[num_heard : known - 1])
            num_heard = known - 1
            most = min(self._num_drafts, len(token_ids) - known - 1)
            drafts: tuple[int, ...] = ()
            if most:
                drafts = head.propose([DraftJob(live, known, most)])[0].token_ids
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == token_ids[known + accepted]:
                accepted += 1
            fresh = token_ids[known : known + accepted + 1]
            live.token_ids.extend(fresh)
            if live.history is not None:
                live.history.append(fresh)
            known += accepted + 1
            num_rounds += 1
            num_drafted += len(drafts)
            num_accepted += accepted
            if num_rounds % _ROUNDS_PER_SLICE == 0 and known < len(token_ids):
                seconds += time.perf_counter() - started
                yield True
                started = time.perf_counter()
        head.forget(live.request_id)
        self._findings.append(
            ShadowFinding(
                job.request.request_id,
                head.name,
                num_rounds,
                num_drafted,
                num_accepted,
                seconds + time.perf_counter() - started,
            )
        )

    def _live(self, num_known: int) -> LiveRequest:
        live = LiveRequest(self._request, self._token_ids[:num_known])
        live.guarded_token_ids = self._job.guarded_token_ids
        if uses_penalties(self._request.sampling):
            live.history = TokenHistory.of_prompt(
                self._request.prompt_token_ids, self._sampler.vocab_size, self._sampler.device
            )
            live.history.append(self._token_ids[num_known - 1 : num_known])
        return live


class Shadow:
    """All of it, for an engine: what finishes is offered, idle time is given, steps interrupt.

    find: a loaded head by its drafter's name; None for one that has gone meanwhile.
    """

    def __init__(
        self,
        find: Callable[[str], HeadDrafter | None],
        runner: ModelRunner | None,
        sampler: Sampler,
        max_jobs: int,
    ) -> None:
        self._find = find
        self._runner = runner
        self._sampler = sampler
        self._replay: ShadowReplay | None = None
        self.queue = ShadowQueue(max_jobs)

    def advance(self, num_drafts: int) -> tuple[ShadowFinding, ...] | None:
        """A slice of idle work: what it found, mostly nothing; None when there is none to do."""
        if self._replay is not None and not self._replay.is_with(self._find):
            self._replay.interrupt()  # a head of it was taken out of the engine
            self._replay = None
            self.queue.give_up()
        if self._replay is None:
            self._replay = self._next(num_drafts)
        if self._replay is None:
            return None
        try:
            found = self._replay.advance()
        except BaseException:
            self._replay.interrupt()
            self._replay = None
            raise
        if found is None:
            return ()
        self._replay = None
        if not found:
            return ()
        return (replace(found[0], num_given_up=self.queue.take_num_given_up()), *found[1:])

    def interrupt(self) -> None:
        """A step comes."""
        if self._replay is not None and not self._replay.interrupt():
            self._replay = None
            self.queue.give_up()

    def _next(self, num_drafts: int) -> ShadowReplay | None:
        while (job := self.queue.take()) is not None:
            heads = [head for name in job.drafters if (head := self._find(name)) is not None]
            if len(heads) == len(job.drafters) and self._runner is not None and num_drafts:
                return ShadowReplay(job, heads, self._runner, self._sampler, num_drafts)
            self.queue.give_up()
        return None
