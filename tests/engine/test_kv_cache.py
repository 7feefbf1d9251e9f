"""The cache gives back the keys that were written, to the row and the tenant they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.block_pool import OutOfBlocksError
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape

SHAPE = KVCacheShape(2, 1, 2, 3, torch.float32, torch.device("cpu"))
REJECTED = -7.0
MAX_TOKENS = 24
CONTIGUOUS = None


def make_cache(block_size: int | None, num_blocks: int = 12, num_rows: int = 4) -> KVCache:
    cache = KVCache(
        SHAPE,
        max_num_rows=num_rows,
        max_tokens=MAX_TOKENS,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    cache.fill_unwritten(REJECTED)
    return cache


class Marks:
    """A number for every (salt, tokens up to a position): what a key there must depend on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, tuple[int, ...]], float] = {}

    def of(self, salt: str, token_ids: Sequence[int], position: int) -> float:
        key = (salt, tuple(token_ids[: position + 1]))
        return self._numbers.setdefault(key, float(len(self._numbers) + 1))


def write(cache: KVCache, row: int, position: int, mark: float) -> None:
    (slot,) = cache.slots(row, position, position + 1)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        keys[slot] = mark + layer / 8
        values[slot] = mark + layer / 8 + 0.5


def read(cache: KVCache, row: int, num_tokens: int) -> list[float]:
    """Marks of the first positions; every layer's keys and values must agree."""
    slots = torch.tensor(cache.slots(row, 0, num_tokens), dtype=torch.long)
    marks = cache.keys[0][slots][:, 0, 0]
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        assert (keys[slots] == (marks + layer / 8).view(-1, 1, 1)).all()
        assert (values[slots] == (marks + layer / 8 + 0.5).view(-1, 1, 1)).all()
    return [float(mark) for mark in marks]


def fill(cache: KVCache, marks: Marks, token_ids: Sequence[int], salt: str = "") -> tuple[int, int]:
    """Open a row, compute and commit all its tokens: (row, num_cached_tokens)."""
    row, num_cached = cache.allocate_row(token_ids, salt)
    cache.reserve(row, len(token_ids))
    for position in range(num_cached, len(token_ids)):
        write(cache, row, position, marks.of(salt, token_ids, position))
    cache.commit(row, token_ids, len(token_ids))
    cache.check_integrity()
    return row, num_cached


@dataclass(slots=True)
class ModelRow:
    """What the test knows of a row."""

    salt: str
    token_ids: list[int]
    length: int
    never_below: int


@dataclass(slots=True)
class Plain:
    """The reference: token lists, no memory."""

    rows: dict[int, ModelRow] = field(default_factory=dict)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=16)  # two tokens: prefixes meet often


class CacheMachine(RuleBasedStateMachine):
    """Random requests that compute, reject, go back, finish and fail."""

    block_size: int | None = 4
    num_blocks = 12

    @initialize()
    def start(self) -> None:
        self.cache = make_cache(self.block_size, self.num_blocks)
        self.marks = Marks()
        self.model = Plain()

    def expected(self, row: int) -> list[float]:
        known = self.model.rows[row]
        return [self.marks.of(known.salt, known.token_ids, p) for p in range(known.length)]

    def any_row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.rows)))

    @precondition(lambda self: self.cache.num_free_rows > 0)
    @rule(token_ids=TOKENS, salt=st.sampled_from(["", "tenant"]))
    def allocate(self, token_ids: list[int], salt: str) -> None:
        before = self.cache.pool.num_available, self.cache.num_free_rows
        try:
            row, num_cached = self.cache.allocate_row(token_ids, salt)
        except OutOfBlocksError:
            assert (self.cache.pool.num_available, self.cache.num_free_rows) == before
            return
        assert 0 <= num_cached < len(token_ids)
        assert self.cache.length(row) == num_cached
        never_below = 0 if self.cache.is_contiguous else num_cached
        self.model.rows[row] = ModelRow(salt, list(token_ids), num_cached, never_below)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=6), num_drafts=st.integers(0, 4))
    def compute(self, data: st.DataObject, new: list[int], num_drafts: int) -> None:
        row = self.any_row(data)
        known = self.model.rows[row]
        token_ids = [*known.token_ids, *new]
        length = data.draw(st.integers(known.length, len(token_ids)))
        if length + num_drafts > MAX_TOKENS:
            return
        table = list(self.cache.block_table(row))
        try:
            self.cache.reserve(row, length + num_drafts)
        except OutOfBlocksError:
            assert list(self.cache.block_table(row)) == table
            return
        for position in range(known.length, length):
            write(self.cache, row, position, self.marks.of(known.salt, token_ids, position))
        for position in range(length, length + num_drafts):
            write(self.cache, row, position, REJECTED)
        self.cache.commit(row, token_ids, length)
        known.token_ids, known.length = token_ids, length
        if not self.cache.is_contiguous:
            known.never_below = length // self.cache.block_size * self.cache.block_size

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        row = self.any_row(data)
        known = self.model.rows[row]
        length = data.draw(st.integers(min(known.never_below, known.length), known.length))
        self.cache.commit(row, known.token_ids, length)
        known.length, known.token_ids = length, known.token_ids[:length] or known.token_ids[:1]

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), keep=st.booleans(), scrub=st.booleans())
    def free(self, data: st.DataObject, keep: bool, scrub: bool) -> None:
        row = self.any_row(data)
        self.cache.free_row(row, keep=keep, scrub=scrub)
        del self.model.rows[row]

    @invariant()
    def every_row_reads_its_own_keys(self) -> None:
        self.cache.check_integrity()
        for row in self.model.rows:
            assert read(self.cache, row, self.model.rows[row].length) == self.expected(row)


