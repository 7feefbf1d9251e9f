"""The data of one forward: tokens laid end to end, and the attention of each group of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.key_padding import KEY_MULTIPLE

MAX_SHARED_WIDTH = 16  # tokens of a row; wider ones, chunks of prompts, share no kernel call


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Tokens to compute for one row: positions start..start+len(token_ids)-1.

    num_logits counts the last tokens whose logits are wanted, 0 to len(token_ids).
    """

    row: int
    token_ids: Sequence[int]
    start: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows whose attention is one kernel call.

    R rows of W tokens (shorter ones padded) over L keys; G query heads share a key head.
    """

    num_rows: int
    width: int
    num_keys: int
    token_index: torch.Tensor  # [R * W] place in the forward, any token for padding
    positions: torch.Tensor  # [R, W] position of each query token
    key_slots: torch.Tensor | None  # [R * L] slots to gather; None: first_slot is enough
    first_slot: int  # rows lie one block apart from here on, keys in a row


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """N tokens, padding included, of which the first num_tokens are real."""

    num_tokens: int
    input_ids: torch.Tensor  # [1, N]
    position_ids: torch.Tensor  # [1, N]
    slots: torch.Tensor  # [num_tokens] where keys and values are written
    groups: tuple[AttentionGroup, ...]
    output_index: torch.Tensor  # [N] place of each token in the groups' joined outputs
    output_is_in_order: bool  # output_index is 0..N-1
    logit_index: torch.Tensor  # [M] tokens whose logits are wanted, padding included
    num_logits: int  # the first num_logits of M are real
    block_size: int


@dataclass(frozen=True, slots=True)
class Padding:
    """What sizes are rounded up to, so that a token's bits do not depend on its company.

    The recipe: a forward has a multiple of `tokens` tokens, attention a multiple of
    `query_rows` folded query rows over padded_keys of `keys` (engine/key_padding.py). Packed
    linear layers need only that a token is never alone.
    """

    tokens: int
    query_rows: int
    keys: int


INVARIANT_PADDING = Padding(tokens=8, query_rows=4, keys=KEY_MULTIPLE)
PACKED_PADDING = Padding(tokens=2, query_rows=4, keys=KEY_MULTIPLE)
NO_PADDING = Padding(tokens=1, query_rows=1, keys=1)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def round_to_bucket(value: int, multiple: int) -> int:
    """Up to a multiple, and to one of at most eight sizes per doubling.

    Kernels are built and kept per size. A server that meets every size from 1 to its budget
    would build and keep as many; an eighth of padding at most is the price of a few dozen.
    """
    if multiple == 1:
        return value
    while value > 16 * multiple:
        multiple *= 2
    return round_up(value, multiple)
