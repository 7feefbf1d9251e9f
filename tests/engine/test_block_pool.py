"""Every block is free, cached or owned; nothing is lost, given twice, or given too early."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """The pool beside plain lists that say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, on_evict=self.evicted.append)
        self.references: list[int] = []  # a block once per reference
        self.cached: list[int] = []  # oldest first

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, num_blocks: int) -> None:
        num_free = NUM_BLOCKS - len(set(self.references)) - len(self.cached)
        self.evicted.clear()
        if num_blocks > num_free + len(self.cached):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(num_blocks)
            assert not self.evicted
            return
        blocks = self.pool.allocate(num_blocks)
        assert len(set(blocks)) == num_blocks
        assert not set(blocks) & set(self.references)
        num_evicted = max(0, num_blocks - num_free)
        assert self.evicted == self.cached[:num_evicted], "the oldest go, and only when needed"
        del self.cached[:num_evicted]
        assert not set(blocks) & set(self.cached)
        self.references.extend(blocks)

    @precondition(lambda self: self.references or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.references, *self.cached})))
        self.pool.share(block)
        if block in self.cached:
            self.cached.remove(block)
        self.references.append(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.release(block, keep=keep)
        self.references.remove(block)
        if block not in self.references and keep:
            self.cached.append(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.forget(block)
        self.cached.remove(block)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity([self.references])
        num_owned = len(set(self.references))
        assert self.pool.cached_blocks() == tuple(self.cached)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == NUM_BLOCKS - num_owned - len(self.cached)
        assert self.pool.num_available == NUM_BLOCKS - num_owned
        for block in range(NUM_BLOCKS):
            assert self.pool.num_references(block) == self.references.count(block)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_fresh_pool_gives_neighbours_in_memory_first() -> None:
    assert BlockPool(5).allocate(3) == [0, 1, 2]


def test_a_block_that_nobody_owns_cannot_be_released_or_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="nobody owns"):
        pool.release(0, keep=False)
    with pytest.raises(KeyError):
        pool.share(0)
    (block,) = pool.allocate(1)
    pool.release(block, keep=True)
    with pytest.raises(ValueError, match="nobody owns"):
        pool.release(block, keep=True)
    pool.check_integrity([])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def _count_a_reference_twice(pool: BlockPool) -> None:
    pool._num_references[0] += 1


def _free_an_owned_block(pool: BlockPool) -> None:
    pool._free.append(0)


def _free_a_block_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _lose_a_block(pool: BlockPool) -> None:
    pool._free.popleft()


def _cache_an_owned_block(pool: BlockPool) -> None:
    pool._cached[0] = None


@pytest.mark.parametrize(
    "damage",
    [
        _count_a_reference_twice,
        _free_an_owned_block,
        _free_a_block_twice,
        _lose_a_block,
        _cache_an_owned_block,
    ],
)
def test_the_integrity_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(5)
    table = pool.allocate(2)
    pool.check_integrity([table])
    damage(pool)
    with pytest.raises(RuntimeError):
        pool.check_integrity([table])
