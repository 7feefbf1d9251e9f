"""What each layout costs: `python -m tests.benchmarks.layouts` -> build/bench/layouts.json, .png.

Per layout and number of rows B, on Spec-Bench prompts with prompt lookup: tokens per second, calls
of the target, tokens computed with and without padding, where the time went, the share of groups of
one length, and the latency of requests that arrive at random. Arrivals are simulated by the
clock of the steps: waiting for one takes no time here.

alignment_share           by B: of the steps' time, laying rows out for the model
identical_tokens          whether every request got the same tokens in all layouts and runs
grouped_p99_over_aligned  of the latency, at the same arrivals, by B; the grouped pool is twice B
auto_over_off             by B: tokens per second with speculation "auto" over "off", ragged
contexts_apart_over_together  ragged: rows grouped by context over all in one attention call
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.engine import Engine
from engine.request import GenerationRequest
from engine.stats import StepStats
from tests.benchmarks.layouts_contexts import contexts_apart
from tests.benchmarks.layouts_plot import plot
from tests.benchmarks.workloads import (
    BUILD,
    chat_token_ids,
    greedy_request,
    make_engine,
    set_threads,
    spec_bench_prompts,
    write_result,
)

LAYOUTS = ("ragged", "aligned", "grouped")
ROWS = (1, 2, 4, 8, 16, 32)
POOL_OVER_GROUP = 2
LOAD = 0.7  # of what the aligned layout can do, in the runs with arrivals


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run: requests per row and their tokens, arrivals and the B they are run at."""

    requests_per_row: int
    max_tokens: int
    longest_prompt: int
    num_arrivals: int
    arrival_rows: tuple[int, ...]
    rounds: int
    arrival_tokens: int


QUICK = Effort(2, 8, 64, 40, (4,), 2, 8)
FULL = Effort(4, 64, 256, 150, ROWS, 5, 32)


