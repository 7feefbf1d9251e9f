"""How far each phase is from what the machine can do -> build/bench/limits.json.

Run with `make bench-limits`. The memory's bandwidth and the processor's throughput in matrix
products are measured in the same run as the steps, between them, so that a slow minute hits both.
Bytes and operations are counted from the model's configuration:

bytes       every weight of the layers and of the output projection once, one row of the embedding
            per token, and the keys and values that are read and written; activations stay in caches
operations  two per weight and token, the output projection only where logits are wanted, and
            4 x heads x head size per pair of query and visible key
limit       the longer of bytes / bandwidth and operations / throughput: a step is no faster
share       limit / measured time, for a bare forward of the target and for a whole engine step
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from engine.engine import Engine
from engine.layout.plan import ForwardRow
from tests.benchmarks.workloads import (
    greedy_request,
    make_engine,
    run_all,
    set_threads,
    spread,
    write_result,
)

_BANDWIDTH_BYTES = 512 * 2**20  # beyond any cache
_MATMUL_SIZE = 1024


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Of a decoder with gated or plain MLPs, from its configuration."""

    layer_weights: int  # of all layers together, in matrices
    output_weights: int
    embedding_size: int
    num_query_channels: int  # heads x head size, of all layers together
    num_cached_channels: int  # keys and values per token, of all layers together

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ModelCounts":
        """Raises ValueError for a mixture of experts: which weights are read depends on tokens."""
        text = config.get_text_config()
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
            raise ValueError("a mixture of experts has no fixed bytes per step")
        hidden, layers = text.hidden_size, text.num_hidden_layers
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_size = getattr(text, "head_dim", None) or hidden // heads
        attention = 2 * hidden * heads * head_size + 2 * hidden * kv_heads * head_size
        mlp = 3 * hidden * text.intermediate_size
        return cls(
            layer_weights=layers * (attention + mlp),
            output_weights=hidden * text.vocab_size,
            embedding_size=hidden,
            num_query_channels=layers * heads * head_size,
            num_cached_channels=2 * layers * kv_heads * head_size,
        )


@dataclass(frozen=True, slots=True)
class Phase:
    """One forward: num_rows rows of `width` tokens after `context` tokens each."""

    num_rows: int
    width: int
    context: int
    num_logits: int  # per row

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_second: float
    operations_per_second: float


def phase_bytes(counts: ModelCounts, phase: Phase, bytes_per_value: int) -> int:
    weights = counts.layer_weights + (counts.output_weights if phase.num_logits else 0)
    embedded = counts.embedding_size * phase.num_tokens
    cached_tokens = phase.num_rows * (phase.context + 2 * phase.width)  # read; written and read
    return bytes_per_value * (weights + embedded + counts.num_cached_channels * cached_tokens)


def phase_operations(counts: ModelCounts, phase: Phase) -> int:
    linear = 2 * counts.layer_weights * phase.num_tokens
    output = 2 * counts.output_weights * phase.num_rows * phase.num_logits
    visible = sum(phase.context + offset + 1 for offset in range(phase.width))
    return linear + output + 4 * counts.num_query_channels * phase.num_rows * visible


