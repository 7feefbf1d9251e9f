"""Variants by a keyed hash: sticky, in proportion to the weights, moving no more than needed."""

from collections import Counter

import pytest

from service.experiments.assignment import assign

_UNITS = [f"tenant-{index}" for index in range(20_000)]
_KEY = b"secret"


def _all(weights: dict[str, float], key: bytes = _KEY) -> list[str]:
    return [assign(key, unit, weights) for unit in _UNITS]


def test_a_unit_keeps_its_variant_and_shares_follow_the_weights() -> None:
    weights = {"control": 0.7, "a": 0.2, "b": 0.1}
    first = _all(weights)
    assert first == _all(dict(reversed(weights.items())))
    counts = Counter(first)
    for name, weight in weights.items():
        expected = weight * len(_UNITS)
        assert abs(counts[name] - expected) < 4 * (expected * (1 - weight)) ** 0.5


def test_weights_need_not_add_up_to_one() -> None:
    assert _all({"control": 9, "a": 1}) == _all({"control": 0.9, "a": 0.1})


def test_raising_a_weight_moves_units_to_it_alone_and_the_fewest() -> None:
    before = _all({"control": 0.8, "a": 0.1, "b": 0.1})
    after = _all({"control": 0.6, "a": 0.3, "b": 0.1})
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} <= {"a", "control", "b"}
    assert not [m for m in moved if m[0] == "a"], "a has more weight and must lose nobody"
    assert not [m for m in moved if m[1] == "control"], "control has less and must gain nobody"
    assert abs(len(moved) / len(_UNITS) - 0.2) < 0.015  # the distance between the shares


def test_another_key_is_another_draw() -> None:
    weights = {"control": 0.5, "a": 0.5}
    same = sum(x == y for x, y in zip(_all(weights), _all(weights, b"other"), strict=True))
    assert abs(same / len(_UNITS) - 0.5) < 0.02


def test_no_weight_means_no_request() -> None:
    assert set(_all({"control": 1, "a": 0})) == {"control"}


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 1.0}, {"a": float("nan")}])
def test_weights_that_say_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        assign(_KEY, "unit", weights)
