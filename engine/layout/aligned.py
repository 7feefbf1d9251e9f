"""The aligned layout: rows that share a forward form a rectangle, padded on the left.

The cache of the layouts aligned (EQSPEC: unpad, append, repad) and grouped (EXSPEC), on top of
engine/layout/rectangle.py, which draws what happens.

Invariants, held by construction in `batch` and checked in `check_integrity`:
  I1  pad + length = columns for every row of a rectangle that goes into a forward
  I2  positions are 0..length-1, the first at column `pad`
Rectangles are immutable. `batch` makes a new one and swaps it in for all its rows at once, and a
forward that raises leaves every row at the version before; positions, mask and columns all follow
from the same pads and lengths. Realignment is lazy: it happens when rows go into a forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.block_pool import BlockPool
from engine.kv_storage import KVCacheShape
from engine.layout.rectangle import Place, Rectangle, copy, cut


@dataclass(slots=True)
class _Row:
    block: int
    place: Place


class AlignedCache:
    """Rows in rectangles. Prefixes are not reused.

    Memory is counted in rows of max_tokens: a block is the longest a row may become.
    """

    is_contiguous = True

    def __init__(
        self, shape: KVCacheShape, *, max_num_rows: int, max_tokens: int, num_blocks: int
    ) -> None:
        self.shape = shape
        self.max_num_rows = max_num_rows
        self.max_tokens = max_tokens
        self.block_size = max_tokens
        self.pool = BlockPool(num_blocks)
        self.num_moved_rows = 0  # rows whose keys were copied, since the start
        self._rows: dict[int, _Row] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        self._pad_value = 0.0

    # ---- rows -------------------------------------------------------------------------

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate_row(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, int]:
        """Open an empty row: (row, 0). Raises OutOfBlocksError, changing nothing."""
        if not self._free_rows:
            raise ValueError("no free row")
        (block,) = self.pool.allocate(1)
        row = self._free_rows.pop()
        self._rows[row] = _Row(block, Place(0, None, 0))
        return row, 0

    def free_row(self, row: int, *, keep: bool = True, scrub: bool = False) -> None:
        """Give a row back. Nothing of it is kept or ever read again, whatever is asked."""
        state = self._rows.pop(row)
        self._free_rows.append(row)
        self.pool.release(state.block, keep=False)

    def reserve(self, row: int, num_tokens: int) -> None:
        """A row has room for max_tokens from the start; more is a ValueError."""
        if num_tokens > self.max_tokens:
            raise ValueError(f"row {row}: {num_tokens} tokens, at most {self.max_tokens}")

    def commit(self, row: int, token_ids: Sequence[int], length: int) -> None:
        """Set a row's length: its first `length` columns after the pad hold token_ids[:length].

        Raises ValueError for a length that no forward has computed.
        """
        state = self._rows[row]
        place = state.place
        num_computed = place.rectangle.num_columns - place.pad if place.rectangle else 0
        if not 0 <= length <= min(len(token_ids), num_computed):
            raise ValueError(
                f"length {length} of a row with {len(token_ids)} tokens, {num_computed} computed"
            )
        state.place = Place(length, place.rectangle, place.index)

    def length(self, row: int) -> int:
        return self._rows[row].place.length

    def batch_of(self, row: int) -> int:
        """Rows of the same rectangle have the same number."""
        rectangle = self._rows[row].place.rectangle
        return rectangle.version if rectangle is not None else -1

    # ---- rectangles -------------------------------------------------------------------

    def batch(self, rows: Sequence[int]) -> Rectangle:
        """The rectangle of exactly these rows, in this order, each ending in the last column.

        Rows that stay together and do not move relative to each other are cut out of what is
        there; otherwise what is visible of every row is copied.
        """
        places = [self._rows[row].place for row in rows]
        aligned = cut(places)
        if aligned is None:
            self.num_moved_rows += sum(place.length > 0 for place in places)
            aligned = copy(places, self.shape, self._pad_value)
        self._swap_in(rows, aligned)
        return aligned

    def grow(
        self, rows: Sequence[int], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        """Take over what a forward made of the rectangle of `rows`: columns were added to it.

        No length changes: the new columns count when they are committed.
        """
        old = self._rows[rows[0]].place.rectangle
        if old is None or any(self._rows[row].place.rectangle is not old for row in rows):
            raise ValueError("a forward of rows that are not a rectangle")
        grown = Rectangle(tuple(keys), tuple(values), old.pads, keys[0].shape[2])
        if len(grown.pads) != len(rows) or grown.num_columns <= old.num_columns:
            raise ValueError("a forward added no columns to its rows")
        self._swap_in(rows, grown)

    def _swap_in(self, rows: Sequence[int], rectangle: Rectangle) -> None:
        left: list[Rectangle] = []
        for index, row in enumerate(rows):
            state = self._rows[row]
            old = state.place.rectangle
            if old is not None and not any(old is other for other in (*left, rectangle)):
                left.append(old)
            state.place = Place(state.place.length, rectangle, index)
        for old in left:
            self._compact(old)

    def _compact(self, old: Rectangle) -> None:
        """Rows left behind must not keep alive the columns of many that moved on.

        Only when rows go into a forward: columns that a step has computed and not yet committed
        are not visible, and would be lost.
        """
        rest = [row for row, state in self._rows.items() if state.place.rectangle is old]
        if not rest or 2 * len(rest) > len(old.pads):
            return
        compacted = copy([self._rows[row].place for row in rest], self.shape, self._pad_value)
        self.num_moved_rows += len(rest)
        for index, row in enumerate(rest):
            self._rows[row].place = Place(self._rows[row].place.length, compacted, index)

    # ---- integrity --------------------------------------------------------------------

    def fill_unwritten(self, value: float) -> None:
        """Pad with `value` from now on: for tests, before the first request."""
        self._pad_value = value

    def check_integrity(self) -> None:
        """Recount blocks and compare rows with their rectangles; raises RuntimeError."""
        self.pool.check_integrity([state.block] for state in self._rows.values())
        if len(self._rows) + len(self._free_rows) != self.max_num_rows:
            raise RuntimeError("a row is neither free nor in use")
        taken: set[tuple[int, int]] = set()
        for row, state in self._rows.items():
            place, rectangle = state.place, state.place.rectangle
            if rectangle is None:
                if place.length:
                    raise RuntimeError(f"row {row}: {place.length} tokens without columns")
                continue
            if (rectangle.version, place.index) in taken:
                raise RuntimeError(f"row {row} shares its columns with another")
            taken.add((rectangle.version, place.index))
            if place.pad < 0 or place.pad + place.length > rectangle.num_columns:
                raise RuntimeError(
                    f"row {row}: pad {place.pad} and {place.length} tokens in "
                    f"{rectangle.num_columns} columns"
                )
            for layer in (*rectangle.keys, *rectangle.values):
                if layer.shape[0] != len(rectangle.pads) or layer.shape[2] != rectangle.num_columns:
                    raise RuntimeError(f"row {row}: a layer has another size than its rectangle")
