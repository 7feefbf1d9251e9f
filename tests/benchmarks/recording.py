"""What recording costs a step: on the engine's thread, and in all.

    python -m tests.benchmarks.recording [--steps N] [--rows N] [--out FILE]

`engine_thread_microseconds` is what Engine's caller pays for `on_step`; `total_microseconds` is
the processor time of everything that telemetry then does about the step (metrics, cost, energy,
the estimate without speculation) on its own thread. Shares are of a step of `--step-milliseconds`:
unless told otherwise, of the shortest that was measured, which computes a single token.
Ends with an error when all of it together costs 1 % of a step or more.
"""

import argparse
import json
import tempfile
import time
import tomllib
from pathlib import Path

from tests.telemetry.recording_rig import recording_rig
from tests.telemetry.step_stats import row, step

MAX_SHARE = 0.01
ROOT = Path(__file__).parents[2]


def measure(num_steps: int, num_rows: int, step_milliseconds: float) -> dict[str, float]:
    """Figures of one run."""
    nanoseconds = int(step_milliseconds * 1e6)
    with tempfile.TemporaryDirectory() as folder, recording_rig(Path(folder)) as rig:
        requests = [rig.begin(f"r{n}") for n in range(num_rows)]
        rows = [row(f"r{n}", draft=4, accepted=n % 5) for n in range(num_rows)]
        begins = time.monotonic_ns()
        steps = [
            step(begins + n * nanoseconds, nanoseconds, *rows, index=n) for n in range(num_steps)
        ]
        with rig.recorder._live._lock:  # its own thread waits, so that the two costs stay apart
            started = time.perf_counter()
            for stats in steps:
                rig.recorder.on_step(stats)
            on_engine_thread = time.perf_counter() - started
            started = time.thread_time()
            rig.recorder._live._drain()
            total = time.thread_time() - started + on_engine_thread
        for request in requests:
            rig.finish(request)
    per_step = step_milliseconds * 1000
    engine_microseconds = on_engine_thread / num_steps * 1e6
    total_microseconds = total / num_steps * 1e6
    return {
        "rows": num_rows,
        "step_milliseconds": step_milliseconds,
        "engine_thread_microseconds": round(engine_microseconds, 3),
        "engine_thread_share": round(engine_microseconds / per_step, 6),
        "total_microseconds": round(total_microseconds, 1),
        "total_share": round(total_microseconds / per_step, 6),
    }


def _shortest_step_seconds() -> float:
    figures = tomllib.loads((ROOT / "k8s" / "figures.toml").read_text(encoding="utf-8"))
    return float(figures["target"]["step_seconds"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--step-milliseconds", type=float, default=1000 * _shortest_step_seconds())
    parser.add_argument("--out", type=Path, default=Path("build/bench/recording.json"))
    options = parser.parse_args()
    results = measure(options.steps, options.rows, options.step_milliseconds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    if results["total_share"] >= MAX_SHARE:
        raise SystemExit(f"recording costs {results['total_share']:.1%} of a step")


if __name__ == "__main__":
    main()
