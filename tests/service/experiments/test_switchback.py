"""Slots of time: drawn in pairs, the same for everybody, compared pair by pair."""

import math

import pytest

from service.experiments.switchback import (
    Slots,
    figures_by_slot,
    pair_differences,
    quantile_of,
)

_SLOTS = Slots(b"key", slot_seconds=300, washout_seconds=20)


def test_each_pair_has_one_slot_with_the_candidate_in_an_order_drawn_by_lot() -> None:
    orders = [_SLOTS.has_candidate(2 * pair) for pair in range(1000)]
    assert all(
        _SLOTS.has_candidate(2 * pair) != _SLOTS.has_candidate(2 * pair + 1) for pair in range(1000)
    )
    assert 440 < sum(orders) < 560
    other = Slots(b"other", 300)
    assert [other.has_candidate(2 * pair) for pair in range(1000)] != orders


def test_a_pair_is_compared_with_itself_whatever_its_order() -> None:
    figures = {}
    for index in range(20):
        hour = 1 + index // 6  # traffic that changes over the day
        figures[index] = hour * (1.2 if _SLOTS.has_candidate(index) else 1.0)
    differences = pair_differences(figures, _SLOTS)
    assert differences == pytest.approx([math.log(1.2)] * 10)


def test_pairs_that_are_not_complete_are_left_out() -> None:
    figures = {0: 1.0, 1: 1.0, 2: 1.0, 4: 0.0, 5: 1.0, 6: 1.0, 7: 1.0}
    assert len(pair_differences(figures, _SLOTS)) == 2
    assert len(pair_differences(figures, _SLOTS, before=7)) == 1


def test_the_beginning_of_a_slot_belongs_to_the_slot_before() -> None:
    values = [(0.0, 9.0), (19.9, 9.0), (20.0, 1.0), (299.0, 3.0), (301.0, 9.0), (330.0, 5.0)]
    means = figures_by_slot(values, _SLOTS, quantile=None, min_observations=1)
    assert means == {0: 2.0, 1: 5.0}
    assert figures_by_slot(values, _SLOTS, quantile=None, min_observations=2) == {0: 2.0}
    highest = figures_by_slot(values, _SLOTS, quantile=1.0, min_observations=1)
    assert highest == {0: 3.0, 1: 5.0}


def test_quantiles_are_linear_between_order_statistics() -> None:
    assert quantile_of([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile_of([1.0, 2.0], 0.75) == 1.75


@pytest.mark.parametrize(("length", "washout"), [(0, 0), (60, 60), (60, -1)])
def test_a_schedule_needs_room_for_requests(length: float, washout: float) -> None:
    with pytest.raises(ValueError, match="_seconds"):
        Slots(b"key", length, washout)