def limit_seconds(
    counts: ModelCounts, phase: Phase, bytes_per_value: int, machine: Machine
) -> float:
    return max(
        phase_bytes(counts, phase, bytes_per_value) / machine.bytes_per_second,
        phase_operations(counts, phase) / machine.operations_per_second,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs after one that warms up."""
    times = []
    for _ in range(1 + repeats):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def measure_machine(
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_bytes: int = _BANDWIDTH_BYTES,
    size: int = _MATMUL_SIZE,
    repeats: int = 3,
) -> Machine:
    """Bandwidth of reading or copying num_bytes, throughput of a product of size x size."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    goal = torch.empty_like(source)
    copy_seconds = fastest(lambda: goal.copy_(source), device, repeats)
    read_seconds = fastest(lambda: source.sum(), device, repeats)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    matmul_seconds = fastest(lambda: left @ right, device, repeats)
    return Machine(
        bytes_per_second=max(2 * num_bytes / copy_seconds, num_bytes / read_seconds),
        operations_per_second=2 * size**3 / matmul_seconds,
    )


@torch.inference_mode()
def forward_seconds(engine: Engine, phase: Phase, repeats: int) -> float:
    """Fastest bare forward of the target in this phase."""
    runner = engine._verifier.runner
    rows = [runner.cache.allocate_row([1], f"limits{n}")[0] for n in range(phase.num_rows)]
    context = [5 + n % 90 for n in range(phase.context)]
    try:
        for row in rows:
            runner.cache.reserve(row, phase.context + phase.width)
            if context:
                runner.forward([ForwardRow(row, context, 0, 0)])
        step = [ForwardRow(row, [7] * phase.width, phase.context, phase.num_logits) for row in rows]
        return fastest(lambda: runner.forward(step), runner.model.device, repeats)
    finally:
        for row in rows:
            runner.cache.free_row(row, keep=False)


def decode_step_seconds(engine: Engine, num_rows: int, context: int, num_steps: int) -> float:
    """Median whole engine step of plain decoding, around `context` tokens per row."""
    stamp = time.monotonic_ns()
    first = max(1, context - num_steps // 2)
    requests = [
        greedy_request(f"{stamp}-{n}", [5 + n] * first, num_steps, "off", ignore_eos=True)
        for n in range(num_rows)
    ]
    _, _, steps, _ = run_all(engine, requests)
    decoding = [
        step.duration_nanoseconds
        for step in steps
        if len(step.rows) == num_rows and not any(r.num_prefill_positions for r in step.rows)
    ]
    return statistics.median(decoding) / 1e9


def phases(batch_sizes: Sequence[int], context: int, num_drafts: int) -> dict[str, Phase]:
    found = {"prefill": Phase(1, context, 0, 1)}
    for size in batch_sizes:
        found[f"decode_{size}"] = Phase(size, 1, context, 1)
        found[f"verify_{size}"] = Phase(size, num_drafts + 1, context, num_drafts + 1)
    return found


def phase_report(
    engine: Engine,
    batch_sizes: Sequence[int],
    *,
    context: int,
    num_drafts: int,
    rounds: int,
    measure: Callable[[torch.device, torch.dtype], Machine] = measure_machine,
) -> dict[str, Any]:
    """Per phase: counts, limit, measured times and shares; machine and phases in turn."""
    model = engine._verifier.runner.model
    counts = ModelCounts.of(model.config)
    bytes_per_value = torch.empty((), dtype=model.dtype).element_size()
    machines: list[Machine] = []
    found: dict[str, Any] = {}
    shares: dict[str, list[float]] = {}
    step_shares: dict[str, list[float]] = {}
    for _ in range(rounds):
        machine = measure(model.device, model.dtype)
        machines.append(machine)
        for name, phase in phases(batch_sizes, context, num_drafts).items():
            limit = limit_seconds(counts, phase, bytes_per_value, machine)
            measured = forward_seconds(engine, phase, 3)
            shares.setdefault(name, []).append(limit / measured)
            found[name] = {
                **asdict(phase),
                "bytes": phase_bytes(counts, phase, bytes_per_value),
                "operations": phase_operations(counts, phase),
                "limit_seconds": limit,
                "forward_seconds": measured,
                "forward_share": spread(shares[name]),
            }
            if name.startswith("decode"):
                step = decode_step_seconds(engine, phase.num_rows, context, 12)
                step_shares.setdefault(name, []).append(limit / step)
                found[name]["step_seconds"] = step
                found[name]["step_share"] = spread(step_shares[name])
            print(name, f"limit {limit * 1e3:.2f} ms, forward {measured * 1e3:.2f} ms", flush=True)
    return {
        "bandwidth_bytes_per_second": spread([m.bytes_per_second for m in machines]),
        "matmul_operations_per_second": spread([m.operations_per_second for m in machines]),
        "phases": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Each phase against the machine's limits.")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--batch-sizes", default="1,4,8,16,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one dtype and round, B = 1 and 8")
    options = parser.parse_args()
    set_threads(options.threads)
    quick = options.quick
    sizes = [1, 8] if quick else [int(size) for size in options.batch_sizes.split(",")]
    result: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__}
    for dtype in options.dtypes.split(",")[: 1 if quick else None]:
        engine = make_engine(
            dtype, max(sizes), max_model_tokens=2 * options.context + 64, max_step_tokens=512
        )
        result[dtype] = phase_report(
            engine,
            sizes,
            context=options.context,
            num_drafts=options.drafts,
            rounds=1 if quick else options.rounds,
        )
        del engine
    write_result("limits", result)


if __name__ == "__main__":
    main()
