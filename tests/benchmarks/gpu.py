"""The engine on CUDA in one go: `sh tests/benchmarks/gpu.sh` -> build/bench/gpu.json.

Needs neither network nor weights. The pair is synthetic: the target is the draft model plus
further layers whose output projections are scaled by epsilon, so the smaller epsilon, the more
often the two agree; epsilon is searched for the wanted agreement, and what a further layer costs
does not change. Without CUDA the same sections run on a small pair on the CPU.

equality_DTYPE   tokens of plain and speculative decoding, with good and bad drafts, against each
                 other and judged by the auditor; the run fails on a divergence, or on any
                 difference where the probe found the arithmetic bit-exact
host_syncs       synchronising calls per step and where they are; one, the copy of the accepted
                 tokens, is meant. null without CUDA
launches         kernels and CUDA graphs launched per step. null without CUDA
ratios           by B: speculative over plain tokens per second, alternately in one run
limits           step times against the bandwidth and throughput measured in this run
memory           bytes of weights and cache, and the most that was allocated

What does not fit into --seconds is left out and named in `left_out`.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.engine import Engine
from tests.benchmarks.gpu_checks import equality, host_syncs, launches
from tests.benchmarks.gpu_pair import SIZES, Size, make_engine, timed_run
from tests.benchmarks.limits import measure_machine, phase_report
from tests.benchmarks.workloads import BUILD, spread

_ESTIMATED_SECONDS = {"small": 5.0, "1b": 100.0, "3b": 150.0, "8b": 180.0}


@dataclass(slots=True)
class Clock:
    """What is left of the time that the script may take."""

    ends_at: float

    def has(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.ends_at


def ratios(engine: Engine, size: Size, rounds: int, clock: Clock) -> dict[str, Any]:
    """Speculative over plain by B; a B for which no time is left is missing."""
    found: dict[str, Any] = {}
    for num_rows in size.batch_sizes:
        per_mode: dict[str, list[float]] = {"off": [], "on": [], "auto": []}
        acceptance = 0.0
        timed_run(engine, num_rows, "on", 8)
        for number in range(rounds):
            if number and not clock.has(30):
                break
            order = list(per_mode) if number % 2 == 0 else list(reversed(per_mode))
            for mode in order:
                run = timed_run(engine, num_rows, mode, size.new_tokens)
                per_mode[mode].append(run.tokens_per_second)
                if mode == "on":
                    acceptance = run.acceptance_length
        pairs = {
            mode: [a / b for a, b in zip(per_mode[mode], per_mode["off"], strict=True)]
            for mode in ("on", "auto")
        }
        found[str(num_rows)] = {
            "on_over_plain": spread(pairs["on"]),
            "auto_over_plain": spread(pairs["auto"]),
            "acceptance_length": round(acceptance, 3),
            "tokens_per_second": {mode: spread(rates) for mode, rates in per_mode.items()},
        }
        print(f"B={num_rows}", found[str(num_rows)], flush=True)
        if not clock.has(20):
            break
    return found


def memory(engine: Engine, device: torch.device) -> dict[str, Any]:
    """Bytes: what the target's weights and cache need, and what was allocated at most."""
    runner = engine._verifier.runner
    cache = runner.cache
    is_cuda = device.type == "cuda"
    return {
        "target_parameters": engine.info.num_parameters,
        "cache_bytes": engine.load().num_total_blocks
        * cache.block_size
        * cache.shape.bytes_per_token,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "process_bytes": psutil.Process().memory_info().rss,
    }


def measure_pair(
    name: str, size: Size, device: torch.device, dtype: str, wanted: float, clock: Clock
) -> dict[str, Any]:
    """Everything about one pair of models."""
    started = time.monotonic()
    engine, agreement = make_engine(size, device, dtype, wanted)
    print(f"{name}: {agreement} ready in {time.monotonic() - started:.0f} s", flush=True)
    is_small = name == "small"
    measure = partial(measure_machine, num_bytes=2**24, size=256, repeats=1)
    if not is_small:
        measure = partial(measure_machine, num_bytes=2**32, size=8192)
    result: dict[str, Any] = {
        "size": asdict(size),
        "dtype": dtype,
        "guarantee": engine.info.guarantee,
        "agreement": asdict(agreement),
        "host_syncs": {mode: host_syncs(engine, 4, mode) for mode in ("off", "on")},
        "launches": {mode: launches(engine, 4, mode) for mode in ("off", "on")},
        "limits": phase_report(
            engine,
            [size.batch_sizes[0], size.batch_sizes[-1]] if is_small else [1, 8, 32, 128],
            context=size.context,
            num_drafts=4,
            rounds=1,
            measure=measure,
        ),
    }
    result["ratios"] = ratios(engine, size, 1 if is_small else 2, clock)
    result["memory"] = memory(engine, device)
    return result


def run(
    names: Sequence[str],
    device: torch.device,
    dtype: str,
    wanted: float,
    clock: Clock,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """What was found; saved after every part, so that a run that is cut short leaves its parts."""
    is_cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "pairs": {},
        "left_out": [],
        "failures": [],
    }
    for equality_dtype in ("float32", "bfloat16") if is_cuda else ("float32",):
        found = equality(device, equality_dtype)
        result[f"equality_{equality_dtype}"] = found
        result["failures"] += [f"{equality_dtype}: {failure}" for failure in found["failures"]]
        save(result)
    for name in names:
        if not clock.has(_ESTIMATED_SECONDS[name]):
            result["left_out"].append(name)
            continue
        try:
            result["pairs"][name] = measure_pair(name, SIZES[name], device, dtype, wanted, clock)
        except Exception as error:  # the machine is lent for minutes: go on with the other pairs
            traceback.print_exc()
            result["failures"].append(f"{name}: {type(error).__name__}: {error}")
        save(result)
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Proves and measures the engine on CUDA.")
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}; default: what suits the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--agreement", type=float, default=0.8, help="of draft and target, 0 to 1")
    parser.add_argument("--seconds", type=float, default=420, help="no pair is begun beyond")
    parser.add_argument("--out", type=Path, default=BUILD / "gpu.json")
    options = parser.parse_args(arguments)
    if not 0 < options.agreement < 1:
        parser.error(f"--agreement: must be between 0 and 1, got {options.agreement}")
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    names = (options.sizes or ("8b,1b,3b" if is_cuda else "small")).split(",")
    for name in names:
        if name not in SIZES:
            parser.error(f"--sizes: unknown {name!r}, known: {', '.join(SIZES)}")
    dtype = "bfloat16" if is_cuda else "float32"
    clock = Clock(time.monotonic() + options.seconds)
    result = run(names, device, dtype, options.agreement, clock, partial(_save, options.out))
    _save(options.out, result)
    print(f"written: {options.out}", *result["failures"], sep="\n")
    return 1 if result["failures"] else 0


def _save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
