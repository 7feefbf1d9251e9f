"""Runs workloads on contenders in turn, and keeps what they gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.benchmarks.peers_contenders import REFERENCE, Contender
from tests.benchmarks.peers_jobs import Job, Served
from tests.benchmarks.peers_parts import Part, Parts
from tests.benchmarks.peers_workloads import Workload

_WARM_UP_TOKENS = 8


class Process(Protocol):
    """What of a PeerProcess is used."""

    versions: dict[str, str]
    peak_bytes: int

    def ask(self, job: Job) -> list[Served] | str: ...


@dataclass(slots=True)
class _Runs:
    figures: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)


def summary(served: Sequence[Served], seconds: float) -> dict[str, Any]:
    """Figures of one run of a workload."""
    gaps = [r.tpot_seconds for r in served if r.tpot_seconds is not None]
    return {
        "tokens_per_second": sum(len(r.token_ids) for r in served) / seconds,
        "ttft_seconds": percentiles([r.ttft_seconds for r in served]),
        "tpot_seconds": percentiles(gaps),
        "latency_seconds": percentiles([r.finished_at - r.sent_at for r in served]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that at least so many percent do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 99)}


def warm_up(job: Job) -> Job:
    """The first requests, a few tokens each: shapes are seen, nothing is measured."""
    count = min(job.num_rows, len(job.prompts))
    return Job(
        job.mode,
        job.num_rows,
        job.prompts[:count],
        tuple(min(_WARM_UP_TOKENS, tokens) for tokens in job.max_tokens[:count]),
        job.tenants[:count],
    )


class Comparison:
    """Contenders whose processes run. The reference takes part wherever a part is missing."""

    def __init__(
        self,
        processes: Mapping[str, Process],
        contenders: Sequence[Contender],
        parts: Parts,
    ) -> None:
        self._processes = processes
        self._contenders = contenders
        self._parts = parts
        self.refused: dict[str, str] = {}

    def run(self, workload: Workload, rounds: int) -> None:
        """One warm-up, then every contender once a round, in changing order."""
        key = f"{workload.name}@{workload.num_rows}"
        missing = [
            contender
            for contender in self._contenders
            if contender.kind in self._processes
            and self._parts.find(contender.name, key) is None
            and not self._refuses(contender.name, key)
        ]
        if not missing:
            return
        reference = [c for c in self._contenders if c.name == REFERENCE and c not in missing]
        runs = {contender.name: _Runs() for contender in [*reference, *missing]}
        for number in range(-1, rounds):
            turn = [*reference, *missing]
            for contender in turn if number % 2 == 0 else reversed(turn):
                if contender.name in runs and not self._one(
                    contender, workload, key, number, runs[contender.name]
                ):
                    del runs[contender.name]
        own = runs.get(REFERENCE)
        if own is None:
            return
        for contender in missing:
            if (found := runs.get(contender.name)) is not None:
                pairs = zip(own.token_ids, found.token_ids, strict=True)
                self._parts.keep(
                    Part(
                        contender.name,
                        key,
                        self._processes[contender.kind].versions,
                        tuple(found.figures),
                        tuple(own.figures),
                        num_requests=len(found.token_ids),
                        num_identical=sum(a == b for a, b in pairs),
                    )
                )

    def _refuses(self, name: str, key: str) -> bool:
        return f"{name} {key}" in self.refused

    def _one(
        self, contender: Contender, workload: Workload, key: str, number: int, runs: _Runs
    ) -> bool:
        """Whether it did what was asked."""
        process = self._processes[contender.kind]
        served: list[Served] = []
        seconds = 0.0
        for job in workload.jobs:
            # Every run has tenants of its own: no run finds the prompts of one before it cached.
            tenants = tuple(f"{contender.mode}-{number}-{tenant}" for tenant in job.tenants)
            asked = replace(job, mode=contender.mode, tenants=tenants)
            answer = process.ask(warm_up(asked) if number < 0 else asked)
            if isinstance(answer, str):
                self.refused[f"{contender.name} {key}"] = answer
                print(f"{key:24} {contender.name:24} refused: {answer}", flush=True)
                return False
            served.extend(answer)
            seconds += max(request.finished_at for request in answer)
        if number >= 0:
            figures = summary(served, seconds)
            runs.figures.append(figures | {"peak_bytes": process.peak_bytes})
            runs.token_ids = [request.token_ids for request in served]
            rate = figures["tokens_per_second"]
            print(f"{key:24} {contender.name:24} {rate:8.1f} tokens/s", flush=True)
        return True