class ContiguousMachine(CacheMachine):
    block_size = CONTIGUOUS
    num_blocks = 3  # fewer than rows: blocks of finished requests are taken over


class TinyBlocksMachine(CacheMachine):
    block_size = 1
    num_blocks = 40


SETTINGS = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSmallBlocks = CacheMachine.TestCase
TestContiguous = ContiguousMachine.TestCase
TestTinyBlocks = TinyBlocksMachine.TestCase
for _case in (TestSmallBlocks, TestContiguous, TestTinyBlocks):
    _case.settings = SETTINGS

LAYOUTS = pytest.mark.parametrize("block_size", [CONTIGUOUS, 4])


@LAYOUTS
@pytest.mark.parametrize("finished", [False, True], ids=["running", "finished"])
def test_a_known_prefix_is_read_back_as_it_was_written(
    block_size: int | None, finished: bool
) -> None:
    cache, marks = make_cache(block_size), Marks()
    first, _ = fill(cache, marks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    if finished:
        cache.free_row(first)
    row, num_cached = cache.allocate_row([1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    assert num_cached == 8
    assert read(cache, row, 8) == [marks.of("", [1, 2, 3, 4, 5, 6, 7, 8], p) for p in range(8)]
    cache.check_integrity()


@LAYOUTS
def test_the_last_token_is_always_computed(block_size: int | None) -> None:
    cache, marks = make_cache(block_size), Marks()
    token_ids = list(range(8))
    row, _ = fill(cache, marks, token_ids)
    cache.free_row(row)
    _, num_cached = cache.allocate_row(token_ids)
    assert num_cached == (7 if block_size is CONTIGUOUS else 4)


@LAYOUTS
def test_another_tenant_finds_nothing(block_size: int | None) -> None:
    cache, marks = make_cache(block_size), Marks()
    row, _ = fill(cache, marks, list(range(9)), salt="one")
    assert cache.allocate_row(list(range(9)), "two")[1] == 0
    cache.free_row(row)
    assert cache.allocate_row(list(range(9)), "two")[1] == 0
    assert cache.allocate_row(list(range(9)), "one")[1] == 8


@LAYOUTS
def test_tokens_that_were_written_but_not_committed_are_never_shared(
    block_size: int | None,
) -> None:
    cache, marks = make_cache(block_size), Marks()
    row, _ = cache.allocate_row([1] * 12)
    cache.reserve(row, 12)
    for position in range(12):
        write(cache, row, position, marks.of("", [1] * 12, position))
    cache.commit(row, [1] * 12, 5)
    assert cache.allocate_row([1] * 12)[1] == (5 if block_size is CONTIGUOUS else 4)
    cache.free_row(row)
    assert cache.allocate_row([1] * 12)[1] == (5 if block_size is CONTIGUOUS else 4)


@pytest.mark.parametrize("discard", [{"keep": False}, {"scrub": True}])
@LAYOUTS
def test_a_discarded_row_is_not_found_again(
    block_size: int | None, discard: dict[str, bool]
) -> None:
    cache, marks = make_cache(block_size), Marks()
    row, _ = fill(cache, marks, list(range(9)))
    cache.free_row(row, **discard)
    cache.check_integrity()
    assert cache.pool.num_free == cache.pool.num_blocks
    assert cache.allocate_row(list(range(9)))[1] == 0


def test_discarding_a_row_leaves_the_blocks_that_another_row_shares() -> None:
    cache, marks = make_cache(4), Marks()
    first, _ = fill(cache, marks, list(range(9)))
    second, num_cached = fill(cache, marks, [*range(8), 50])
    assert num_cached == 8
    cache.free_row(first, scrub=True)
    cache.check_integrity()
    expected = [marks.of("", [*range(8), 50], position) for position in range(9)]
    assert read(cache, second, 9) == expected
    third, num_cached = cache.allocate_row(list(range(9)))
    assert num_cached == 8
    assert read(cache, third, 8) == expected[:8]


@LAYOUTS
def test_scrubbing_leaves_no_value_behind(block_size: int | None) -> None:
    cache = make_cache(block_size)
    row, _ = cache.allocate_row([1] * 6)
    cache.reserve(row, 10)
    slots = cache.slots(row, 0, 10)
    for layer in (*cache.keys, *cache.values):
        layer[slots] = float("nan")
    cache.commit(row, [1] * 6, 6)
    cache.free_row(row, scrub=True)
    assert all(bool(layer.isfinite().all()) for layer in (*cache.keys, *cache.values))


def test_shared_blocks_take_no_memory_and_go_when_the_last_row_does() -> None:
    cache, marks = make_cache(4), Marks()
    fill(cache, marks, [*range(8), 40])
    used = cache.pool.num_available
    rows = [cache.allocate_row([*range(8), 41 + n])[0] for n in range(3)]
    assert cache.pool.num_available == used
    assert {tuple(cache.block_table(row)[:2]) for row in range(4)} == {
        tuple(cache.block_table(rows[0])[:2])
    }
    for row in range(4):
        cache.free_row(row)
    cache.check_integrity()
    assert cache.pool.num_available == cache.pool.num_blocks


def test_two_rows_that_compute_the_same_tokens_keep_one_reusable_copy() -> None:
    cache, marks = make_cache(4, num_blocks=6), Marks()
    token_ids = list(range(9))
    rows = [cache.allocate_row(token_ids)[0] for _ in range(2)]  # before either has computed
    for row in rows:
        cache.reserve(row, 9)
        for position in range(9):
            write(cache, row, position, marks.of("", token_ids, position))
        cache.commit(row, token_ids, 9)
        cache.check_integrity()
    for row in rows:
        cache.free_row(row)
    assert cache.pool.num_cached == 2
    assert cache.allocate_row(token_ids)[1] == 8
    fill(cache, marks, [50] * 16)


def test_a_position_lies_in_the_block_and_at_the_place_that_the_table_says() -> None:
    cache, marks = make_cache(4), Marks()
    fill(cache, marks, [9])
    row, _ = fill(cache, marks, list(range(9)))
    expected = [block * 4 + offset for block in cache.block_table(row) for offset in range(4)]
    assert cache.slots(row, 0, 9) == expected[:9]
    assert cache.slots(row, 3, 6) == expected[3:6]


def test_with_no_free_block_a_finished_requests_place_is_taken_over_without_a_copy() -> None:
    cache, marks = make_cache(CONTIGUOUS, num_blocks=2), Marks()
    other, _ = fill(cache, marks, [9] * 6)
    row, _ = fill(cache, marks, list(range(9)))
    (block,) = cache.block_table(row)
    cache.free_row(row)
    again, num_cached = cache.allocate_row([*range(6), 77, 78])
    assert num_cached == 6
    assert list(cache.block_table(again)) == [block]
    assert read(cache, again, 6) == [marks.of("", list(range(6)), p) for p in range(6)]
    assert read(cache, other, 6) == [marks.of("", [9] * 6, p) for p in range(6)]
    cache.check_integrity()


def test_with_a_free_block_the_prefix_is_copied_and_stays_reusable() -> None:
    cache, marks = make_cache(CONTIGUOUS, num_blocks=3), Marks()
    row, _ = fill(cache, marks, list(range(9)))
    kept = list(cache.block_table(row))
    cache.free_row(row)
    first, _ = cache.allocate_row([*range(6), 77])
    second, num_cached = cache.allocate_row([*range(8), 78])
    assert num_cached == 8
    assert list(cache.block_table(first)) != kept
    assert read(cache, first, 6) == read(cache, second, 8)[:6]
    write(cache, first, 5, 999.0)
    assert read(cache, second, 8)[5] == marks.of("", list(range(6)), 5)


@LAYOUTS
def test_when_room_is_short_the_least_recently_finished_goes_first(block_size: int | None) -> None:
    num_blocks = 3 if block_size is CONTIGUOUS else 9
    cache, marks = make_cache(block_size, num_blocks), Marks()
    prompts = [[n] * 12 for n in range(3)]
    for token_ids in prompts:
        cache.free_row(fill(cache, marks, token_ids)[0])
    row, _ = fill(cache, marks, [7] * 12)
    for index, known in ((1, True), (2, True), (0, False)):
        probe, num_cached = cache.allocate_row(prompts[index])
        assert (num_cached > 0) == known, prompts[index]
        cache.free_row(probe)
    cache.free_row(row)


def test_the_tail_of_a_sequence_is_given_up_before_its_head() -> None:
    cache, marks = make_cache(4, num_blocks=6), Marks()
    row, _ = fill(cache, marks, list(range(20)))
    cache.free_row(row)
    fill(cache, marks, [99] * 12)  # one block is free, two must be evicted
    assert cache.allocate_row(list(range(20)))[1] == 12


def test_a_length_does_not_fall_below_blocks_that_others_may_share() -> None:
    cache, marks = make_cache(4), Marks()
    row, _ = fill(cache, marks, list(range(9)))
    with pytest.raises(ValueError, match="reusable"):
        cache.commit(row, list(range(9)), 7)
    cache.commit(row, list(range(9)), 8)
    assert cache.length(row) == 8


def test_a_length_beyond_the_committed_tokens_is_refused() -> None:
    cache = make_cache(4)
    row, _ = cache.allocate_row([1, 2, 3])
    with pytest.raises(ValueError, match="length 4"):
        cache.commit(row, [1, 2, 3], 4)


def test_running_out_of_blocks_changes_nothing() -> None:
    cache, marks = make_cache(4, num_blocks=6), Marks()
    row, _ = fill(cache, marks, list(range(18)))
    table = list(cache.block_table(row))
    other, _ = cache.allocate_row([50] * 8)
    with pytest.raises(OutOfBlocksError):
        cache.reserve(other, 8)
    assert list(cache.block_table(other)) == []
    assert list(cache.block_table(row)) == table
    cache.check_integrity()


def test_a_cache_that_cannot_hold_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_memory"):
        make_cache(4, num_blocks=5)


def test_bytes_per_token_are_those_of_the_tensors() -> None:
    cache = make_cache(4, num_blocks=12)
    stored = sum(layer.numel() * 4 for layer in (*cache.keys, *cache.values))
    assert SHAPE.bytes_per_token * (12 + 1) * 4 == stored, "with the scratch block"


def _lose_a_reference(cache: KVCache, row: int) -> None:
    cache.pool.release(cache.block_table(row)[0], keep=True)


def _shorten_the_table(cache: KVCache, row: int) -> None:
    cache._rows[row].blocks.pop()


def _claim_more_tokens(cache: KVCache, row: int) -> None:
    cache._rows[row].length += 1


def _leak_a_row(cache: KVCache, row: int) -> None:
    cache._free_rows.pop()


def _swap_a_prefix(cache: KVCache, row: int) -> None:
    cache._prefix_of_block[cache.block_table(row)[0]] = b"other"


def _free_a_registered_block(cache: KVCache, row: int) -> None:
    block = cache.block_table(row)[1]
    cache._rows[row].blocks.remove(block)
    cache._rows[row].length = 5
    del cache._rows[row].token_ids[5:]
    cache.pool.release(block, keep=False)


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_reference,
        _shorten_the_table,
        _claim_more_tokens,
        _leak_a_row,
        _swap_a_prefix,
        _free_a_registered_block,
    ],
)
def test_the_integrity_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    cache, marks = make_cache(4), Marks()
    row, _ = fill(cache, marks, list(range(9)))
    damage(cache, row)
    with pytest.raises(RuntimeError):
        cache.check_integrity()
