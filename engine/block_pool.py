"""Which blocks of the key/value cache are free, owned, or kept for reuse.

A block is the unit of allocation. It is always in exactly one of three states:

    free      nobody refers to it and its content is worth nothing
    cached    nobody refers to it, its content may be reused (least recently freed goes first)
    owned     num_references >= 1

    free + cached + owned = total
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable


class OutOfBlocksError(RuntimeError):
    """The pool cannot give as many blocks as were asked for; nothing was taken."""


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks, ids 0 to num_blocks - 1.

    on_evict is called with a cached block's id just before its content is given up.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        # Lowest ids first: rows that run together then lie side by side in memory.
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def cached_blocks(self) -> tuple[int, ...]:
        """Oldest first."""
        return tuple(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each; raises OutOfBlocksError and takes none if short."""
        if num_blocks > self.num_available:
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {self.num_available} of {self.num_blocks} left"
            )
        blocks = []
        for _ in range(num_blocks):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                if self._on_evict is not None:
                    self._on_evict(block)
            self._num_references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to an owned or cached block."""
        if self._num_references[block] == 0:
            del self._cached[block]
        self._num_references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Drop a reference. The last one makes the block cached (keep) or free."""
        if self._num_references[block] < 1:
            raise ValueError(f"block {block} is released but nobody owns it")
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            if keep:
                self._cached[block] = None
            else:
                self._return_to_free(block)

    def forget(self, block: int) -> None:
        """Make a cached block free."""
        del self._cached[block]
        self._return_to_free(block)

    def _return_to_free(self, block: int) -> None:
        if self._free and block < self._free[0]:
            self._free.appendleft(block)
        else:
            self._free.append(block)

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Recount every reference from `owners` (the block tables of all rows).

        Raises RuntimeError naming the first difference.
        """
        recount = [0] * self.num_blocks
        for table in owners:
            for block in table:
                recount[block] += 1
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise RuntimeError("a block is on the free list twice")
        for block, counted in enumerate(recount):
            if counted != self._num_references[block]:
                raise RuntimeError(
                    f"block {block}: {self._num_references[block]} references stored, "
                    f"{counted} counted"
                )
            num_states = (block in free) + (block in cached) + (counted > 0)
            if num_states != 1:
                raise RuntimeError(f"block {block} is in {num_states} states instead of one")
