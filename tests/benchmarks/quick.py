"""Counts that must not grow: `python -m tests.benchmarks.quick`, also `make bench-quick`.

Times say little on a shared machine; these figures are the same on every run. Each case runs a
fixed workload on a tiny random model and counts, after a warm-up of the same shape:

steps             engine steps
target_calls      forwards of the target
positions         token positions that the target computed, rejected drafts included
row_tokens        the same with padding
operators         calls of torch operators per step
allocations       tensors with memory of their own that operators returned, per step
python_calls      calls of Python functions per step
c_calls           calls of functions written in C, per step

They are compared with tests/benchmarks/quick.json. One that grew fails the run; a change that
is meant is accepted with `--accept`, which rewrites that file, and is then seen in review.
Operators and allocations are counted where torch dispatches them, so what a kernel does inside,
which depends on the processor, is left out. Calls are those of the Python version in the file:
another one inlines or splits other calls, and then they are shown but not judged.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineConfig, LayoutName, SpeculationConfig
from engine.engine import Engine
from engine.loader import describe_model
from engine.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from tests.tiny import related_draft, tiny_llama, tiny_tokenizer

STORED = Path(__file__).with_name("quick.json")
CALLS = ("python_calls", "c_calls")
_NUM_LAYERS = 4
_MAX_TOKENS = 40
_LOOKING_BACK = 0.02  # weight of what attention finds
_SLACK = 0.005  # of a figure per step: an import or a weak reference may add a call


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind that run together on an engine of their own."""

    num_rows: int
    drafter: str | None = None
    temperature: float = 0.0
    prompt_tokens: int = 20
    layout: LayoutName = "ragged"


CASES: Mapping[str, Case] = {
    "plain_1": Case(1),
    "plain_8": Case(8),
    "prompt_lookup_1": Case(1, "prompt_lookup"),
    "prompt_lookup_8": Case(8, "prompt_lookup"),
    "draft_model_4": Case(4, "draft_model"),
    "sampled_4": Case(4, "draft_model", temperature=0.8),
    "chunked_prompt_4": Case(4, prompt_tokens=150),
    "aligned_4": Case(4, "prompt_lookup", layout="aligned"),
}


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and the tensors they return whose memory none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators = 0
        self.num_allocations = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operators += 1
        known = {_memory(t) for t in _tensors([args, kwargs])}
        if func is torch.ops.aten.lift_fresh.default:
            known = set()  # torch.tensor(...): its memory is new, though it looks handed in
        self.num_allocations += len({_memory(t) for t in _tensors(result)} - known - {0})
        return result


