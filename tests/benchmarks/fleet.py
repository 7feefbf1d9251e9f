"""How a fleet grows with its traffic: `make bench-fleet` -> build/bench/fleet.json, fleet.png.

Replays twenty minutes of the Azure LLM inference trace of 2023 at 1x to 1,000x on simulated
replicas whose speed is a measured cost table of the engine (--cost-table FILE, such as one of
$TANDEM_HOME/cost-tables; without it that of k8s/figures.toml), under the autoscaler of
k8s/base/scale.yaml. Traffic beyond what one fleet takes is split evenly over equal fleets, of
which one is simulated. Beside it stand what the traffic asks of ledger and exports, and what they
were measured to give (build/bench/ledger.json and exports.json, else k8s/figures.toml).
"""

import argparse
import json
import math
import os
import random
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from engine.cost_table import CostTable
from exports.sample.trace import Trace, read_traces
from tests.benchmarks.fleet_autoscaler import Autoscaler, Policy, Reading, read_policy
from tests.benchmarks.fleet_limits import demands, first_to_give, read_schedule
from tests.benchmarks.fleet_model import Fleet, Job, Shape

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
DATA = Path(os.environ.get("TANDEM_DATA", ROOT.parent / "shared" / "data"))
FACTORS = (1, 10, 100, 1000)
CONTEXT_TOKENS = 8192  # of the recorded model; longer requests of the trace are cut to it
JITTER_SECONDS = 30.0
FLEET_REPLICAS = 64  # at most so many servers share a home
PLANNED_USE = 0.6  # of a full fleet on average; bursts take the rest

FIGURES = tomllib.loads((ROOT / "k8s" / "figures.toml").read_text(encoding="utf-8"))
RECORDED_COST = CostTable(
    tuple(FIGURES["target"]["step_tokens"]), tuple(FIGURES["target"]["step_seconds"])
)
KV_BYTES_PER_TOKEN = FIGURES["target"]["kv_bytes_per_token"]
SCHEDULE = read_schedule(ROOT / "k8s" / "base" / "export.yaml")


def jobs_of(
    traces: Iterable[Trace], factor: float, seconds: float, seed: int, surge: bool = False
) -> list[Job]:
    """The trace's first `seconds`, each request `factor` times at about its time.

    surge: twice as many in the third fifth of the time.
    """
    chance, jobs = random.Random(seed), []
    for trace in traces:
        for at, prompt, output in zip(
            trace.arrival_seconds, trace.num_prompt_tokens, trace.num_output_tokens, strict=True
        ):
            is_in_surge = surge and 0.4 <= at / seconds < 0.6
            wanted = factor * (2 if is_in_surge else 1)
            copies = int(wanted) + (chance.random() < wanted % 1)
            for _ in range(copies if at < seconds else 0):
                moment = float(at) + chance.uniform(-JITTER_SECONDS, JITTER_SECONDS)
                num_output = min(int(output), CONTEXT_TOKENS // 2)
                num_prompt = min(int(prompt), CONTEXT_TOKENS - num_output)
                jobs.append(Job(max(moment, 0.0), num_prompt, num_output))
    return sorted(jobs, key=lambda job: job.arrived_at)


def busy_replicas(jobs: Sequence[Job], shape: Shape, seconds: float) -> float:
    """Replicas that the work would keep busy if they were always full."""
    decode = 1 / (shape.max_num_rows * shape.tokens_per_second(shape.max_num_rows))
    work = (shape.prefill_seconds(j.num_prompt_tokens) + j.num_output_tokens * decode for j in jobs)
    return sum(work) / seconds


def fleet_rate(traces: Iterable[Trace], shape: Shape, seconds: float) -> float:
    """Requests per second of the trace that a fleet of the most replicas takes, as planned."""
    jobs = jobs_of(traces, 1, seconds, seed=0)
    per_request = busy_replicas(jobs, shape, seconds) * seconds / len(jobs)
    return PLANNED_USE * FLEET_REPLICAS / per_request


def simulate(jobs: list[Job], shape: Shape, policy: Policy, seconds: float) -> dict[str, Any]:
    """One fleet, warm at the start, until the last request is done."""
    env = simpy.Environment()
    fleet = Fleet(env, shape)
    warm = math.ceil(busy_replicas(jobs, shape, seconds) / PLANNED_USE)
    fleet.grow(min(max(warm, policy.min_replicas), policy.max_replicas), 0.0)
    scaler = Autoscaler(fleet, policy)
    env.process(fleet.feed(jobs))
    env.run(until=seconds)
    readings = list(scaler.readings)
    while len(fleet.jobs()) + fleet.num_refused < len(jobs):
        env.run(until=env.now + 60)
    return summary(fleet, readings, len(jobs), seconds)


def summary(
    fleet: Fleet, readings: Sequence[Reading], num_jobs: int, seconds: float
) -> dict[str, Any]:
    """What a fleet did in its time; seconds unless a name says otherwise."""
    done = fleet.jobs()
    latencies = {
        "ttft": [job.first_token_at - job.arrived_at for job in done],
        "queue": [job.started_at - job.arrived_at for job in done],
        "e2e": [job.finished_at - job.arrived_at for job in done],
    }
    replicas = np.array([reading.num_replicas for reading in readings])
    return {
        "num_requests": num_jobs,
        "num_refused": fleet.num_refused,
        "replicas_mean": round(float(replicas.mean()), 2),
        "replicas_peak": int(replicas.max()),
        "waiting_peak": max(reading.num_waiting for reading in readings),
        "output_tokens_per_second": round(sum(job.num_output_tokens for job in done) / seconds, 1),
        **{
            f"{name}_seconds": {
                f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 95, 99)
            }
            for name, values in latencies.items()
        },
    }


