"""The policy that chooses which rows share a forward: a pure function."""

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from engine.layout.grouping import (
    UNMEASURED,
    AttentionCosts,
    Group,
    PoolRow,
    choose_group,
    share_forwards,
    split_by_keys,
)


def pool_of(*rows: tuple[int, float, int]) -> list[PoolRow]:
    """(length, expected tokens, skipped), called r0, r1, ..."""
    return [PoolRow(f"r{n}", *row) for n, row in enumerate(rows)]


def choose(pool: list[PoolRow], max_rows: int = 2, align_share: float = 0.1) -> Group:
    return choose_group(pool, max_rows=max_rows, max_skips=3, align_share=align_share)


def test_a_pool_that_fits_runs_whole() -> None:
    assert choose(pool_of((5, 1, 0), (9, 1, 0))) == Group(("r0", "r1"), False)
    assert choose(pool_of((5, 1, 0), (5, 1, 0))).is_uniform


def test_rows_of_one_length_go_before_rows_that_have_to_be_aligned() -> None:
    group = choose(pool_of((7, 1, 2), (5, 1, 0), (9, 1, 1), (5, 1, 0)))
    assert set(group.request_ids) == {"r1", "r3"}
    assert group.is_uniform


def test_of_several_lengths_the_one_that_promises_most_goes_first() -> None:
    group = choose(pool_of((5, 1.2, 0), (5, 1.2, 0), (8, 3, 0), (8, 2, 0)))
    assert set(group.request_ids) == {"r2", "r3"}


def test_rows_of_one_length_are_split_by_what_they_promise() -> None:
    group = choose(pool_of((5, 1, 0), (5, 4, 0), (5, 1, 0), (5, 3.5, 0)))
    assert set(group.request_ids) == {"r1", "r3"}


def test_a_small_uniform_group_gives_way_to_a_full_one_around_the_longest_waiting() -> None:
    pool = pool_of((5, 2, 0), (5, 2, 0), (90, 2, 2), (88, 2, 0), (91, 2, 0), (7, 2, 0))
    group = choose(pool, max_rows=3)
    assert set(group.request_ids) == {"r2", "r3", "r4"}
    assert not group.is_uniform
    # Where alignment costs half of a step, two rows without it are worth more than three with it.
    assert choose(pool, max_rows=3, align_share=0.5).is_uniform


def test_an_overdue_row_runs_whatever_the_others_promise() -> None:
    group = choose(pool_of((5, 9, 0), (5, 9, 0), (50, 1, 3), (52, 1, 0)))
    assert group.request_ids == ("r2", "r3")


def test_rows_that_lie_together_stay_together_when_lengths_differ_anyway() -> None:
    pool = [
        PoolRow("a", 10, 2, 1, batch=1),
        PoolRow("b", 11, 2, 0, batch=2),
        PoolRow("c", 30, 2, 0, batch=1),
    ]
    assert choose(pool).request_ids == ("a", "c")


def test_decoding_rows_share_a_forward_and_chunks_of_prompts_share_by_width() -> None:
    assert share_forwards([1, 16, 5], 16) == [[0, 1, 2]]
    assert share_forwards([100, 1, 96, 40, 38, 5], 16) == [[1, 5], [0, 2], [3, 4]]
    assert share_forwards([17], 16) == [[0]]
    assert share_forwards([], 16) == []


@given(st.lists(st.integers(1, 300), max_size=20))
def test_every_row_is_in_one_forward_and_wide_ones_are_mostly_full(widths: list[int]) -> None:
    batches = share_forwards(widths, 16)
    assert sorted(index for batch in batches for index in batch) == list(range(len(widths)))
    for batch in batches:
        of_batch = [widths[index] for index in batch]
        assert max(of_batch) <= 16 or sum(of_batch) >= 0.8 * max(of_batch) * len(batch)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(1, 5)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(0, 1000),
)
def test_no_row_waits_longer_than_promised(
    rows: list[tuple[int, float]], max_rows: int, max_skips: int, seed: int
) -> None:
    generator = random.Random(seed)
    lengths = [length for length, _ in rows]
    skipped = [0] * len(rows)
    bound = max_skips + math.ceil(len(rows) / max_rows) - 1
    for _ in range(60):
        pool = [
            PoolRow(str(n), lengths[n], expected, skipped[n])
            for n, (_, expected) in enumerate(rows)
        ]
        group = choose_group(pool, max_rows=max_rows, max_skips=max_skips, align_share=0.1)
        chosen = {int(name) for name in group.request_ids}
        assert len(chosen) == len(group.request_ids) == min(max_rows, len(rows)) or group.is_uniform
        assert chosen
        for n in range(len(rows)):
            skipped[n] = 0 if n in chosen else skipped[n] + 1
            lengths[n] += generator.randint(1, 3) if n in chosen else 0
        assert max(skipped) <= bound


def cost_of(cuts: list[range], num_keys: list[int], costs: AttentionCosts) -> float:
    read = sum(len(cut) * max(num_keys[index] for index in cut) for cut in cuts)
    return len(cuts) * costs.call_seconds + read * costs.key_seconds


@given(
    st.lists(st.sampled_from([128, 256, 1024, 2048]), min_size=1, max_size=7),
    st.sampled_from([0.0, 1e-3, 3e-3, 1.0]),
)
def test_rows_are_cut_by_length_as_cheaply_as_can_be(
    num_keys: list[int], call_seconds: float
) -> None:
    costs = AttentionCosts(call_seconds, 2.5e-6)
    found = split_by_keys(num_keys, costs)
    assert [index for cut in found for index in cut] == list(range(len(num_keys)))
    total = len(num_keys)
    every_way = [
        [range(a, b) for a, b in itertools.pairwise([0, *inner, total])]
        for count in range(total)
        for inner in itertools.combinations(range(1, total), count)
    ]
    cheapest = min(cost_of(cuts, num_keys, costs) for cuts in every_way)
    assert math.isclose(cost_of(found, num_keys, costs), cheapest, rel_tol=1e-9)


def test_one_long_row_does_not_make_its_neighbours_read_as_many_keys() -> None:
    measured = AttentionCosts(call_seconds=3.5e-3, key_seconds=2.6e-6)
    assert split_by_keys([128, 2048, 128, 128], measured) == [
        range(1),
        range(1, 2),
        range(2, 4),
    ]
    assert split_by_keys([128, 256, 128, 128], measured) == [range(4)], "a call costs more"
    assert split_by_keys([128, 2048, 128], UNMEASURED) == [range(3)]
