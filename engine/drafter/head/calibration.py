"""From a head's confidence to the probability that the target accepts."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """acceptance[i] at confidence[i], both rising; linear between, constant beyond."""

    confidence: tuple[float, ...] = (0.0, 1.0)
    acceptance: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if len(self.confidence) != len(self.acceptance) or not self.confidence:
            raise ValueError("calibration: needs one acceptance per confidence")
        for name in ("confidence", "acceptance"):
            values = getattr(self, name)
            if list(values) != sorted(values) or not 0 <= values[0] <= values[-1] <= 1:
                raise ValueError(f"calibration.{name}: must rise within 0 and 1")

    def acceptance_of(self, confidence: float) -> float:
        right = bisect.bisect_left(self.confidence, confidence)
        if right == 0:
            return self.acceptance[0]
        if right == len(self.confidence):
            return self.acceptance[-1]
        low, high = self.confidence[right - 1], self.confidence[right]
        share = (confidence - low) / (high - low)
        return self.acceptance[right - 1] * (1 - share) + self.acceptance[right] * share


def fit_calibration(pairs: Sequence[tuple[float, bool]], num_bins: int = 16) -> Calibration:
    """Isotonic over bins of equally many (confidence, was accepted) pairs: neighbouring bins
    that contradict the order are pooled (Ayer et al. 1955)."""
    if len(pairs) < 2 * num_bins:
        return Calibration()
    ordered = sorted(pairs)
    groups: list[tuple[float, float, int]] = []  # (sum of confidence, accepted, count)
    for index in range(num_bins):
        part = ordered[index * len(ordered) // num_bins : (index + 1) * len(ordered) // num_bins]
        groups.append((sum(c for c, _ in part), float(sum(hit for _, hit in part)), len(part)))
        while len(groups) > 1 and _rate(groups[-2]) >= _rate(groups[-1]):
            last, before = groups.pop(), groups.pop()
            groups.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    confidence = [total / count for total, _, count in groups]
    return Calibration(tuple(confidence), tuple(_rate(group) for group in groups))


def _rate(group: tuple[float, float, int]) -> float:
    return group[1] / group[2]
