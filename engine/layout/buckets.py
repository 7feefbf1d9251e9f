"""Forwards of a few fixed shapes: what a CUDA graph needs, laid out on the host.

A decode or verification step of R rows becomes a rectangle, every row W tokens wide over L keys:

    rows        a: 2 tokens   b: 3 tokens       bucket (4 rows, 3 tokens, 128 keys)
    rectangle   [a0 a1 . | b0 b1 b2 | . . . | . . .]

What fills it up (.) writes its keys to the cache's scratch block, which no request ever owns, and
its outputs are read by nobody. Rows that only fill up read the scratch block, too; a request's row
reads its own first block where it has no further ones, masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.key_padding import padded_keys
from engine.kv_cache import KVCache
from engine.layout.plan import (
    MAX_SHARED_WIDTH,
    AttentionGroup,
    ForwardPlan,
    ForwardRow,
    Padding,
)

_MOST_WASTED = 2  # times the tokens asked for, once there are more than _FEW_TOKENS
_FEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Bucket:
    """num_rows rows of width tokens over num_keys keys."""

    num_rows: int
    width: int
    num_keys: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width

    def num_numbers(self, block_size: int) -> int:
        """Length of what `lay_out` returns."""
        return 3 * self.num_tokens + self.num_rows * -(-self.num_keys // block_size)


def choose_bucket(rows: Sequence[ForwardRow], cache: KVCache, padding: Padding) -> Bucket | None:
    """The smallest bucket that holds the rows; None where a forward of their own size is better:
    chunks of prompts, or widths so unequal that most of the rectangle would be filling."""
    width = max(len(row.token_ids) for row in rows)
    if width > MAX_SHARED_WIDTH:
        return None
    num_rows = _steps_up_to(len(rows))
    while num_rows * width % padding.tokens:
        num_rows += 1
    asked = sum(len(row.token_ids) for row in rows)
    if num_rows * width > max(_FEW_TOKENS, _MOST_WASTED * asked):
        return None
    longest = max(row.start + len(row.token_ids) for row in rows)
    num_keys = padded_keys(_steps_up_to(longest), padding.keys)
    return Bucket(num_rows, width, min(num_keys, padded_keys(cache.max_tokens, padding.keys)))


def _steps_up_to(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: two sizes per doubling."""
    size = 1
    while size < count:
        size *= 2
    smaller = size * 3 // 4
    return smaller if smaller >= count and size > 2 else size


def lay_out(
    rows: Sequence[ForwardRow], cache: KVCache, bucket: Bucket
) -> tuple[list[int], list[int], list[int]]:
    """The numbers that `plan_of` reads; the places in the rectangle of the rows' tokens, end to
    end; and of those whose logits are wanted."""
    input_ids: list[int] = []
    position_ids: list[int] = []
    slots: list[int] = []
    key_blocks: list[int] = []
    places: list[int] = []
    wanted: list[int] = []
    scratch_slot = cache.scratch_block * cache.block_size
    num_blocks = -(-bucket.num_keys // cache.block_size)
    for row in rows:
        count, first = len(row.token_ids), len(input_ids)
        num_filling = bucket.width - count
        input_ids += [*row.token_ids, *[0] * num_filling]
        position_ids += [*range(row.start, row.start + count), *[row.start] * num_filling]
        slots += [
            *cache.slots(row.row, row.start, row.start + count),
            *[scratch_slot] * num_filling,
        ]
        table = cache.block_table(row.row)[:num_blocks]
        key_blocks += [*table, *[table[0]] * (num_blocks - len(table))]
        places += range(first, first + count)
        wanted += range(first + count - row.num_logits, first + count)
    num_filling = bucket.num_tokens - len(input_ids)
    input_ids += [0] * num_filling
    position_ids += [0] * num_filling
    slots += [scratch_slot] * num_filling
    key_blocks += [cache.scratch_block] * (bucket.num_rows * num_blocks - len(key_blocks))
    return [*input_ids, *position_ids, *slots, *key_blocks], places, wanted


def plan_of(numbers: torch.Tensor, bucket: Bucket, block_size: int) -> ForwardPlan:
    """The forward that `numbers` [bucket.num_numbers] int64 describe. Everything is computed on
    their device from their values, so that a graph of it follows when they change."""
    num_tokens = bucket.num_tokens
    input_ids, position_ids, slots = numbers[: 3 * num_tokens].view(3, num_tokens)
    key_blocks = numbers[3 * num_tokens :]
    in_order = torch.arange(num_tokens, device=numbers.device)
    offsets = torch.arange(block_size, device=numbers.device)
    key_slots = (key_blocks.view(bucket.num_rows, -1, 1) * block_size + offsets).flatten(1)
    group = AttentionGroup(
        num_rows=bucket.num_rows,
        width=bucket.width,
        num_keys=bucket.num_keys,
        token_index=in_order,
        positions=position_ids.view(bucket.num_rows, bucket.width),
        key_slots=key_slots[:, : bucket.num_keys].flatten(),
        first_slot=0,
    )
    return ForwardPlan(
        num_tokens=num_tokens,
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        slots=slots,
        groups=(group,),
        output_index=in_order,
        output_is_in_order=True,
        logit_index=in_order,
        num_logits=num_tokens,
        block_size=block_size,
    )
