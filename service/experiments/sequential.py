"""Always-valid inference: intervals and tests that hold at every moment they are looked at.

Guard rails look after every request, so a test made for one look would raise false alarms.
Everything here is a nonnegative supermartingale under the hypothesis: by Ville's inequality
(1939) it ever exceeds 1 / alpha with a probability of at most alpha, whenever one stops.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MAX_BET = 0.5


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval around an estimate; lower <= upper."""

    estimate: float
    lower: float
    upper: float


class BoundedMean:
    """The mean of values in [0, 1], with an interval that holds at all times together.

    The empirical Bernstein confidence sequence with predictable bets of Waudby-Smith and Ramdas
    (2023, Estimating means of bounded random variables by betting, arXiv 2010.09686, theorem
    2). No distribution is assumed; values must have the same mean given the earlier ones.
    """

    def __init__(self, alpha: float) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha: must be between 0 and 1, got {alpha}")
        self._log = math.log(2 / alpha)
        self._num = 0
        self._total = 0.0
        self._squares = 0.25
        self._bets = 0.0
        self._won = 0.0
        self._spent = 0.0
        self._lower = 0.0
        self._upper = 1.0

    def add(self, value: float) -> None:
        """Raises ValueError for a value outside [0, 1]."""
        if not 0 <= value <= 1:
            raise ValueError(f"value: must be in [0, 1], got {value}")
        mean = (0.5 + self._total) / (self._num + 1)
        variance = self._squares / (self._num + 1)
        self._num += 1
        wanted = math.sqrt(2 * self._log / (variance * self._num * math.log(self._num + 1)))
        bet = min(wanted, _MAX_BET)
        self._bets += bet
        self._won += bet * value
        self._spent += (value - mean) ** 2 * (-math.log(1 - bet) - bet)
        self._total += value
        self._squares += (value - (0.5 + self._total) / (self._num + 1)) ** 2
        centre, radius = self._won / self._bets, (self._log + self._spent) / self._bets
        self._lower = max(self._lower, centre - radius)
        self._upper = min(self._upper, centre + radius)

    @property
    def num_values(self) -> int:
        return self._num

    @property
    def interval(self) -> Interval:
        """Estimate is the plain mean (0.5 before the first value), cut to the bounds."""
        mean = self._total / self._num if self._num else 0.5
        lower, upper = min(self._lower, self._upper), max(self._lower, self._upper)
        return Interval(min(max(mean, lower), upper), lower, upper)


def relative_difference(candidate: Interval, control: Interval) -> Interval:
    """Bounds of candidate / control - 1 where both intervals hold; both must be positive."""
    return Interval(
        candidate.estimate / control.estimate - 1,
        candidate.lower / control.upper - 1,
        candidate.upper / control.lower - 1,
    )


_ODDS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


def log_evidence_of_more(num_candidate: int, num_control: int, expected_share: float) -> float:
    """Log evidence that rare events (failures) fall on the candidate more often than they should.

    expected_share: of all events, the candidate's when both arms have the tolerated ratio of
    rates. Given that an event happened, which arm had it is a coin, whatever the rate is and
    however it drifts (Lindon and Malek 2022, Anytime-valid inference for multinomial count data,
    arXiv 2011.03567). The likelihood ratio of each larger odds against expected_share is a
    supermartingale while the candidate's share is at most expected_share; this is the log of
    their mean over a fixed set of odds. Reject when it reaches log(1 / alpha).
    """
    if not 0 < expected_share < 1:
        raise ValueError(f"expected_share: must be between 0 and 1, got {expected_share}")
    odds = expected_share / (1 - expected_share)
    logs = []
    for factor in _ODDS:
        share = odds * factor / (1 + odds * factor)
        logs.append(
            num_candidate * math.log(share / expected_share)
            + num_control * math.log((1 - share) / (1 - expected_share))
        )
    return _log_mean_exp(logs)


_SCALES = (1.0, 3.0, 10.0, 30.0, 100.0)


def log_evidence_of_shift(differences: Sequence[float], shift: float) -> float:
    """Log evidence that differences are not symmetric around `shift`.

    For symmetric values exp(bet D - bet^2 D^2 / 2) is a supermartingale without any assumption on
    their size (de la Pena 1999; Howard, Ramdas, McAuliffe and Sekhon 2020, Time-uniform Chernoff
    bounds, arXiv 1808.03204). Mixed over normal bets of variance r^2 it is
    exp(r^2 S^2 / (2 (1 + r^2 V))) / sqrt(1 + r^2 V), with S the sum and V the sum of squares
    (the mixture SPRT of Robbins 1970, self-normalised); averaged over some r.
    Symmetry needs no model when the order within a pair is drawn by lot.
    """
    total = math.fsum(value - shift for value in differences)
    squares = math.fsum((value - shift) ** 2 for value in differences)
    return _log_shift_evidence(total, squares)


def _log_shift_evidence(total: float, squares: float) -> float:
    logs = []
    for scale in _SCALES:
        inner = 1 + scale * scale * squares
        logs.append((scale * total) ** 2 / (2 * inner) - 0.5 * math.log(inner))
    return _log_mean_exp(logs)


def shift_interval(differences: Sequence[float], alpha: float, *, limit: float) -> Interval:
    """The shifts within +-limit that are not rejected, as one interval; all while nothing is known.

    limit: a shift beyond it is taken to be impossible, a choice that the caller states.
    """
    num_steps = 400
    threshold = math.log(1 / alpha)
    grid = [limit * (2 * step / num_steps - 1) for step in range(num_steps + 1)]
    count, total = len(differences), math.fsum(differences)
    squares = math.fsum(value * value for value in differences)

    def is_kept(shift: float) -> bool:
        around = max(0.0, squares - 2 * shift * total + count * shift * shift)
        return _log_shift_evidence(total - count * shift, around) < threshold

    kept = [shift for shift in grid if is_kept(shift)]
    step = 2 * limit / num_steps
    mean = total / count if count else 0.0
    mean = min(max(mean, -limit), limit)
    if not kept:
        return Interval(mean, mean, mean)
    lower, upper = max(-limit, kept[0] - step), min(limit, kept[-1] + step)
    return Interval(min(max(mean, lower), upper), lower, upper)


def _log_mean_exp(logs: Iterable[float]) -> float:
    values = list(logs)
    largest = max(values)
    return largest + math.log(sum(math.exp(v - largest) for v in values) / len(values))
