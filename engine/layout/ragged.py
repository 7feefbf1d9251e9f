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
from dataclasses import dataclass

import torch

from engine.key_padding import padded_keys
from engine.kv_cache import KVCache
from engine.layout.grouping import UNMEASURED, AttentionCosts, split_by_keys
from engine.layout.plan import (
    MAX_SHARED_WIDTH,
    AttentionGroup,
    ForwardPlan,
    ForwardRow,
    Padding,
    round_to_bucket,
)
from engine.upload import upload_together


def plan_forward(
    rows: Sequence[ForwardRow],
    cache: KVCache,
    padding: Padding,
    costs: AttentionCosts = UNMEASURED,
) -> ForwardPlan:
    """Lay out one forward. Every position of `rows` must be reserved in `cache`."""
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

    groups: list[_HostGroup] = []
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
            _host_group(
                group_rows, [first_token[index] for index in members], width, cache, padding
            )
        )
    lists = [input_ids, position_ids, slots, output_index, logit_index]
    for group in groups:
        lists += (group.token_index, group.positions, group.key_blocks)
    sent = upload_together(lists, cache.shape.device)
    return ForwardPlan(
        num_tokens=num_tokens,
        input_ids=sent[0].unsqueeze(0),
        position_ids=sent[1].unsqueeze(0),
        slots=sent[2],
        groups=tuple(
            group.on_device(sent[at], sent[at + 1], sent[at + 2], cache.block_size)
            for group, at in zip(groups, range(5, len(sent), 3), strict=True)
        ),
        output_index=sent[3],
        output_is_in_order=output_index == list(range(len(input_ids))),
        logit_index=sent[4],
        num_logits=num_logits,
        block_size=cache.block_size,
    )


@dataclass(frozen=True, slots=True)
class _HostGroup:
    """An AttentionGroup before its numbers are on the device.

    positions: row by row. key_blocks: of every row as many as hold num_keys, none where rows are
    contiguous; what is not reserved reads block 0, masked.
    """

    num_rows: int
    width: int
    num_keys: int
    token_index: list[int]
    positions: list[int]
    key_blocks: list[int]
    first_slot: int

    def on_device(
        self,
        token_index: torch.Tensor,
        positions: torch.Tensor,
        key_blocks: torch.Tensor,
        block_size: int,
    ) -> AttentionGroup:
        key_slots = None
        if self.key_blocks:
            offsets = torch.arange(block_size, device=key_blocks.device)
            blocks = key_blocks.view(self.num_rows, -1, 1)
            slots = (blocks * block_size + offsets).flatten(1)  # [R, blocks of a row * block_size]
            key_slots = slots[:, : self.num_keys].flatten()
        return AttentionGroup(
            num_rows=self.num_rows,
            width=self.width,
            num_keys=self.num_keys,
            token_index=token_index,
            positions=positions.view(self.num_rows, self.width),
            key_slots=key_slots,
            first_slot=self.first_slot,
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
        if len(forward_row.token_ids) <= MAX_SHARED_WIDTH:
            narrow.append(index)
        else:
            groups.append([index])
    if not narrow:
        return groups
    num_keys = [padded_keys(r.start + len(r.token_ids), padding.keys) for r in rows]
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


def _host_group(
    rows: Sequence[ForwardRow],
    first_tokens: Sequence[int],
    width: int,
    cache: KVCache,
    padding: Padding,
) -> _HostGroup:
    token_index: list[int] = []
    positions: list[int] = []
    num_keys = 0
    for forward_row, first in zip(rows, first_tokens, strict=True):
        count, start = len(forward_row.token_ids), forward_row.start
        num_keys = max(num_keys, start + count)
        token_index.extend(range(first, first + count))
        token_index.extend([first] * (width - count))
        positions.extend(range(start, start + count))
        positions.extend([start] * (width - count))
    num_keys = padded_keys(num_keys, padding.keys)
    key_blocks: list[int] = []
    first_slot = 0
    if cache.is_contiguous:
        first_slot = cache.block_table(rows[0].row)[0] * cache.block_size
    else:
        num_blocks = -(-num_keys // cache.block_size)
        for forward_row in rows:
            table = cache.block_table(forward_row.row)[:num_blocks]
            key_blocks.extend([*table, *[0] * (num_blocks - len(table))])
    return _HostGroup(
        num_rows=len(rows),
        width=width,
        num_keys=num_keys,
        token_index=token_index,
        positions=positions,
        key_blocks=key_blocks,
        first_slot=first_slot,
    )
