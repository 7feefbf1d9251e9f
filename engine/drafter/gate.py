"""Whether a replay over the target's own answers lets a head be promoted over another.

Verification is lossless, so answers that the target gave score any head exactly: a head that
loses here has nothing to prove on live traffic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SOURCE_LOSS = 0.01
MIN_SOURCE_SHARE = 0.05


class GateError(ValueError):
    """An evaluation that does not say what is needed; the message names it."""


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """difference: of the acceptance lengths at T = 0, candidate minus production, with its 95 %
    interval. objections: why not; empty when it may be promoted."""

    candidate: str
    production: str
    difference: float
    ci: tuple[float, float]
    objections: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        return not self.objections


def check_heads(evaluation: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
    """Whether the names of an evaluation stand for these very files. Raises GateError."""
    for name, expected in fingerprints.items():
        found = _head(evaluation.get("heads", {}), name).get("fingerprint")
        if found is None:
            raise GateError(f"evaluation: does not say which head {name!r} is; compare again")
        if found != expected:
            raise GateError(
                f"evaluation: {name!r} is the head {found} there, and {expected} in the registry"
            )


def judge_replay(
    evaluation: Mapping[str, Any],
    candidate: str,
    production: str,
    *,
    max_source_loss: float = MAX_SOURCE_LOSS,
    min_source_share: float = MIN_SOURCE_SHARE,
) -> GateVerdict:
    """evaluation: what `tandem train compare` writes of both heads. The candidate must be better
    beyond the interval, and lose no more than max_source_loss on any source of at least
    min_source_share of the conversations. Raises GateError."""
    try:
        heads = evaluation["heads"]
        ours, theirs = (_head(heads, name) for name in (candidate, production))
        difference, low, high = _difference(evaluation["comparisons"], candidate, production)
        objections = []
        if low <= 0:
            objections.append(
                f"acceptance length: {difference:+.3f} (from {low:+.3f} to {high:+.3f}) is not "
                "significantly better"
            )
        total = sum(entry["num_conversations"] for entry in theirs["by_source"].values())
        for source, entry in theirs["by_source"].items():
            if entry["num_conversations"] < min_source_share * total:
                continue
            before = float(entry["acceptance_length"])
            loss = 1 - float(ours["by_source"][source]["acceptance_length"]) / before
            if loss > max_source_loss:
                objections.append(f"source {source}: loses {loss:.1%}, tolerated is "
                                  f"{max_source_loss:.1%}")  # fmt: skip
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, GateError):
            raise
        raise GateError(f"evaluation: {type(error).__name__} {error}") from error
    return GateVerdict(candidate, production, difference, (low, high), tuple(objections))


def _head(heads: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name not in heads:
        raise GateError(f"evaluation: has no head {name!r}, only {sorted(heads)}")
    found: Mapping[str, Any] = heads[name]
    return found


def _difference(
    comparisons: Mapping[str, Any], candidate: str, production: str
) -> tuple[float, float, float]:
    """The comparison is there one way round or the other."""
    entry = comparisons.get(f"{candidate} - {production}")
    if entry is not None:
        low, high = entry["greedy"]["ci"]
        return float(entry["greedy"]["difference"]), float(low), float(high)
    entry = comparisons.get(f"{production} - {candidate}")
    if entry is None:
        raise GateError(f"evaluation: does not compare {candidate!r} with {production!r}")
    low, high = entry["greedy"]["ci"]
    return -float(entry["greedy"]["difference"]), -float(high), -float(low)
