"""A batch of rows in columns of equal number: cutting it, and unpadding and repadding it.

A plain transformers cache knows one length for the whole batch, so all rows must end in the
same column. After a verification they do not: each keeps as many tokens as were accepted.

    step      columns             a: 3 tokens, b: 5; two more verified in each
    before    . . a a a           pads (2, 0)
              b b b b b
    forward   . . a a a A x       a keeps one (x was rejected), b keeps both
              b b b b b B B
    aligned   . . . a a a A       pads (3, 0): a moved by one column, x is gone
              b b b b b B B

A row moves by (columns' - columns) less the tokens it keeps: rows that keep equally many do not
move relative to each other, and one row alone never moves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.kv_storage import KVCacheShape

_versions = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Keys and values of R rows in C columns; what lies left of a row's pad is never visible.

    keys and values have a tensor [R, num_kv_heads, C, size] per layer; none while C is 0.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    pads: tuple[int, ...]  # [R]
    num_columns: int
    version: int = field(default_factory=lambda: next(_versions))


@dataclass(frozen=True, slots=True)
class Place:
    """A row's `length` tokens are columns pad.. of row `index` of its rectangle."""

    length: int
    rectangle: Rectangle | None
    index: int

    @property
    def pad(self) -> int:
        return self.rectangle.pads[self.index] if self.rectangle is not None else 0


def aligned_pads(places: Sequence[Place]) -> tuple[tuple[int, ...], int]:
    """The pads that let all rows end in the last column, and the number of columns."""
    num_columns = max(place.length for place in places)
    return tuple(num_columns - place.length for place in places), num_columns


def cut(places: Sequence[Place]) -> Rectangle | None:
    """The aligned rectangle as a view: if the rows are those of one rectangle, in its order, and
    do not move relative to each other. None if they have to be copied."""
    old = places[0].rectangle
    if old is None or len(old.pads) != len(places):
        return None
    if any(place.rectangle is not old or place.index != i for i, place in enumerate(places)):
        return None
    pads, num_columns = aligned_pads(places)
    distances = {before - pad for pad, before in zip(pads, old.pads, strict=True)}
    if len(distances) != 1 or (first := distances.pop()) < 0:
        return None
    if first == 0 and num_columns == old.num_columns:
        return old
    columns = slice(first, first + num_columns)
    return Rectangle(
        tuple(layer[:, :, columns] for layer in old.keys),
        tuple(layer[:, :, columns] for layer in old.values),
        pads,
        num_columns,
    )


def copy(places: Sequence[Place], shape: KVCacheShape, pad_value: float) -> Rectangle:
    """The aligned rectangle, with what is visible of every row copied: unpad, then repad."""
    pads, num_columns = aligned_pads(places)
    if num_columns == 0:
        return Rectangle((), (), pads, 0)
    sources: dict[int, list[int]] = {}
    for index, place in enumerate(places):
        if place.length:
            sources.setdefault(id(place.rectangle), []).append(index)
    moves = [_move(places, pads, members, shape.device) for members in sources.values()]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in range(shape.num_layers):
        for made, size in ((keys, shape.key_size), (values, shape.value_size)):
            # Columns before heads, so that one indexing moves a row's tokens together.
            target = torch.full(
                (len(places), num_columns, shape.num_kv_heads, size),
                pad_value,
                dtype=shape.dtype,
                device=shape.device,
            )
            for move in moves:
                stored = move.source.keys if made is keys else move.source.values
                source = stored[layer].transpose(1, 2)
                target[move.to_rows, move.to_columns] = source[move.from_rows, move.from_columns]
            made.append(target.transpose(1, 2))
    return Rectangle(tuple(keys), tuple(values), pads, num_columns)


@dataclass(frozen=True, slots=True)
class _Move:
    """[M] places of the tokens that are copied out of one rectangle, and where they go."""

    source: Rectangle
    from_rows: torch.Tensor
    from_columns: torch.Tensor
    to_rows: torch.Tensor
    to_columns: torch.Tensor


def _move(
    places: Sequence[Place], pads: Sequence[int], members: Sequence[int], device: torch.device
) -> _Move:
    source = places[members[0]].rectangle
    assert source is not None  # noqa: S101 - for the type checker; rows with tokens have one
    from_rows, from_columns, to_rows, to_columns = [], [], [], []
    for index in members:
        place = places[index]
        from_rows.append(torch.full((place.length,), place.index))
        from_columns.append(torch.arange(place.pad, place.pad + place.length))
        to_rows.append(torch.full((place.length,), index))
        to_columns.append(torch.arange(pads[index], pads[index] + place.length))
    return _Move(
        source,
        torch.cat(from_rows).to(device),
        torch.cat(from_columns).to(device),
        torch.cat(to_rows).to(device),
        torch.cat(to_columns).to(device),
    )