def _memory(tensor: torch.Tensor) -> int:
    """Address of the memory under a tensor; 0 where it has no ordinary one (packed weights)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class CallCount:
    """Counts calls while it is entered; another profiler is refused."""

    def __init__(self) -> None:
        self.num_python_calls = 0
        self.num_c_calls = 0

    def __enter__(self) -> "CallCount":
        if sys.getprofile() is not None:
            raise RuntimeError("another profiler is active")
        gc.collect()
        gc.disable()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.num_python_calls += 1
        elif event == "c_call":
            self.num_c_calls += 1


def make_engine(case: Case, cost_table_folder: str) -> Engine:
    """Costs and probes are measured here, outside of what is counted.

    The model hardly looks back, so its next token depends on the last one and its output soon
    goes in circles: looking it up then pays.
    """
    target = tiny_llama(num_layers=_NUM_LAYERS)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(_LOOKING_BACK)
    needs_draft = case.drafter == "draft_model"
    tokenizer = tiny_tokenizer()
    config = EngineConfig(
        target="tiny",
        device="cpu",
        max_num_rows=case.num_rows,
        max_step_tokens=64,
        max_model_tokens=256,
        kv_cache_memory=2e8,
        layout=case.layout,
        cost_table_folder=cost_table_folder,
        speculation=SpeculationConfig(
            drafters=(case.drafter,) if case.drafter else (),
            draft_model="draft" if needs_draft else None,
        ),
    )
    draft = describe_model("draft", related_draft(target), tokenizer) if needs_draft else None
    return Engine.from_models(config, describe_model("tiny", target, tokenizer), draft)


def make_requests(case: Case, run_name: str) -> list[GenerationRequest]:
    """A repeated phrase, so that looking it up proposes; mode `on`: no clock has a say in K."""
    mode = SpeculationMode.ON if case.drafter else SpeculationMode.OFF
    return [
        GenerationRequest(
            f"{run_name}-{row}",
            tuple(3 + (index % (5 + row)) * 7 % 300 for index in range(case.prompt_tokens + row)),
            SamplingParams(temperature=case.temperature, seed=row),
            StoppingParams(max_tokens=_MAX_TOKENS, ignore_eos=True),
            SpeculationParams(mode),
            tenant=run_name,  # no run finds the prompts of one before it in the cache
        )
        for row in range(case.num_rows)
    ]


def drive(engine: Engine, requests: Sequence[GenerationRequest]) -> int:
    """Number of steps until all are done."""
    for request in requests:
        engine.submit(request)
    num_steps = 0
    while engine.has_work():
        num_steps += engine.step().stats is not None
    return num_steps


def count(case: Case, engine: Engine) -> dict[str, float]:
    """The case's figures; those of calls and operators are per step."""
    drive(engine, make_requests(case, "warm"))
    runner = engine._verifier.runner
    before = (runner.num_forwards, runner.num_positions, runner.num_row_tokens)
    with CallCount() as calls:
        num_steps = drive(engine, make_requests(case, "call"))
    after = (runner.num_forwards, runner.num_positions, runner.num_row_tokens)
    requests = make_requests(case, "oper")
    with OperatorCount() as operators:
        if drive(engine, requests) != num_steps:
            raise RuntimeError("the same requests took another number of steps")
    target_calls, positions, row_tokens = (a - b for a, b in zip(after, before, strict=True))
    return {
        "steps": num_steps,
        "target_calls": target_calls,
        "positions": positions,
        "row_tokens": row_tokens,
        "operators": round(operators.num_operators / num_steps, 1),
        "allocations": round(operators.num_allocations / num_steps, 1),
        "python_calls": round(calls.num_python_calls / num_steps, 1),
        "c_calls": round(calls.num_c_calls / num_steps, 1),
    }


def versions() -> dict[str, str]:
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }


def compare(stored: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(what grew or has no stored figure, what became less): lines for a reader."""
    grown, less = [], []
    judges_calls = stored["versions"]["python"] == found["versions"]["python"]
    for case, figures in found["cases"].items():
        for name, value in figures.items():
            limit = stored["cases"].get(case, {}).get(name)
            if limit is None:
                grown.append(f"{case}.{name}: {value}, nothing is stored")
            elif name in CALLS and not judges_calls:
                continue
            elif value > limit * (1 + _SLACK):
                grown.append(
                    f"{case}.{name}: {limit} -> {value} (+{100 * (value / limit - 1):.1f}%)"
                )
            elif value < limit * (1 - _SLACK):
                less.append(f"{case}.{name}: {limit} -> {value} ({100 * (value / limit - 1):.1f}%)")
    grown.extend(
        f"{case}: stored, but not run" for case in stored["cases"] if case not in found["cases"]
    )
    return grown, less


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    cases = {}
    with tempfile.TemporaryDirectory(prefix="tandem-quick-") as folder:
        for name, case in CASES.items():
            cases[name] = count(case, make_engine(case, folder))
            print(f"{name:18}", *(f"{k} {v:g}" for k, v in cases[name].items()), flush=True)
    return {"versions": versions(), "cases": cases}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts per step that must not grow.")
    parser.add_argument("--accept", action="store_true", help="store the figures found now")
    options = parser.parse_args(arguments)
    found = measure()
    if options.accept:
        STORED.write_text(json.dumps(found, indent=2) + "\n")
        print(f"stored: {STORED.name}")
        return 0
    stored = json.loads(STORED.read_text())
    if stored["versions"] != found["versions"]:
        print(f"stored figures are of {stored['versions']}, this is {found['versions']}")
    grown, less = compare(stored, found)
    print(*(f"less   {line}" for line in less), *(f"GREW   {line}" for line in grown), sep="\n")
    if less and not grown:
        print("an improvement: keep it with `python -m tests.benchmarks.quick --accept`")
    if grown:
        print("if this is meant: `python -m tests.benchmarks.quick --accept`, and say why")
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
