"""What scheduling asks of a cache of keys and values, whatever its layout in memory."""

from collections.abc import Sequence
from typing import Protocol

from engine.block_pool import BlockPool
from engine.kv_storage import KVCacheShape


class RowCache(Protocol):
    """Rows with a length each. A forward writes beyond a length and changes none; `commit` is
    the only change of a length. See engine/kv_cache.py for the contract of each method."""

    shape: KVCacheShape
    pool: BlockPool
    block_size: int
    is_contiguous: bool
    max_tokens: int
    max_num_rows: int

    @property
    def num_free_rows(self) -> int: ...

    def allocate_row(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, int]: ...

    def free_row(self, row: int, *, keep: bool = True, scrub: bool = False) -> None: ...

    def reserve(self, row: int, num_tokens: int) -> None: ...

    def commit(self, row: int, token_ids: Sequence[int], length: int) -> None: ...

    def length(self, row: int) -> int: ...

    def batch_of(self, row: int) -> int:
        """Rows of the same number lie together: they go into a forward as they are."""
        ...

    def fill_unwritten(self, value: float) -> None: ...

    def check_integrity(self) -> None: ...
