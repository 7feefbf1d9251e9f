"""Measures the cost table of a runner on the machine it will run on."""

import time

import torch

from engine.cost_table import NUM_TOKENS_MEASURED, CostTable
from engine.layout.plan import ForwardRow
from engine.target_runner import TargetRunner

_CONTEXT_TOKENS = 64
_NUM_REPEATS = 3


def measure_costs(runner: TargetRunner) -> CostTable:
    """Fastest of a few forwards per number of tokens, spread over the rows of the cache."""
    cache = runner.cache
    context = min(_CONTEXT_TOKENS, cache.max_tokens // 4)
    rows = [
        cache.allocate_row([0], f"cost probe {number}")[0] for number in range(cache.num_free_rows)
    ]
    samples: list[tuple[int, float]] = []
    try:
        for row in rows:
            cache.reserve(row, cache.max_tokens)
        if context:
            runner.forward([ForwardRow(row, [0] * context, 0, 0) for row in rows])
        for row in rows:
            cache.commit(row, [0] * context, context)
        for num_tokens in NUM_TOKENS_MEASURED:
            num_rows = min(num_tokens, len(rows))
            width = num_tokens // num_rows
            if context + width > cache.max_tokens:
                break
            forward = [ForwardRow(row, [0] * width, context, width) for row in rows[:num_rows]]
            times = []
            for _ in range(1 + _NUM_REPEATS):
                started = time.perf_counter()
                runner.forward(forward)
                if runner.model.device.type == "cuda":
                    torch.cuda.synchronize(runner.model.device)
                times.append(time.perf_counter() - started)
            samples.append((num_rows * width, min(times[1:])))
    finally:
        for row in rows:
            cache.free_row(row, keep=False)
    return CostTable.from_samples(samples)
