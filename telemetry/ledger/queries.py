"""Reading the ledger: health checks and totals. Works on a read-only engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, Engine, func, select
from sqlalchemy.orm import Session

from telemetry.ledger import models
from telemetry.ledger.dimensions import table_of
from telemetry.ledger.records import NANOSECONDS_PER_HOUR
from telemetry.ledger.session import head_revision, schema_revision


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """Totals over the rows that count (corrections instead of what they supersede)."""

    num_requests: int
    num_by_outcome: Mapping[str, int]
    num_open: int
    num_intervals: int
    num_audits: int
    last_ledger_id: int
    last_recorded_at: datetime | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    requests_cost_nano_usd: int
    idle_cost_nano_usd: int
    lost_cost_nano_usd: int
    embodied_cost_nano_usd: int  # the part of all three that prices name as manufacture
    num_with_energy: int
    energy_microjoules: int | None  # of the requests that know it


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `check_ledger` looked at."""

    name: str
    is_good: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Money of ended instances: what requests, idle and lost time add up to, and what is due."""

    num_instances: int
    charged_nano_usd: int
    due_nano_usd: int
    differing: Mapping[str, int] = field(default_factory=dict)  # instance id -> nano-USD off


def ledger_stats(engine: Engine) -> LedgerStats:
    """Totals of the whole ledger."""
    request, interval = models.Request, models.CapacityInterval
    current = _is_current()
    with Session(engine) as session:
        outcomes = session.execute(
            select(request.outcome, func.count()).where(current).group_by(request.outcome)
        ).all()
        last_id, last_at = session.execute(
            select(func.max(request.ledger_id), func.max(request.recorded_at))
        ).one()
        sums = session.execute(
            select(
                func.coalesce(func.sum(request.num_prompt_tokens), 0),
                func.coalesce(func.sum(request.num_output_tokens), 0),
                func.coalesce(func.sum(request.num_draft_tokens), 0),
                func.coalesce(func.sum(request.num_accepted_tokens), 0),
                func.coalesce(func.sum(request.cost_nano_usd), 0),
                func.count(request.energy_microjoules),
                func.sum(request.energy_microjoules),
            ).where(current)
        ).one()
        num_intervals, idle, lost = session.execute(
            select(
                func.count(),
                func.coalesce(func.sum(interval.cost_idle_nano_usd), 0),
                func.coalesce(func.sum(interval.cost_lost_nano_usd), 0),
            ).select_from(interval)
        ).one()
        embodied = session.execute(
            select(models.Price.embodied_nano_usd_per_hour, func.sum(interval.wall_nanoseconds))
            .join(interval, interval.price_key == models.Price.price_key)
            .group_by(models.Price.price_key)
        ).all()
        by_outcome = {str(outcome): int(count) for outcome, count in outcomes}
        return LedgerStats(
            num_requests=sum(by_outcome.values()),
            num_by_outcome=by_outcome,
            num_open=_count(session, models.RequestStart),
            num_intervals=int(num_intervals),
            num_audits=_count(session, models.AuditResult),
            last_ledger_id=int(last_id or 0),
            last_recorded_at=last_at,
            num_prompt_tokens=int(sums[0]),
            num_output_tokens=int(sums[1]),
            num_draft_tokens=int(sums[2]),
            num_accepted_tokens=int(sums[3]),
            requests_cost_nano_usd=int(sums[4]),
            idle_cost_nano_usd=int(idle),
            lost_cost_nano_usd=int(lost),
            embodied_cost_nano_usd=sum(int(wall) * int(per_hour) for per_hour, wall in embodied)
            // NANOSECONDS_PER_HOUR,
            num_with_energy=int(sums[5]),
            energy_microjoules=None if sums[6] is None else int(sums[6]),
        )


def reconcile(engine: Engine) -> Reconciliation:
    """Check, for every instance that ended, requests + idle + lost = price x wall time.

    Exact to the nano-dollar. An instance whose oldest requests retention has deleted is checked
    by its intervals alone.
    """
    request, interval = models.Request, models.CapacityInterval
    with Session(engine) as session:
        ended = session.scalars(
            select(models.Instance.instance_id).where(models.Instance.stopped_at.is_not(None))
        ).all()
        walls = session.execute(
            select(
                interval.instance_id,
                models.Price.nano_usd_per_hour,
                func.sum(interval.wall_nanoseconds),
                func.sum(interval.cost_busy_nano_usd),
                func.sum(interval.cost_idle_nano_usd + interval.cost_lost_nano_usd),
            )
            .join(models.Price, models.Price.price_key == interval.price_key)
            .group_by(interval.instance_id, models.Price.price_key)
        ).all()
        costs = session.execute(
            select(request.instance_id, func.sum(request.cost_nano_usd))
            .where(_is_current())
            .group_by(request.instance_id)
        ).all()
        charged_by_instance = {instance_id: int(cost) for instance_id, cost in costs}
        pruned = _instances_cut_by_retention(session)
    due: dict[str, int] = dict.fromkeys(ended, 0)
    charged: dict[str, int] = dict.fromkeys(ended, 0)
    busy: dict[str, int] = dict.fromkeys(ended, 0)
    for instance_id, per_hour, wall, busy_cost, other_cost in walls:
        if instance_id in due:
            due[instance_id] += int(wall) * int(per_hour)
            charged[instance_id] += int(other_cost)
            busy[instance_id] += int(busy_cost)
    for instance_id in ended:
        due[instance_id] //= NANOSECONDS_PER_HOUR
        by_requests = charged_by_instance.get(instance_id, 0)
        charged[instance_id] += busy[instance_id] if instance_id in pruned else by_requests
    return Reconciliation(
        num_instances=len(ended),
        charged_nano_usd=sum(charged.values()),
        due_nano_usd=sum(due.values()),
        differing={i: charged[i] - due[i] for i in ended if charged[i] != due[i]},
    )


def check_ledger(engine: Engine, now: datetime | None = None) -> list[Finding]:
    """What an operator wants to know: schema, money, tokens, orphans."""
    revision, head = schema_revision(engine), head_revision()
    findings = [Finding("schema", revision == head, f"at {revision}, this version needs {head}")]
    if revision != head:
        return findings
    money = reconcile(engine)
    findings.append(
        Finding(
            "cost",
            not money.differing,
            f"requests + idle + lost = {money.charged_nano_usd} nano-USD, price x wall time = "
            f"{money.due_nano_usd} over {money.num_instances} ended instances"
            + (f"; differing: {dict(money.differing)}" if money.differing else ""),
        )
    )
    return [*findings, *_check_rows(engine, now or datetime.now(UTC))]


def _check_rows(engine: Engine, now: datetime) -> list[Finding]:
    request, start = models.Request, models.RequestStart
    with Session(engine) as session:
        broken_cost = session.scalar(
            select(func.count())
            .select_from(request)
            .where(
                request.cost_nano_usd
                != request.cost_prefill_nano_usd
                + request.cost_decode_nano_usd
                + request.cost_draft_nano_usd
                + request.cost_drafter_nano_usd
            )
        )
        broken_counts = session.scalar(
            select(func.count())
            .select_from(request)
            .where(request.num_accepted_tokens > request.num_draft_tokens)
        )
        old_starts = session.scalar(
            select(func.count())
            .select_from(start)
            .where(start.started_at < now - timedelta(days=1))
        )
        silent = session.scalar(
            select(func.count())
            .select_from(models.Instance)
            .where(
                models.Instance.stopped_at.is_(None),
                models.Instance.last_seen_at < now - timedelta(minutes=30),
            )
        )
    return [
        Finding("cost parts", not broken_cost, f"{broken_cost} rows whose parts differ from cost"),
        Finding("acceptance", not broken_counts, f"{broken_counts} rows accepted > drafted"),
        Finding("open requests", not old_starts, f"{old_starts} open for more than a day"),
        Finding("silent servers", not silent, f"{silent} neither stopped nor seen for 30 minutes"),
    ]


def _instances_cut_by_retention(session: Session) -> set[str]:
    """Instances that started before the oldest request that is still there, if any was deleted."""
    oldest, first_id = session.execute(
        select(func.min(models.Request.started_at), func.min(models.Request.ledger_id))
    ).one()
    if oldest is None or first_id == 1:
        return set()
    query = select(models.Instance.instance_id).where(models.Instance.started_at <= oldest)
    return set(session.scalars(query))


def _is_current() -> ColumnElement[bool]:
    superseded = select(models.Request.supersedes_ledger_id).where(
        models.Request.supersedes_ledger_id.is_not(None)
    )
    return models.Request.ledger_id.not_in(superseded)


def _count(session: Session, entity: type[models.Base]) -> int:
    return int(session.scalar(select(func.count()).select_from(table_of(entity))) or 0)
