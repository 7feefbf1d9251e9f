"""The two ways in which engines are driven: step by step, or one static batch after the other.

Nothing is imported but the standard library: peers run this in environments of their own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tests.benchmarks.peers_jobs import Job, RefusedError, Served

_STALL_SECONDS = 180.0


def serve_steps(
    job: Job,
    submit: Callable[[int], None],
    step: Callable[[], Iterable[tuple[int, Sequence[int]]]],
) -> list[Served]:
    """Keep up to num_rows requests in an engine that batches continuously.

    submit takes the request with that index of the job; step advances what was submitted and
    gives (index, new tokens). A request is over when it has the tokens it asked for.
    Raises RefusedError when no token comes for minutes.
    """
    tokens: list[list[int]] = [[] for _ in job.prompts]
    sent: dict[int, float] = {}
    first: dict[int, float] = {}
    finished: dict[int, float] = {}
    started = time.perf_counter()
    progress_at = 0.0
    while len(finished) < len(tokens):
        now = time.perf_counter() - started
        while (
            (index := len(sent)) < len(tokens)
            and index - len(finished) < job.num_rows
            and job.arrived_at(index) <= now
        ):
            submit(index)
            sent[index] = now if job.arrivals is None else job.arrived_at(index)
        if len(sent) == len(finished):
            time.sleep(max(0.0, job.arrived_at(len(sent)) - now))
            progress_at = time.perf_counter() - started
            continue
        new = list(step())
        now = time.perf_counter() - started
        for index, found in new:
            if not found:
                continue
            progress_at = now
            tokens[index].extend(found)
            first.setdefault(index, now)
            if len(tokens[index]) >= job.max_tokens[index]:
                finished.setdefault(index, now)
        if now - progress_at > _STALL_SECONDS:
            raise RefusedError(f"no token for {_STALL_SECONDS:.0f} s")
    return [Served(tuple(t), sent[i], first[i], finished[i]) for i, t in enumerate(tokens)]


def serve_batches(
    job: Job, run_batch: Callable[[list[int], float], Iterable[Served]]
) -> list[Served]:
    """Static batches: each starts with what has arrived and ends with its longest request.

    run_batch takes the indices of a batch and the job's start in perf_counter's seconds.
    """
    waiting = deque(range(len(job.prompts)))
    served: dict[int, Served] = {}
    started = time.perf_counter()
    while waiting:
        now = time.perf_counter() - started
        if (wait := job.arrived_at(waiting[0]) - now) > 0:
            time.sleep(wait)
            continue
        batch = [waiting.popleft()]
        while waiting and len(batch) < job.num_rows and job.arrived_at(waiting[0]) <= now:
            batch.append(waiting.popleft())
        for index, found in zip(batch, run_batch(batch, started), strict=True):
            served[index] = found
    return [served[index] for index in range(len(job.prompts))]
