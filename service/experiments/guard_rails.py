"""From what was observed of a candidate to what is done with it, with the rule that decided. Pure.

The rails share alpha: whatever a candidate's true figures are, as long as none is worse than its
tolerance, the probability that it is ever rolled back by chance is at most alpha. A divergence is
no matter of chance: one more than tolerated rolls back at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.experiments.sequential import (
    Interval,
    log_evidence_of_more,
    relative_difference,
    shift_interval,
)

ACCEPTANCE = "acceptance length"
_SHIFT_LIMIT = math.log(4)  # no slot's latency is more than four times the other's


class Action(StrEnum):
    CONTINUE = "continue"
    ROLL_BACK = "roll_back"
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True)
class GuardRails:
    """Tolerances, relative unless they are counts.

    alpha: of all statistical rails together. min_units: per arm, before acceptance decides.
    max_acceptance_loss: of the acceptance length. max_failure_ratio: of the failure rates.
    max_slowdown: of the mean time per output token. max_p99_increase: of its 99th percentile.
    min_slot_requests: below it a slot has no figure. requests_per_tenant: how many requests of
    a tenant make its one observation where the unit is the tenant.
    min_acceptance_gain: a candidate is promoted when it surely gains more than this and, where
    there are slots, is surely within max_slowdown and max_p99_increase.
    """

    alpha: float = 0.05
    min_units: int = 100
    max_acceptance_loss: float = 0.01
    min_acceptance_gain: float = 0.0
    max_failure_ratio: float = 1.5
    max_divergences: int = 0
    max_slowdown: float = 0.03
    max_p99_increase: float = 0.10
    min_slot_requests: int = 20
    requests_per_tenant: int = 20

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, reason: str) -> None:
            if not condition:
                value = getattr(self, name)
                raise ValueError(f"guard_rails.{name}: {reason}, got {value!r}")

        for name in ("min_units", "max_divergences", "min_slot_requests", "requests_per_tenant"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            require(is_whole, name, "must be a whole number")
            require(value >= (name != "max_divergences"), name, "is too small")
        require(_is_number(self.alpha) and 0 < self.alpha < 1, "alpha", "must be in (0, 1)")
        for name in ("max_acceptance_loss", "max_slowdown", "max_p99_increase"):
            value = getattr(self, name)
            require(_is_number(value) and 0 <= value < 1, name, "must be in [0, 1)")
        gain = self.min_acceptance_gain
        require(_is_number(gain) and gain >= 0, "min_acceptance_gain", "must not be negative")
        ratio = self.max_failure_ratio
        require(_is_number(ratio) and ratio >= 1, "max_failure_ratio", "must be at least 1")

    def alpha_per_test(self, *, num_candidates: int, has_slots: bool) -> float:
        """Of one two-sided interval or one test."""
        return self.alpha / (max(1, num_candidates) * (4 if has_slots else 2))


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """Requests of one arm while the candidate had its share. acceptance is the mean acceptance
    length per unit, or None before min_units of them."""

    num_requests: int
    num_units: int
    num_failures: int
    num_divergences: int
    acceptance: Interval | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """candidate_share: of the requests of both arms that the candidate should have.

    slowdowns and p99_increases: log(with candidate / without) of each pair of slots; None where
    the experiment has no slots.
    """

    candidate: ArmCounts
    control: ArmCounts
    candidate_share: float
    slowdowns: Sequence[float] | None = None
    p99_increases: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One rail: the estimated effect with its interval, relative; None while nothing is known."""

    rail: str
    tolerance: str
    is_broken: bool
    allows_promotion: bool
    effect: Interval | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """rule: the sentence that decided."""

    action: Action
    rule: str
    findings: tuple[Finding, ...]


def judge(evidence: Evidence, rails: GuardRails, alpha_per_test: float) -> Decision:
    """Roll back at the first broken rail, promote when all allow it, else go on."""
    findings = [
        _divergences(evidence, rails),
        _failures(evidence, rails, alpha_per_test),
        _acceptance(evidence, rails),
    ]
    if evidence.slowdowns is not None and evidence.p99_increases is not None:
        for name, differences, limit in (
            ("time per output token", evidence.slowdowns, rails.max_slowdown),
            ("99th percentile of the time per token", evidence.p99_increases,
             rails.max_p99_increase),
        ):  # fmt: skip
            findings.append(_slots(name, differences, limit, alpha_per_test))
    for finding in findings:
        if finding.is_broken:
            rule = f"{finding.rail}: {finding.detail}; tolerated is {finding.tolerance}"
            return Decision(Action.ROLL_BACK, rule, tuple(findings))
    if all(finding.allows_promotion for finding in findings):
        rule = "acceptance gained for certain, and every other rail holds"
        return Decision(Action.PROMOTE, rule, tuple(findings))
    waiting = ", ".join(f.rail for f in findings if not f.allows_promotion)
    return Decision(Action.CONTINUE, f"not certain yet: {waiting}", tuple(findings))


def _divergences(evidence: Evidence, rails: GuardRails) -> Finding:
    found = evidence.candidate.num_divergences
    return Finding(
        rail="divergence",
        tolerance=f"at most {rails.max_divergences} requests that differ from the target",
        is_broken=found > rails.max_divergences,
        allows_promotion=True,
        detail=f"the auditor found {found}",
    )


def _failures(evidence: Evidence, rails: GuardRails, alpha: float) -> Finding:
    share = evidence.candidate_share
    tolerated = share * rails.max_failure_ratio
    tolerated /= tolerated + (1 - share)
    failed, others = evidence.candidate.num_failures, evidence.control.num_failures
    log_evidence = log_evidence_of_more(failed, others, tolerated)
    return Finding(
        rail="failures",
        tolerance=f"{rails.max_failure_ratio:g} times the control's rate",
        is_broken=log_evidence >= math.log(1 / alpha),
        allows_promotion=True,
        detail=(
            f"{failed} of {failed + others} failures are the candidate's, at most "
            f"{tolerated:.1%} should be (evidence {math.exp(min(log_evidence, 700)):.3g} to 1)"
        ),
    )


def _acceptance(evidence: Evidence, rails: GuardRails) -> Finding:
    tolerance = f"a loss of {rails.max_acceptance_loss:.1%}"
    candidate, control = evidence.candidate.acceptance, evidence.control.acceptance
    if candidate is None or control is None:
        detail = f"fewer than {rails.min_units} observations in an arm"
        return Finding(ACCEPTANCE, tolerance, False, False, None, detail)
    effect = relative_difference(candidate, control)
    return Finding(
        rail=ACCEPTANCE,
        tolerance=tolerance,
        is_broken=effect.upper < -rails.max_acceptance_loss,
        allows_promotion=effect.lower > rails.min_acceptance_gain,
        effect=effect,
        detail=_said(effect),
    )


def _slots(name: str, differences: Sequence[float], limit: float, alpha: float) -> Finding:
    logs = shift_interval(differences, alpha, limit=_SHIFT_LIMIT)
    effect = Interval(*(math.expm1(value) for value in (logs.estimate, logs.lower, logs.upper)))
    return Finding(
        rail=name,
        tolerance=f"an increase of {limit:.1%}",
        is_broken=effect.lower > limit,
        allows_promotion=effect.upper < limit,
        effect=effect,
        detail=f"{_said(effect)} over {len(differences)} pairs of slots",
    )


def _said(effect: Interval) -> str:
    return f"changed by {effect.estimate:+.1%} (from {effect.lower:+.1%} to {effect.upper:+.1%})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
