"""Slots of time: what one arm does to everybody's latency cannot be told request by request.

Requests of both arms share every step of a batch, so their latencies are alike whatever the
arms do. Time is therefore cut into pairs of slots. In one slot of a pair the candidate gets its
share of the traffic, in the other nobody gets it; which comes first is drawn by lot per pair,
from a keyed hash, so that every server and every later analysis knows it. A pair gives one
difference, of the logs of a slot's figure, and differences are symmetric if the arms are alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.experiments.assignment import uniform


@dataclass(frozen=True, slots=True)
class Slots:
    """A schedule. slot_seconds: length of a slot. washout_seconds: of each slot's beginning,
    in which requests of the slot before still run, and which is left out of the analysis."""

    key: bytes
    slot_seconds: float
    washout_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.slot_seconds > 0:
            raise ValueError(f"slot_seconds: must be positive, got {self.slot_seconds}")
        if not 0 <= self.washout_seconds < self.slot_seconds:
            raise ValueError("washout_seconds: must be shorter than slot_seconds")

    def index_of(self, at: float) -> int:
        """The slot of an instant in Unix seconds; even slots begin a pair."""
        return math.floor(at / self.slot_seconds)

    def has_candidate(self, index: int) -> bool:
        """Whether the candidate gets its share in this slot."""
        is_first = uniform(self.key, "slot pair", str(index // 2)) <= 0.5
        return is_first == (index % 2 == 0)

    def is_counted(self, at: float) -> bool:
        return at - self.index_of(at) * self.slot_seconds >= self.washout_seconds


def pair_differences(
    figures: Mapping[int, float], slots: Slots, *, before: int | None = None
) -> list[float]:
    """log(with candidate / without) of every pair of which both slots have a positive figure.

    figures: by slot. before: slots from this one on may not be complete yet and are left out.
    """
    differences = []
    for even in sorted({index - index % 2 for index in figures}):
        if before is not None and even + 1 >= before:
            continue
        first, second = figures.get(even), figures.get(even + 1)
        if first is None or second is None or first <= 0 or second <= 0:
            continue
        difference = math.log(first / second)
        differences.append(difference if slots.has_candidate(even) else -difference)
    return differences


def figures_by_slot(
    observations: Iterable[tuple[float, float]],
    slots: Slots,
    *,
    quantile: float | None,
    min_observations: int,
) -> dict[int, float]:
    """A figure per slot of (instant, value): the mean, or a quantile.

    Slots with fewer values, the washout not counted, have none.
    """
    values: dict[int, list[float]] = {}
    for at, value in observations:
        if slots.is_counted(at):
            values.setdefault(slots.index_of(at), []).append(value)
    return {
        index: _mean(found) if quantile is None else quantile_of(found, quantile)
        for index, found in values.items()
        if len(found) >= min_observations
    }


def quantile_of(values: Sequence[float], quantile: float) -> float:
    """Linear between the two nearest order statistics."""
    ordered = sorted(values)
    place = quantile * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
