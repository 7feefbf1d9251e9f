"""What is proven on a device: equal tokens; and counted there: host synchronisations, launches."""

import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config import LayoutName
from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams
from tests.benchmarks.gpu_pair import SIZES, make_engine, random_requests
from tests.benchmarks.workloads import run_all

_ROOT = Path(__file__).resolve().parents[2]
_SYNC_MESSAGE = "called a synchronizing CUDA operation"
_LAUNCH_EVENTS = {
    "cudaLaunchKernel": "kernels",
    "cudaLaunchKernelExC": "kernels",
    "cuLaunchKernel": "kernels",
    "cuLaunchKernelEx": "kernels",
    "cudaGraphLaunch": "graphs",
}
_CASES: tuple[tuple[LayoutName, float], ...] = (  # layout, and how good the drafts are
    ("ragged", 0.98),
    ("ragged", 0.5),
    ("aligned", 0.5),
    ("grouped", 0.9),
)
_NUM_TOKENS = 16
_NUM_COUNTED_STEPS = 8


def equality(device: torch.device, dtype: str) -> dict[str, Any]:
    """Speculative against plain tokens and the auditor's verdicts, on small models.

    `failures` says what must not be: a divergence, or a difference under bit-exact arithmetic.
    """
    found: dict[str, Any] = {"requests": 0, "equal": 0, "accepted": 0, "rejected": 0}
    verdicts: Counter[str] = Counter()
    failures: list[str] = []
    guarantees = {}
    with tempfile.TemporaryDirectory(prefix="tandem-costs-") as costs:
        for layout, share in _CASES:
            engine, _ = make_engine(
                SIZES["small"],
                device,
                dtype,
                share,
                layout=layout,
                audit_share=1.0,
                cost_table_folder=costs,
            )
            guarantees[layout] = engine.info.guarantee
            for temperature in (0.0, 0.8):
                case = f"{layout}, agreement {share}, temperature {temperature}"
                equal, total = _compare(engine, temperature, found)
                found["requests"] += total
                found["equal"] += equal
                if equal < total and engine.info.guarantee == "bit_exact":
                    failures.append(f"{case}: {total - equal} of {total} requests differ")
                of_case = _audit(engine)
                verdicts.update(of_case)
                if of_case["divergence"]:
                    failures.append(f"{case}: {of_case['divergence']} divergences")
    return found | {"guarantees": guarantees, "verdicts": dict(verdicts), "failures": failures}


def _compare(engine: Engine, temperature: float, found: dict[str, Any]) -> tuple[int, int]:
    """(equal, all) requests: one alone, and a queue in which rows leave and others join."""
    equal = total = 0
    for num_rows in (1, 2 * engine.load().num_rows + 1):
        outputs = {}
        for mode in ("off", "on"):
            name = f"{mode}-{temperature}-{num_rows}"
            requests = [
                _at(request, temperature, number)
                for number, request in enumerate(random_requests(name, num_rows, mode, _NUM_TOKENS))
            ]
            tokens, finished, _, _ = run_all(engine, requests)
            engine.check_integrity()
            outputs[mode] = list(tokens.values())
            for stats in finished.values():
                found["accepted"] += stats.num_accepted_tokens
                found["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
        equal += sum(a == b for a, b in zip(outputs["off"], outputs["on"], strict=True))
        total += num_rows
    return equal, total


def _at(request: GenerationRequest, temperature: float, seed: int) -> GenerationRequest:
    return replace(request, sampling=SamplingParams(temperature=temperature, seed=seed))


def _audit(engine: Engine) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    while (finding := engine.audit_next()) is not None:
        verdicts[str(finding.verdict)] += 1
    return verdicts


def _ready(engine: Engine, num_rows: int, mode: str, name: str) -> None:
    """Requests past their prompts, so that the next steps are of the steady kind."""
    for request in random_requests(name, num_rows, mode, 8 * (_NUM_COUNTED_STEPS + 4)):
        engine.submit(request)
    for _ in range(3):
        engine.step()


def _end(engine: Engine, num_rows: int, name: str) -> None:
    for number in range(num_rows):
        engine.cancel(f"{name}-{number}")
    while engine.has_work():
        engine.step()


def sync_sites(caught: list[warnings.WarningMessage]) -> Counter[str]:
    """Places that synchronised, from the warnings of torch's sync debug mode."""
    sites: Counter[str] = Counter()
    for warning in caught:
        if _SYNC_MESSAGE in str(warning.message):
            path = Path(warning.filename)
            inside = path.is_relative_to(_ROOT) and "site-packages" not in path.parts
            name = path.relative_to(_ROOT) if inside else Path(*path.parts[-3:])
            sites[f"{name}:{warning.lineno}"] += 1
    return sites


def host_syncs(engine: Engine, num_rows: int, mode: str) -> dict[str, Any] | None:
    """Synchronising calls per engine step, by place; None without CUDA."""
    num_rows = min(num_rows, engine.load().num_rows)
    if engine.info.device.partition(":")[0] != "cuda":
        return None
    name = f"sync-{mode}"
    _ready(engine, num_rows, mode, name)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(_NUM_COUNTED_STEPS):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    sites = sync_sites(caught)
    _end(engine, num_rows, name)
    per_step = sum(sites.values()) / _NUM_COUNTED_STEPS
    return {
        "per_step": per_step,
        "only_the_one_copy": per_step <= 1,
        "sites": {site: count / _NUM_COUNTED_STEPS for site, count in sites.most_common()},
    }


def launches(engine: Engine, num_rows: int, mode: str) -> dict[str, float] | None:
    """Kernels and CUDA graphs launched per engine step; None without CUDA."""
    num_rows = min(num_rows, engine.load().num_rows)
    if engine.info.device.partition(":")[0] != "cuda":
        return None
    name = f"launch-{mode}"
    _ready(engine, num_rows, mode, name)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_NUM_COUNTED_STEPS):
            engine.step()
    _end(engine, num_rows, name)
    counts = Counter({"kernels": 0, "graphs": 0})
    for event in profile.events():
        if (kind := _LAUNCH_EVENTS.get(event.name)) is not None:
            counts[kind] += 1
    return {kind: count / _NUM_COUNTED_STEPS for kind, count in counts.items()}