def replay(
    traces: Sequence[Trace],
    factor: float,
    shape: Shape,
    scale: Path,
    price: float,
    seconds: float,
    fleet_replicas: int = FLEET_REPLICAS,
) -> dict[str, Any]:
    """All fleets, of at most `fleet_replicas` each, at a multiple of the trace's traffic."""
    busy = busy_replicas(jobs_of(traces, 1, seconds, seed=0), shape, seconds) * factor
    num_fleets = max(1, math.ceil(busy / (PLANNED_USE * fleet_replicas)))
    share = factor / num_fleets
    policy = read_policy(scale, fleet_replicas)
    one = simulate(jobs_of(traces, share, seconds, seed=1), shape, policy, seconds)
    per_hour = one["replicas_mean"] * price * num_fleets
    rate = one["num_requests"] * num_fleets / seconds
    served = (one["num_requests"] - one["num_refused"]) * num_fleets * 3600 / seconds
    return {
        "factor": factor,
        "requests_per_second": round(rate, 2),
        "num_fleets": num_fleets,
        "replicas_mean": round(one["replicas_mean"] * num_fleets, 1),
        "replicas_peak": one["replicas_peak"] * num_fleets,
        "usd_per_hour": round(per_hour, 2),
        "usd_per_thousand_requests": round(1000 * per_hour / served, 4),
        "one_fleet": one,
    }


def reaction(traces: Sequence[Trace], shape: Shape, scale: Path, seconds: float) -> dict[str, Any]:
    """Twice the traffic for a fifth of the time, and what the autoscaler made of it."""
    jobs = jobs_of(traces, 1, seconds, seed=2, surge=True)
    env = simpy.Environment()
    fleet = Fleet(env, shape)
    calm = jobs_of(traces, 1, seconds, seed=2)
    fleet.grow(math.ceil(busy_replicas(calm, shape, seconds) / PLANNED_USE), 0.0)
    scaler = Autoscaler(fleet, read_policy(scale, FLEET_REPLICAS))
    env.process(fleet.feed(jobs))
    env.run(until=seconds)
    readings = list(scaler.readings)
    return {
        "surge_seconds": [0.4 * seconds, 0.6 * seconds],
        "readings": [asdict(reading) for reading in readings],
        **summary(fleet, readings, len(jobs), seconds),
    }


