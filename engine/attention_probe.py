"""Measures what attention costs on this machine, so that a forward's rows are grouped to pay."""

import time
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from engine.key_padding import padded_keys
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.grouping import AttentionCosts
from engine.layout.plan import ForwardRow, Padding
from engine.layout.ragged import plan_forward
from engine.planned_attention import PlannedAttention

_NUM_ROWS = 8
_SHORT, _LONGER, _LONG = 100, 356, 1000  # keys: in 128, 384 and 1,024
_NUM_REPEATS = 20
_LEAST_SHARE = 0.25
_SPLIT_ALWAYS = AttentionCosts(call_seconds=0.0, key_seconds=1.0)


@torch.inference_mode()
def measure_attention(
    model: PreTrainedModel, shape: KVCacheShape, padding: Padding, block_size: int | None
) -> AttentionCosts:
    """From three sets of rows over a cache of one layer: short, long, and short in two calls.

    block_size None measures contiguous rows.
    """
    one_layer = replace(shape, num_layers=1)
    size = block_size or padded_keys(_LONG)
    cache = KVCache(
        one_layer,
        max_num_rows=_NUM_ROWS,
        max_tokens=_LONG,
        num_blocks=_NUM_ROWS * -(-_LONG // size),
        block_size=block_size,
    )
    for number in range(_NUM_ROWS):
        row, _ = cache.allocate_row([0], f"attention probe {number}")
        cache.reserve(row, _LONG)
    num_heads: int = model.config.get_text_config().num_attention_heads
    short = _seconds(cache, padding, [_SHORT] * _NUM_ROWS, num_heads)
    long = _seconds(cache, padding, [_LONG] * _NUM_ROWS, num_heads)
    half = _NUM_ROWS // 2
    split = _seconds(cache, padding, [_SHORT] * half + [_LONGER] * half, num_heads)
    key_seconds = max(0.0, long - short) / (_NUM_ROWS * (_LONG - _SHORT))
    call_seconds = split - short - half * (_LONGER - _SHORT) * key_seconds
    # Noise must not make calls look free.
    call_seconds = max(call_seconds, short * _LEAST_SHARE)
    return AttentionCosts(call_seconds * shape.num_layers, key_seconds * shape.num_layers)


def _seconds(cache: KVCache, padding: Padding, lengths: list[int], num_heads: int) -> float:
    """The fastest of some calls, of rows that end after so many keys."""
    shape = cache.shape
    rows = [ForwardRow(row, [0], length - 1, 0) for row, length in enumerate(lengths)]
    plan = plan_forward(rows, cache, padding, _SPLIT_ALWAYS)
    attention = PlannedAttention(plan, cache, padding)
    num_tokens = plan.input_ids.shape[1]
    query, key, value = (
        torch.zeros(num_tokens, count, size, dtype=shape.dtype, device=shape.device)
        for count, size in (
            (num_heads, shape.key_size),
            (shape.num_kv_heads, shape.key_size),
            (shape.num_kv_heads, shape.value_size),
        )
    )
    times = []
    for _ in range(1 + _NUM_REPEATS):  # the first one makes the masks
        started = time.perf_counter()
        attention.attend(0, query, key, value, scale=1.0)
        if query.is_cuda:
            torch.cuda.synchronize(query.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
