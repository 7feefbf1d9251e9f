"""An experiment on one page: what was compared, every rail with its interval, what decides.

Markdown, so that it is read in a terminal, in a merge request and stored with a head alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from service.experiments.guard_rails import ArmCounts, Decision
from service.experiments.records import RollbackRecord
from service.experiments.sequential import Interval
from service.experiments.shadows import ShadowStanding, table
from service.experiments.specification import Experiment

_WORDS = {"continue": "go on", "roll_back": "roll back", "promote": "promote"}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an experiment stands at an instant; decisions are per candidate."""

    experiment: Experiment
    counts: Mapping[str, ArmCounts]
    decisions: Mapping[str, Decision]
    rollbacks: Sequence[RollbackRecord]
    at: datetime
    shadows: Sequence[ShadowStanding] = ()
    stage: str = ""


def render(standing: Standing) -> str:
    """The page."""
    experiment = standing.experiment
    lines = [
        f"# Experiment {experiment.name}",
        "",
        f"Since {_said(experiment.started_at)}, as of {_said(standing.at)}. "
        f"A {experiment.unit} keeps its variant.",
        "",
        "| variant | drafters | weight | requests | observations | failures | divergences | "
        "acceptance length |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in experiment.variants:
        found = standing.counts[variant.name]
        drafters = ", ".join(variant.drafters) or "none"
        lines.append(
            f"| {variant.name} | {drafters} | {variant.weight:g} | {found.num_requests} | "
            f"{found.num_units} | {found.num_failures} | {found.num_divergences} | "
            f"{_length(found.acceptance)} |"
        )
    if standing.stage:
        lines += ["", f"Promotes by itself: {standing.stage}, of which these figures are."]
    for name, decision in standing.decisions.items():
        lines += ["", f"## {name}: {_WORDS[decision.action.value]}", "", f"Rule: {decision.rule}."]
        lines += ["", "| rail | tolerated | found | broken |", "|---|---|---|---|"]
        lines += [
            f"| {f.rail} | {f.tolerance} | {f.detail} | {'yes' if f.is_broken else 'no'} |"
            for f in decision.findings
        ]
    if standing.shadows:
        lines += table(standing.shadows)
    if standing.rollbacks:
        lines += ["", "## Ended", ""]
        lines += [
            f"- {r.at}: {r.variant} was {_ended(r)}, because of {r.rule}"
            for r in standing.rollbacks
        ]
    alpha = experiment.guard_rails.alpha
    lines += [
        "",
        "Acceptance length: accepted drafts per step that gave tokens, plus one; steps without "
        f"drafts count. Intervals and tests hold at every moment together: a candidate within its "
        f"tolerances is ever rolled back by chance in at most {alpha:.0%} of experiments.",
        "",
    ]
    return "\n".join(lines)


def _ended(record: RollbackRecord) -> str:
    return "promoted" if record.is_promoted else "rolled back"


def _length(found: Interval | None) -> str:
    if found is None:
        return "too few yet"
    return f"{found.estimate:.2f} (from {found.lower:.2f} to {found.upper:.2f})"


def _said(instant: datetime) -> str:
    return f"{instant:%Y-%m-%d %H:%M} UTC"
