"""Keys and values of all rows, their lengths, and the reuse of prefixes.

Every layer has one key and one value tensor of slots, [num_slots, num_kv_heads, head_size].
A slot is one token position; a block is `block_size` slots in a row; a row is a request's
place and owns a block table:

    row 3, block_size 4, length 6     table [7, 2]
    positions    0   1   2   3  | 4   5   .   .
    slots        28  29  30  31 | 8   9   10  11
                 visible -------------->|  never visible: rejected or never written

With `block_size >= max_tokens` a row has exactly one block, so its positions are contiguous
in memory and attention reads them without a gather (CPU); with small blocks they are
gathered through the table (CUDA), and one scratch block takes what fills a forward up.
Truncation moves the length and touches no memory: what lies beyond the length is hidden by the
mask and overwritten later.

Reuse of prefixes: only committed tokens count, and only under the same salt (one per
tenant). Small blocks are shared by reference when they are full; in a one-block row the
block of a finished request is taken over in place, or a running row's prefix is copied.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.key_padding import padded_keys
from engine.kv_storage import KVCacheShape, lazy_zeros


@dataclass(slots=True)
class _Row:
    blocks: list[int]
    salt: str
    length: int = 0
    token_ids: list[int] = field(default_factory=list)  # committed tokens of the first positions
    prefix: bytes = b""  # digest of the salt and the first num_registered blocks
    num_registered: int = 0


class KVCache:
    """The one mutable store of keys and values; see the module's drawing."""

    def __init__(
        self,
        shape: KVCacheShape,
        *,
        max_num_rows: int,
        max_tokens: int,
        num_blocks: int,
        block_size: int | None = None,
    ) -> None:
        """block_size None gives one contiguous block per row. max_tokens bounds a row's length."""
        contiguous_size = padded_keys(max_tokens)
        self.shape = shape
        self.block_size = block_size or contiguous_size
        self.is_contiguous = self.block_size >= contiguous_size
        self.max_tokens = max_tokens
        self.max_num_rows = max_num_rows
        if num_blocks * self.block_size < max_tokens:
            raise ValueError(
                f"kv_cache_memory: {num_blocks} blocks of {self.block_size} tokens cannot hold "
                f"one request of {max_tokens} tokens"
            )
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self.scratch_block = num_blocks  # beside the pool: no request ever owns it
        num_slots = (num_blocks + (not self.is_contiguous)) * self.block_size
        self.keys = [
            lazy_zeros((num_slots, shape.num_kv_heads, shape.key_size), shape)
            for _ in range(shape.num_layers)
        ]
        self.values = [
            lazy_zeros((num_slots, shape.num_kv_heads, shape.value_size), shape)
            for _ in range(shape.num_layers)
        ]
        self.number = 0  # among those that followers hold as well
        if shape.shards is not None:
            sizes = (max_num_rows, max_tokens, num_blocks, block_size)
            self.number = shape.shards.new_cache(self, shape.numbers, sizes)
        self._rows: dict[int, _Row] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        self._block_by_prefix: dict[bytes, int] = {}  # digest of a prefix -> its last full block
        self._prefix_of_block: dict[int, bytes] = {}
        self._recent: dict[int, _Row] = {}  # block -> what a finished one-block row left there

    # ---- rows -------------------------------------------------------------------------

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate_row(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, int]:
        """Open a row for a request with these tokens: (row, num_cached_tokens).

        The cached tokens are the longest known prefix, at most len(token_ids) - 1, because
        the last token's logits are always computed. Raises OutOfBlocksError, changing nothing.
        """
        if not self._free_rows:
            raise ValueError("no free row")
        limit = len(token_ids) - 1
        if self.is_contiguous:
            state = self._allocate_contiguous(token_ids, limit, salt)
        else:
            state = self._allocate_shared(token_ids, limit, salt)
        row = self._free_rows.pop()
        self._rows[row] = state
        return row, state.length

    def free_row(self, row: int, *, keep: bool = True, scrub: bool = False) -> None:
        """Give a row's blocks back. keep leaves its committed prefix reusable.

        scrub zeroes them first: a row that computed non-finite values must not leave them
        behind, since a masked NaN still poisons a softmax.
        """
        state = self._rows.pop(row)
        self._free_rows.append(row)
        if scrub:
            self._zero(state.blocks)
        keep = keep and not scrub
        if self.is_contiguous:
            block = state.blocks[0]
            keep = keep and bool(state.token_ids)
            if keep:
                self._recent[block] = state
            self.pool.release(block, keep=keep)
            return
        for block in reversed(state.blocks):  # the tail of a sequence is given up first
            if not keep and self.pool.num_references(block) == 1:
                self._evict(block)  # a free block must not be found by its old prefix
            self.pool.release(block, keep=block in self._prefix_of_block)

    def reserve(self, row: int, num_tokens: int) -> None:
        """Make room for positions 0..num_tokens-1; raises OutOfBlocksError, changing nothing."""
        state = self._rows[row]
        num_needed = -(-num_tokens // self.block_size) - len(state.blocks)
        if num_needed > 0:
            state.blocks.extend(self.pool.allocate(num_needed))

    def commit(self, row: int, token_ids: Sequence[int], length: int) -> None:
        """Set a row's length: positions 0..length-1 hold the keys of token_ids[:length].

        The only change of a length, up or down, though never below the full blocks that
        others may share by now. token_ids are all committed tokens of the request, so that
        the prefix can be reused.
        """
        state = self._rows[row]
        if not 0 <= length <= len(token_ids):
            raise ValueError(f"length {length} of a row with {len(token_ids)} tokens")
        if length < state.num_registered * self.block_size:
            raise ValueError(
                f"length {length} of a row whose first {state.num_registered} blocks of "
                f"{self.block_size} tokens are reusable"
            )
        known = len(state.token_ids)
        if length > known:
            state.token_ids.extend(token_ids[known:length])
        state.length = length
        del state.token_ids[length:]
        if not self.is_contiguous:
            self._register_full_blocks(state)

    def length(self, row: int) -> int:
        return self._rows[row].length

    def batch_of(self, row: int) -> int:
        """All rows: whichever go into a forward together, nothing is moved."""
        return 0

    # ---- addresses --------------------------------------------------------------------

    def slots(self, row: int, start: int, stop: int) -> list[int]:
        """Slots of positions start..stop-1, which must be reserved."""
        blocks, size = self.block_table(row), self.block_size
        if self.is_contiguous:
            base = blocks[0] * size
            return list(range(base + start, base + stop))
        return [
            blocks[position // size] * size + position % size for position in range(start, stop)
        ]

    def block_table(self, row: int) -> Sequence[int]:
        return self._rows[row].blocks

    # ---- reuse of prefixes ------------------------------------------------------------

    def _allocate_contiguous(self, token_ids: Sequence[int], limit: int, salt: str) -> _Row:
        source_block, num_shared = -1, 0
        candidates = [(state.blocks[0], state) for state in self._rows.values()]
        for block, state in (*self._recent.items(), *candidates):
            if state.salt == salt:
                length = _common_prefix(state.token_ids, token_ids, limit)
                if length > num_shared:
                    source_block, num_shared = block, length
        if source_block in self._recent and self.pool.num_free == 0:
            self.pool.share(source_block)
            del self._recent[source_block]
            blocks = [source_block]
        else:
            blocks = self.pool.allocate(1)
            if num_shared:
                size = self.block_size
                self.copy_slots(source_block * size, blocks[0] * size, num_shared)
        return _Row(blocks, salt, num_shared, list(token_ids[:num_shared]))

    def _allocate_shared(self, token_ids: Sequence[int], limit: int, salt: str) -> _Row:
        size = self.block_size
        state = _Row([], salt, prefix=salt.encode())
        while state.length + size <= limit:
            prefix = _extend_prefix(state.prefix, token_ids[state.length : state.length + size])
            block = self._block_by_prefix.get(prefix)
            if block is None:
                break
            self.pool.share(block)
            state.blocks.append(block)
            state.prefix = prefix
            state.num_registered += 1
            state.length += size
        state.token_ids.extend(token_ids[: state.length])
        return state

    def _register_full_blocks(self, state: _Row) -> None:
        size = self.block_size
        while (state.num_registered + 1) * size <= state.length:
            start = state.num_registered * size
            block = state.blocks[state.num_registered]
            state.prefix = _extend_prefix(state.prefix, state.token_ids[start : start + size])
            state.num_registered += 1
            if state.prefix not in self._block_by_prefix:
                self._block_by_prefix[state.prefix] = block
                self._prefix_of_block[block] = state.prefix

    def _evict(self, block: int) -> None:
        self._recent.pop(block, None)
        prefix = self._prefix_of_block.pop(block, None)
        if prefix is not None:
            del self._block_by_prefix[prefix]

    def copy_slots(self, source: int, target: int, count: int) -> None:
        if self.shape.shards is not None:
            self.shape.shards.announce("copy", cache=self.number, places=[source, target, count])
        for layer in (*self.keys, *self.values):
            layer[target : target + count] = layer[source : source + count]

    def zero_slots(self, start: int, count: int) -> None:
        if self.shape.shards is not None:
            self.shape.shards.announce("zero", cache=self.number, places=[start, count])
        for layer in (*self.keys, *self.values):
            layer[start : start + count] = 0

    def _zero(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.pool.num_references(block) == 1:
                self.zero_slots(block * self.block_size, self.block_size)

    # ---- integrity --------------------------------------------------------------------

    def fill_unwritten(self, value: float) -> None:
        """Write `value` into every slot: for tests, before the first request."""
        for layer in (*self.keys, *self.values):
            layer.fill_(value)

    def check_integrity(self) -> None:
        """Recount references and compare lengths with what is reserved; raises RuntimeError."""
        self.pool.check_integrity(state.blocks for state in self._rows.values())
        if len(self._rows) + len(self._free_rows) != self.max_num_rows:
            raise RuntimeError("a row is neither free nor in use")
        for row, state in self._rows.items():
            if state.length > len(state.blocks) * self.block_size:
                raise RuntimeError(
                    f"row {row}: {state.length} tokens in {len(state.blocks)} blocks"
                )
            if len(state.token_ids) != state.length:
                raise RuntimeError(
                    f"row {row}: {len(state.token_ids)} committed tokens, length {state.length}"
                )
        cached = set(self.pool.cached_blocks())
        if self.is_contiguous and set(self._recent) != cached:
            raise RuntimeError("the kept blocks are not those that the pool holds as cached")
        if len(self._prefix_of_block) != len(self._block_by_prefix):
            raise RuntimeError("two blocks are registered under the same prefix")
        for prefix, block in self._block_by_prefix.items():
            if self._prefix_of_block.get(block) != prefix:
                raise RuntimeError(f"block {block} is registered under a prefix not its own")
            if self.pool.num_references(block) == 0 and block not in cached:
                raise RuntimeError(f"block {block} is free but still found by its prefix")


def _common_prefix(known: Sequence[int], wanted: Sequence[int], limit: int) -> int:
    limit = min(limit, len(known))
    for index in range(limit):
        if known[index] != wanted[index]:
            return index
    return limit


def _extend_prefix(prefix: bytes, token_ids: Sequence[int]) -> bytes:
    content = array("q", token_ids).tobytes()
    return hashlib.blake2b(content, key=hashlib.blake2b(prefix).digest(), digest_size=16).digest()