def table_row(entry: dict[str, Any]) -> str:
    """A multiple of the traffic as k8s/SCALING.md shows it."""
    ttft, export = entry["one_fleet"]["ttft_seconds"], entry["exports"]
    return (
        f"| {entry['factor']:,.0f}x | {entry['requests_per_second']:,.0f} | {entry['num_fleets']} "
        f"| {entry['replicas_mean']:,.0f} / {entry['replicas_peak']:,} "
        f"| {ttft['p50']:.1f} / {ttft['p99']:.1f} s | {entry['usd_per_hour']:,.0f} "
        f"| {entry['usd_per_thousand_requests']:.2f} "
        f"| {100 * entry['ledger']['share_of_postgresql']:.1f} % "
        f"| {export['last_run_seconds']:,} s, {export['gigabytes_per_day']:.1f} GB |"
    )


def _measured(name: str) -> dict[str, Any]:
    """What was measured here, or else what is recorded."""
    path = BUILD / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if "bytes" in found:
        found["bytes_per_row"] = found["bytes"] / found["rows"]
    recorded: dict[str, Any] = FIGURES[name]
    return recorded | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost-table", type=Path, help="a file that the engine wrote")
    parser.add_argument("--scale", type=Path, default=ROOT / "k8s/base/scale.yaml")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--minutes", type=float, default=20, help="of the trace's hour")
    parser.add_argument("--rows", type=int, default=16, help="TANDEM_MAX_NUM_ROWS")
    parser.add_argument("--kv-bytes", type=int, default=2**30, help="TANDEM_KV_CACHE_MEMORY")
    parser.add_argument("--waiting", type=int, default=256, help="TANDEM_MAX_WAITING_REQUESTS")
    parser.add_argument("--acceptance", type=float, default=0.0, help="0: without speculation")
    parser.add_argument("--start-seconds", type=float, default=45, help="until a new pod is ready")
    parser.add_argument("--price", type=float, default=0.20, help="USD per replica and hour")
    parser.add_argument("--out", type=Path, default=BUILD / "fleet.json")
    arguments = parser.parse_args()
    cost = RECORDED_COST
    if arguments.cost_table:
        kept = json.loads(arguments.cost_table.read_text())
        cost = CostTable(tuple(kept["num_tokens"]), tuple(kept["seconds"]))
    shape = Shape(
        cost,
        arguments.rows,
        arguments.waiting,
        arguments.kv_bytes // KV_BYTES_PER_TOKEN,
        arguments.acceptance,
        arguments.start_seconds,
    )
    traces, seconds = read_traces(DATA), arguments.minutes * 60
    began = time.perf_counter()
    entries = [
        replay(traces, factor, shape, arguments.scale, arguments.price, seconds)
        for factor in arguments.factors
    ]
    measured = _measured("ledger"), _measured("exports"), SCHEDULE
    result = {
        "cost_table": asdict(cost),
        "acceptance": arguments.acceptance,
        "usd_per_replica_hour": arguments.price,
        "seconds": seconds,
        "factors": [e | demands(e["requests_per_second"], *measured) for e in entries],
        "first_to_give": first_to_give(fleet_rate(traces, shape, seconds), *measured),
        "reaction": reaction(traces, shape, arguments.scale, seconds),
    }
    result["took_seconds"] = round(time.perf_counter() - began, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    from tests.benchmarks.fleet_plot import plot

    plot(result, arguments.out.with_suffix(".png"))
    print(*(table_row(entry) for entry in result["factors"]), sep="\n")
    for what, rate in result["first_to_give"].items():
        print(f"{rate:10,.0f} requests per second: {what}")


if __name__ == "__main__":
    main()
