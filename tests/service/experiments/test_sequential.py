"""Intervals and tests that are looked at after every value: their errors stay within alpha."""

import math
import random

import pytest

from service.experiments.sequential import (
    BoundedMean,
    log_evidence_of_more,
    log_evidence_of_shift,
    relative_difference,
    shift_interval,
)

_ALPHA = 0.1
_NUM_RUNS = 200


def _bound(expected: float) -> float:
    """Three standard errors above the rate that theory allows."""
    return expected + 3 * math.sqrt(expected * (1 - expected) / _NUM_RUNS)


@pytest.mark.parametrize("probability", [0.02, 0.5])
def test_the_mean_leaves_its_interval_at_some_time_in_at_most_alpha_of_runs(
    probability: float,
) -> None:
    rng, num_missed = random.Random(1), 0
    for _ in range(_NUM_RUNS):
        mean = BoundedMean(_ALPHA)
        for _ in range(400):
            mean.add(float(rng.random() < probability))
            if not mean.interval.lower <= probability <= mean.interval.upper:
                num_missed += 1
                break
    assert num_missed / _NUM_RUNS <= _bound(_ALPHA)


def test_an_interval_made_for_one_look_would_fail_this_test() -> None:
    """The check above can fail: a plain 90 % interval, looked at after each value, does."""
    rng, num_missed = random.Random(1), 0
    for _ in range(_NUM_RUNS):
        total = 0.0
        for count in range(1, 401):
            total += rng.random() < 0.5
            if count > 20 and abs(total / count - 0.5) > 1.645 * 0.5 / math.sqrt(count):
                num_missed += 1
                break
    assert num_missed / _NUM_RUNS > 2 * _bound(_ALPHA)


def test_the_interval_narrows_with_the_spread_of_the_values() -> None:
    rng = random.Random(2)
    narrow, wide = BoundedMean(0.05), BoundedMean(0.05)
    for _ in range(2000):
        narrow.add(0.5 + 0.1 * (rng.random() - 0.5))
        wide.add(float(rng.random() < 0.5))
    widths = [m.interval.upper - m.interval.lower for m in (narrow, wide)]
    assert widths[0] < 0.02
    assert widths[0] < widths[1] / 3
    assert widths[1] < 0.12


def test_a_value_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="value"):
        BoundedMean(0.05).add(1.01)
    with pytest.raises(ValueError, match="alpha"):
        BoundedMean(0.0)


def test_relative_bounds_hold_both_arms_at_their_worst() -> None:
    low, high = BoundedMean(0.05), BoundedMean(0.05)
    for index in range(2000):
        low.add(0.4 + 0.02 * (index % 2))
        high.add(0.5 + 0.02 * (index % 2))
    difference = relative_difference(low.interval, high.interval)
    assert difference.lower < 0.41 / 0.51 - 1 < difference.upper < -0.1
    assert difference.estimate == pytest.approx(0.41 / 0.51 - 1)


@pytest.mark.parametrize(("share", "is_false"), [(0.2, True), (0.1, True), (0.6, False)])
def test_failures_of_the_candidate_alone_count_against_it(share: float, is_false: bool) -> None:
    rng, num_rejected = random.Random(3), 0
    for _ in range(_NUM_RUNS):
        counts = [0, 0]
        for _ in range(80):
            counts[rng.random() >= share] += 1
            if log_evidence_of_more(*counts, expected_share=0.2) >= math.log(1 / _ALPHA):
                num_rejected += 1
                break
    rate = num_rejected / _NUM_RUNS
    assert rate <= _bound(_ALPHA) if is_false else rate > 0.95


@pytest.mark.parametrize("spread", [0.001, 0.05, 5.0])
def test_pairs_of_equal_arms_are_told_apart_in_at_most_alpha_of_runs(spread: float) -> None:
    """Heavy tails and any scale: symmetry is all that is assumed."""
    rng, num_rejected = random.Random(4), 0
    for _ in range(_NUM_RUNS):
        differences: list[float] = []
        for _ in range(60):
            size = spread / max(rng.random(), 1e-3)
            differences.append(size if rng.random() < 0.5 else -size)
            if log_evidence_of_shift(differences, 0.0) >= math.log(1 / _ALPHA):
                num_rejected += 1
                break
    assert num_rejected / _NUM_RUNS <= _bound(_ALPHA)


def test_a_shift_of_slots_is_found_and_bounded() -> None:
    rng = random.Random(5)
    differences = [0.15 + rng.gauss(0, 0.05) for _ in range(25)]
    found = shift_interval(differences, 0.05, limit=math.log(4))
    assert 0.03 < found.lower < 0.15 < found.upper < 0.3
    nothing = shift_interval(differences[:2], 0.05, limit=math.log(4))
    assert (nothing.lower, nothing.upper) == (-math.log(4), math.log(4))


def test_the_grid_agrees_with_the_evidence_it_inverts() -> None:
    differences = [0.15, 0.1, 0.2, 0.12, 0.18, 0.16, 0.14, 0.11, 0.17, 0.13, 0.15, 0.16]
    found = shift_interval(differences, 0.05, limit=1.0)
    assert log_evidence_of_shift(differences, found.lower) >= math.log(1 / 0.05)
    assert log_evidence_of_shift(differences, found.lower + 0.02) < math.log(1 / 0.05)
