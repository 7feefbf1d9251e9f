"""The ragged layout: every row keeps its own length, positions and slots; nothing is realigned.

Linear layers see all tokens of all rows laid end to end. Attention works on groups of rows:

    rows      0: 3 tokens    1: 3 tokens    2: 40 tokens (a chunk of a prompt)
    forward   [a0 a1 a2 | b0 b1 b2 | c0 ... c39 | padding]
    groups    {0, 1} width 3 in one kernel call, {2} width 40 in another

Rows of very different context lengths are grouped by length, where the measured costs of
attention say that what is not read in vain pays for another call.
"""

import itertools
from collections.abc import Sequence

import torch

from engine.kv_cache import KVCache
from engine.layout.grouping import UNMEASURED, AttentionCosts, split_by_keys
from engine.layout.plan import (
    AttentionGroup,
    ForwardPlan,
    ForwardRow,
    Padding,
    round_to_bucket,
    round_up,
)

_MAX_SHARED_WIDTH = 16  # wider rows (chunks of prompts) get a kernel call of their own


def plan_forward(
    rows: Sequence[ForwardRow],
    cache: KVCache,
    padding: Padding,
    costs: AttentionCosts = UNMEASURED,
) -> ForwardPlan:
    """Lay out one forward. Every position of `rows` must be reserved in `cache`."""
    device = cache.shape.device
    input_ids: list[int] = []
    position_ids: list[int] = []
    slots: list[int] = []
    logit_index: list[int] = []
    first_token: list[int] = []
    for forward_row in rows:
        stop = forward_row.start + len(forward_row.token_ids)
        first_token.append(len(input_ids))
        input_ids.extend(forward_row.token_ids)
        position_ids.extend(range(forward_row.start, stop))
        slots.extend(cache.slots(forward_row.row, forward_row.start, stop))
        logit_index.extend(range(len(input_ids) - forward_row.num_logits, len(input_ids)))
    num_tokens = len(input_ids)
    num_padding = round_to_bucket(num_tokens, padding.tokens) - num_tokens
    input_ids.extend([0] * num_padding)
    position_ids.extend([0] * num_padding)
    num_logits = len(logit_index)
    logit_index.extend([0] * (round_to_bucket(num_logits, padding.tokens) - num_logits))

    groups: list[AttentionGroup] = []
    output_index = [0] * len(input_ids)
    num_outputs = 0
    for members in _group(rows, cache, padding, costs):
        group_rows = [rows[index] for index in members]
        width = max(len(forward_row.token_ids) for forward_row in group_rows)
        for place, index in enumerate(members):
            for offset in range(len(rows[index].token_ids)):
                output_index[first_token[index] + offset] = num_outputs + place * width + offset
        num_outputs += len(members) * width
        groups.append(
            _attention_group(
                group_rows, [first_token[index] for index in members], width, cache, padding
            )
        )
    return ForwardPlan(
        num_tokens=num_tokens,
        input_ids=torch.tensor([input_ids], dtype=torch.long, device=device),
        position_ids=torch.tensor([position_ids], dtype=torch.long, device=device),
        slots=torch.tensor(slots, dtype=torch.long, device=device),
        groups=tuple(groups),
        output_index=torch.tensor(output_index, dtype=torch.long, device=device),
        output_is_in_order=output_index == list(range(len(input_ids))),
        logit_index=torch.tensor(logit_index, dtype=torch.long, device=device),
        num_logits=num_logits,
        block_size=cache.block_size,
    )


def _group(
    rows: Sequence[ForwardRow], cache: KVCache, padding: Padding, costs: AttentionCosts
) -> list[list[int]]:
    """Indices of rows that share a kernel call, in the order of memory.

    Contiguous rows are read through a strided view, so only neighbours in memory can share.
    """
    narrow: list[int] = []
    groups: list[list[int]] = []
    for index, forward_row in enumerate(rows):
        if len(forward_row.token_ids) <= _MAX_SHARED_WIDTH:
            narrow.append(index)
        else:
            groups.append([index])
    if not narrow:
        return groups
    num_keys = [round_up(r.start + len(r.token_ids), padding.keys) for r in rows]
    if not cache.is_contiguous:
        narrow.sort(key=lambda index: num_keys[index])
        return [*_split([narrow], num_keys, costs), *groups]
    narrow.sort(key=lambda index: cache.block_table(rows[index].row)[0])
    runs: list[list[int]] = [[narrow[0]]]
    for previous, index in itertools.pairwise(narrow):
        block = cache.block_table(rows[index].row)[0]
        if block == cache.block_table(rows[previous].row)[0] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [*_split(runs, num_keys, costs), *groups]


def _split(
    runs: Sequence[Sequence[int]], num_keys: Sequence[int], costs: AttentionCosts
) -> list[list[int]]:
    return [
        [run[place] for place in part]
        for run in runs
        for part in split_by_keys([num_keys[index] for index in run], costs)
    ]


def _attention_group(
    rows: Sequence[ForwardRow],
    first_tokens: Sequence[int],
    width: int,
    cache: KVCache,
    padding: Padding,
) -> AttentionGroup:
    device = cache.shape.device
    token_index: list[int] = []
    positions: list[list[int]] = []
    num_keys = 0
    for forward_row, first in zip(rows, first_tokens, strict=True):
        count = len(forward_row.token_ids)
        num_keys = max(num_keys, forward_row.start + count)
        token_index.extend(range(first, first + count))
        token_index.extend([first] * (width - count))
        positions.append(
            [forward_row.start + offset for offset in range(count)]
            + [forward_row.start] * (width - count)
        )
    num_keys = round_up(num_keys, padding.keys)
    key_slots, first_slot = None, 0
    if cache.is_contiguous:
        first_slot = cache.block_table(rows[0].row)[0] * cache.block_size
    else:
        key_slots = _gathered_slots(rows, num_keys, cache)
    return AttentionGroup(
        num_rows=len(rows),
        width=width,
        num_keys=num_keys,
        token_index=torch.tensor(token_index, dtype=torch.long, device=device),
        positions=torch.tensor(positions, dtype=torch.long, device=device),
        key_slots=key_slots,
        first_slot=first_slot,
    )


def _gathered_slots(rows: Sequence[ForwardRow], num_keys: int, cache: KVCache) -> torch.Tensor:
    """[R * L] slots of each row's first L positions; what is not reserved reads slot 0, masked."""
    device, size = cache.shape.device, cache.block_size
    num_blocks = -(-num_keys // size)
    table = [
        [
            *cache.block_table(r.row)[:num_blocks],
            *[0] * (num_blocks - len(cache.block_table(r.row))),
        ]
        for r in rows
    ]
    blocks = torch.tensor(table, dtype=torch.long, device=device)  # [R, num_blocks]
    offsets = torch.arange(size, device=device)
    slots = (blocks[:, :, None] * size + offsets).flatten(1)  # [R, num_blocks * size]
    return slots[:, :num_keys].flatten()
