"""What heads in the shadow would have got accepted, from the ledger: beside whom, and how sure.

Every finished request that was chosen gives one observation of each head measured on it. A
difference is taken request by request, so that what makes one request easy cancels out, and its
interval holds at all times together (service/experiments/sequential.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from service.experiments.sequential import BoundedMean, Interval
from service.experiments.specification import Experiment, Shadow
from telemetry.ledger import models


@dataclass(frozen=True, slots=True)
class ShadowStanding:
    """A head in the shadow. acceptance and gain are acceptance lengths (accepted drafts per full
    round, plus one): its own, and its own minus the baseline's on the same requests. None before
    the first request. num_given_up: requests chosen and not measured, of all shadows."""

    drafter: str
    num_requests: int
    acceptance: Interval | None
    baseline: str = ""
    num_paired: int = 0
    gain: Interval | None = None
    num_given_up: int = 0


def read_shadows(
    engine: Engine, experiment: Experiment, max_draft_tokens: int
) -> tuple[ShadowStanding, ...]:
    """Raises SQLAlchemyError."""
    if not experiment.shadows:
        return ()
    with Session(engine) as session:
        return tuple(
            _standing(session, experiment, shadow, max_draft_tokens)
            for shadow in experiment.shadows
        )


def _standing(
    session: Session, experiment: Experiment, shadow: Shadow, max_draft_tokens: int
) -> ShadowStanding:
    result, drafter = models.ShadowResult, models.Drafter
    since = result.measured_at >= experiment.started_at
    rows = session.execute(
        select(
            result.instance_id,
            result.request_id,
            drafter.name,
            result.num_accepted_tokens,
            result.num_rounds,
        )
        .join(drafter, drafter.drafter_key == result.drafter_key)
        .where(since)
        .order_by(result.shadow_id)
    )
    given_up = session.scalar(select(func.sum(result.num_given_up)).where(since)) or 0
    alpha = experiment.guard_rails.alpha
    own, gains = BoundedMean(alpha), BoundedMean(alpha)
    others: dict[tuple[str, str], float] = {}
    waiting: dict[tuple[str, str], float] = {}
    baseline = ""
    for instance_id, request_id, name, num_accepted, num_rounds in rows:
        key, value = (
            (instance_id, request_id),
            min(1.0, num_accepted / num_rounds / max_draft_tokens),
        )
        if name == shadow.drafter:
            own.add(value)
            waiting[key] = value
        elif _is_baseline(name, experiment):
            others[key], baseline = value, name
        if key in waiting and key in others:
            gains.add((1 + waiting.pop(key) - others.pop(key)) / 2)
    return ShadowStanding(
        drafter=shadow.drafter,
        num_requests=own.num_values,
        acceptance=_scaled(own, max_draft_tokens, 1.0) if own.num_values else None,
        baseline=baseline,
        num_paired=gains.num_values,
        gain=_scaled(gains, 2 * max_draft_tokens, -max_draft_tokens) if gains.num_values else None,
        num_given_up=int(given_up),
    )


def _is_baseline(name: str, experiment: Experiment) -> bool:
    """The ledger says the version that a name stood for; other shadows of it are no control."""
    wanted = experiment.baseline
    if wanted is None or name == wanted:
        return wanted is not None
    is_shadow = name in {shadow.drafter for shadow in experiment.shadows}
    return name.partition("@")[0] == wanted and not is_shadow


def _scaled(mean: BoundedMean, factor: float, offset: float) -> Interval:
    found = mean.interval
    values = (offset + factor * value for value in (found.estimate, found.lower, found.upper))
    return Interval(*values)


def table(shadows: Sequence[ShadowStanding]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "",
        "## In the shadow",
        "",
        "Measured by exact replay of finished requests, in full rounds; it drafts for nobody.",
        "",
        "| drafter | requests | acceptance length | against | same requests | gain |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.drafter} | {s.num_requests} | {_said(s.acceptance)} | {s.baseline or 'nobody'} | "
        f"{s.num_paired} | {_said(s.gain, '+.2f')} |"
        for s in shadows
    ]
    lines += ["", f"{shadows[0].num_given_up} requests were chosen and not measured."]
    return lines


def _said(found: Interval | None, form: str = ".2f") -> str:
    if found is None:
        return "none yet"
    return f"{found.estimate:{form}} (from {found.lower:{form}} to {found.upper:{form}})"