@dataclass(slots=True)
class Run:
    """What one run gave; seconds are of the steps."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_calls: int = 0
    num_positions: int = 0
    num_row_tokens: int = 0
    num_groups: int = 0
    num_uniform_groups: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs.values())) / self.seconds


class Bench:
    """One engine per layout, made when first needed; B limits the requests it has at a time."""

    def __init__(self, dtype: str, clock: Callable[[], float], effort: Effort) -> None:
        self.clock = clock
        self.effort = effort
        self._num_batches = 0
        self._dtype = dtype
        self._engines: dict[str, Engine] = {}
        ragged = self.engine("ragged")
        encoded = [chat_token_ids(ragged, prompt) for _, prompt in spec_bench_prompts()]
        self.prompts = [ids for ids in encoded if len(ids) <= effort.longest_prompt]

    def engine(self, layout: str) -> Engine:
        if layout not in self._engines:
            self._engines[layout] = make_engine(
                self._dtype,
                POOL_OVER_GROUP * max(ROWS),
                layout=layout,
                max_model_tokens=512,
                max_step_tokens=256,
                cost_table_folder=str(BUILD / "cost-tables"),
            )
        return self._engines[layout]

    def requests(
        self, count: int, mode: str = "auto", max_tokens: int | None = None
    ) -> list[GenerationRequest]:
        self._num_batches += 1  # no run finds prompts of one before it in a cache
        prompts, max_tokens = self.prompts, max_tokens or self.effort.max_tokens
        return [
            greedy_request(
                f"{self._num_batches}:{n}",
                prompts[n % len(prompts)],
                max_tokens,
                mode,
                ignore_eos=True,
            )
            for n in range(count)
        ]

    def run(
        self,
        layout: str,
        num_rows: int,
        requests: Sequence[GenerationRequest],
        arrivals: Sequence[float] | None = None,
    ) -> Run:
        """All requests, at most num_rows at a time (twice as many in the pool of groups)."""
        engine = self.engine(layout)
        scheduler, runner = engine._scheduler, engine._verifier.runner
        if layout == "grouped":
            scheduler.group_rows = num_rows
        limit = num_rows * (POOL_OVER_GROUP if layout == "grouped" else 1)
        arrived_at = list(arrivals or [0.0] * len(requests))
        run, now, next_one = Run(), 0.0, 0
        before = _counts(scheduler, runner)
        running: dict[str, float] = {}
        while next_one < len(requests) or running:
            if not running and arrived_at[next_one] > now:
                now = arrived_at[next_one]
            while next_one < len(requests) and len(running) < limit:
                if arrived_at[next_one] > now:
                    break
                request = requests[next_one]
                engine.submit(request)
                running[request.request_id] = arrived_at[next_one]
                next_one += 1
            started = self.clock()
            step = engine.step()
            seconds = self.clock() - started
            now += seconds
            run.seconds += seconds
            if step.stats is not None:
                run.steps.append(step.stats)
            for delta in step.deltas:
                run.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            for stats in step.finished:
                run.latencies.append(now - running.pop(stats.request_id))
        counts = [
            after - old for after, old in zip(_counts(scheduler, runner), before, strict=True)
        ]
        run.num_calls, run.num_positions, run.num_row_tokens = counts[:3]
        run.num_groups, run.num_uniform_groups = counts[3:]
        return run


def _counts(scheduler: Any, runner: Any) -> list[int]:
    return [
        runner.num_forwards,
        runner.num_positions,
        runner.num_row_tokens,
        scheduler.num_groups,
        scheduler.num_uniform_groups,
    ]


def figures(run: Run) -> dict[str, Any]:
    total = sum(step.duration_nanoseconds for step in run.steps)
    shares = {
        name: round(sum(getattr(s, f"{field}_nanoseconds") for s in run.steps) / total, 4)
        for name, field in (
            ("draft", "propose"), ("verify", "verify"), ("align", "align"), ("sample", "sample")
        )
    }  # fmt: skip
    rate = run.num_uniform_groups / run.num_groups if run.num_groups else None
    return {
        "tokens_per_second": round(run.tokens_per_second, 1),
        "target_calls": run.num_calls,
        "row_tokens": run.num_positions,
        "row_tokens_with_padding": run.num_row_tokens,
        "share": shares,
        "group_rate": None if rate is None else round(rate, 3),
    }


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3)
        for share in (50, 90, 99)
    }


def by_layout(bench: Bench) -> tuple[dict[str, Any], bool]:
    """Figures per layout and B, and whether all tokens were equal."""
    found: dict[str, Any] = {name: {"by_rows": {}, "alignment_share": {}} for name in LAYOUTS}
    outputs: dict[str, list[int]] = {}
    identical = True
    for layout in LAYOUTS:  # kernels are built on first use
        bench.run(layout, 2, bench.requests(4))
    for num_rows in ROWS:
        requests = bench.requests(max(8, bench.effort.requests_per_row * num_rows))
        for layout in LAYOUTS:
            run = bench.run(layout, num_rows, requests)
            for request_id, token_ids in run.outputs.items():
                number = request_id.partition(":")[2]
                identical &= outputs.setdefault(number, token_ids) == token_ids
            of_run = figures(run)
            found[layout]["by_rows"][str(num_rows)] = of_run
            found[layout]["alignment_share"][str(num_rows)] = of_run["share"]["align"]
            print(layout, num_rows, of_run, flush=True)
    return found, identical


def under_arrivals(bench: Bench, found: dict[str, Any]) -> dict[str, float]:
    """Latency of all layouts at the same random arrivals; adds it to `found`."""
    ratios = {}
    for num_rows in bench.effort.arrival_rows:
        rate = (
            found["aligned"]["by_rows"][str(num_rows)]["tokens_per_second"]
            / bench.effort.arrival_tokens
        )
        generator, now, arrivals = random.Random(num_rows), 0.0, []
        for _ in range(bench.effort.num_arrivals):
            now += generator.expovariate(LOAD * rate)
            arrivals.append(now)
        for layout in LAYOUTS:
            requests = bench.requests(len(arrivals), max_tokens=bench.effort.arrival_tokens)
            run = bench.run(layout, num_rows, requests, arrivals)
            latency = percentiles(run.latencies)
            found[layout]["by_rows"][str(num_rows)]["latency_seconds"] = latency
            print(layout, num_rows, latency, flush=True)
        p99 = {
            name: found[name]["by_rows"][str(num_rows)]["latency_seconds"]["p99"]
            for name in LAYOUTS
        }
        ratios[str(num_rows)] = round(p99["grouped"] / p99["aligned"], 3)
    return ratios


def auto_over_off(bench: Bench) -> dict[str, float]:
    """Median over pairs of runs in turn, so that a slower hour hits both."""
    ratios = {}
    for num_rows in ROWS:
        pairs = []
        for _ in range(bench.effort.rounds):
            count = max(4, num_rows)
            speeds = {
                mode: bench.run("ragged", num_rows, bench.requests(count, mode)).tokens_per_second
                for mode in ("off", "auto")
            }
            pairs.append(speeds["auto"] / speeds["off"])
        ratios[str(num_rows)] = round(statistics.median(pairs), 3)
        print("auto / off", num_rows, ratios[str(num_rows)], flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--part", choices=("layouts", "arrivals", "auto", "contexts"), help="others are kept"
    )
    parser.add_argument("--quick", action="store_true", help="minutes, with rougher figures")
    parser.add_argument("--cpu-clock", action="store_true", help="processor time: a busy machine")
    options = parser.parse_args()
    set_threads(options.threads)
    clock = time.process_time if options.cpu_clock else time.perf_counter
    bench = Bench(options.dtype, clock, QUICK if options.quick else FULL)
    path = BUILD / "layouts.json"
    result = json.loads(path.read_text()) if options.part != "layouts" and path.is_file() else {}
    result |= {name: getattr(options, name) for name in ("dtype", "threads", "quick", "cpu_clock")}
    if options.part in (None, "layouts"):
        result["layouts"], result["identical_tokens"] = by_layout(bench)
    if options.part in (None, "arrivals"):
        result["grouped_p99_over_aligned"] = under_arrivals(bench, result["layouts"])
    if options.part in (None, "auto"):
        result["auto_over_off"] = auto_over_off(bench)
    if options.part in (None, "contexts"):
        result["contexts_apart_over_together"] = contexts_apart(
            options.dtype, clock, bench.effort.rounds
        )
    write_result("layouts", result)
    plot(result, BUILD / "layouts.png")


if __name__ == "__main__":
    main()
