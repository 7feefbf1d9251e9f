"""Closing what a killed server left open: its requests, and the cost that it had not filed."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, func, or_, select, update
from sqlalchemy.engine import Row
from sqlalchemy.orm import Session

from telemetry.ledger import models
from telemetry.ledger.dimensions import table_of
from telemetry.ledger.records import (
    NANOSECONDS_PER_HOUR,
    CapacityRecord,
    LatencySummary,
    ModelRecord,
    Outcome,
    PriceRecord,
    Record,
    RequestRecord,
    TenantRecord,
    TokenCounts,
)
from telemetry.ledger.store import LedgerStore

FOREIGN_INSTANCE_SILENCE = timedelta(minutes=30)
ORPHAN_ERROR = "the server ended while the request ran"


def close_orphans(engine: Engine, store: LedgerStore, *, node: str, instance_id: str) -> int:
    """Close the instances that ended without saying so; the number of orphaned requests.

    Those of this node are dead for certain, because the journal's lock is ours. Those of other
    nodes count as dead after half an hour of silence; should one live on, its real rows
    supersede the ones written here. Doing it twice writes nothing new.
    """
    num_orphans = 0
    for dead in _dead_instances(engine, node, instance_id):
        records = _orphans_of(engine, dead)
        num_orphans += len(records)
        last_sign = _last_sign_of_life(engine, dead, records)
        lost = _lost_interval(engine, dead, last_sign)
        batch: list[Record] = [*records, *([lost] if lost else [])]
        if batch:
            store.write(batch, may_exist=True)
        table = table_of(models.Instance)
        with engine.begin() as connection:
            connection.execute(
                update(table)
                .where(table.c.instance_id == dead.instance_id)
                .values(stopped_at=last_sign, last_seen_at=last_sign)
            )
    return num_orphans


def _dead_instances(engine: Engine, node: str, instance_id: str) -> Sequence[Row[Any]]:
    table = table_of(models.Instance)
    silent_since = datetime.now(UTC) - FOREIGN_INSTANCE_SILENCE
    query = (
        select(table)
        .where(table.c.stopped_at.is_(None), table.c.instance_id != instance_id)
        .where(or_(table.c.node == node, table.c.last_seen_at < silent_since))
    )
    with engine.connect() as connection:
        return connection.execute(query).all()


def _orphans_of(engine: Engine, dead: Row[Any]) -> list[RequestRecord]:
    query = (
        select(
            models.RequestStart,
            models.Model,
            models.Variant.name,
            models.Tenant,
            models.Price,
        )
        .outerjoin(models.Model, models.Model.model_key == models.RequestStart.model_key)
        .outerjoin(models.Variant, models.Variant.variant_key == models.RequestStart.variant_key)
        .outerjoin(models.Tenant, models.Tenant.tenant_key == models.RequestStart.tenant_key)
        .outerjoin(models.Price, models.Price.price_key == models.RequestStart.price_key)
        .where(models.RequestStart.instance_id == dead.instance_id)
    )
    with Session(engine) as session:
        return [
            _orphan(start, model, variant, tenant, price, dead.last_seen_at)
            for start, model, variant, tenant, price in session.execute(query)
        ]


def _orphan(
    start: models.RequestStart,
    model: models.Model | None,
    variant: str | None,
    tenant: models.Tenant | None,
    price: models.Price | None,
    last_seen_at: datetime,
) -> RequestRecord:
    finished_at = max(start.started_at, last_seen_at)
    return RequestRecord(
        record_id=start.record_id,
        instance_id=start.instance_id,
        request_id=start.request_id,
        attempt=start.attempt,
        started_at=start.started_at,
        finished_at=finished_at,
        outcome=Outcome.ORPHANED,
        status_code="UNKNOWN",
        latency=LatencySummary(e2e_seconds=(finished_at - start.started_at).total_seconds()),
        counts=TokenCounts(num_prompt_tokens=start.num_prompt_tokens),
        model=_model_record(model),
        variant=variant,
        tenant=TenantRecord(tenant.pseudonym, tenant.key_id) if tenant else None,
        price=price_record(price),
        labels=start.labels,
        trace_id=start.trace_id,
        error=ORPHAN_ERROR,
    )


def _last_sign_of_life(
    engine: Engine, dead: Row[Any], orphans: Sequence[RequestRecord]
) -> datetime:
    table = table_of(models.Request)
    query = select(func.max(table.c.finished_at)).where(table.c.instance_id == dead.instance_id)
    with engine.connect() as connection:
        last_request = connection.execute(query).scalar()
    signs: list[datetime] = [dead.last_seen_at, *(record.started_at for record in orphans)]
    return max(signs if last_request is None else [*signs, last_request])


def _lost_interval(engine: Engine, dead: Row[Any], until: datetime) -> CapacityRecord | None:
    """The time between the last interval that was filed and the last sign of life.

    Its cost completes price x wall time for the instance. `cost_busy` brings the sum over the
    instance to what its requests were filed with: requests filed after the last interval add to
    it, and what intervals charged to requests that never finished is taken off and becomes
    lost, so this one row may have a negative `cost_busy`.
    """
    filed = _filed_so_far(engine, dead.instance_id)
    if filed.price is None:
        return None
    since = filed.finished_at or dead.started_at
    life = (until - dead.started_at) // timedelta(microseconds=1) * 1000
    wall = max(0, life - filed.wall_nanoseconds)  # an instant in the ledger is cut to microseconds
    per_hour = filed.price.nano_usd_per_hour
    due = (filed.price_nanoseconds + wall * per_hour) // NANOSECONDS_PER_HOUR
    busy = filed.requests_cost - filed.busy_cost
    if busy > due - filed.cost and per_hour:
        # Requests reach beyond the last sign of life by the microsecond that it was cut to.
        owed = (filed.cost + busy) * NANOSECONDS_PER_HOUR - filed.price_nanoseconds
        wall = -(-owed // per_hour)
        due = filed.cost + busy
    if wall == 0 and busy == 0:
        return None
    return CapacityRecord(
        instance_id=dead.instance_id,
        interval_index=filed.next_index,
        started_at=since,
        finished_at=since + timedelta(microseconds=wall // 1000),
        model=filed.model,
        price=filed.price,
        wall_nanoseconds=wall,
        busy_nanoseconds=0,
        idle_nanoseconds=0,
        lost_nanoseconds=wall,
        num_steps=0,
        num_prefill_positions=0,
        num_decode_positions=0,
        num_draft_positions=0,
        num_emitted_tokens=0,
        max_num_running=0,
        max_num_waiting=0,
        cost_busy_nano_usd=busy,
        cost_idle_nano_usd=0,
        cost_lost_nano_usd=due - filed.cost - busy,
    )


@dataclass(frozen=True, slots=True)
class _Filed:
    """What the ledger holds of an instance. price_nanoseconds: sum of wall time x price."""

    next_index: int
    finished_at: datetime | None
    wall_nanoseconds: int
    price_nanoseconds: int
    cost: int
    busy_cost: int
    requests_cost: int
    price: PriceRecord | None
    model: ModelRecord | None


def _filed_so_far(engine: Engine, instance_id: str) -> _Filed:
    interval, request = models.CapacityInterval, models.Request
    with Session(engine) as session:
        intervals = session.execute(
            select(interval, models.Price)
            .outerjoin(models.Price, models.Price.price_key == interval.price_key)
            .where(interval.instance_id == instance_id)
            .order_by(interval.interval_index)
        ).all()
        requests_cost, price_key, model_key = session.execute(
            select(
                func.coalesce(func.sum(request.cost_nano_usd), 0),
                func.max(request.price_key),
                func.max(request.model_key),
            ).where(request.instance_id == instance_id)
        ).one()
        if intervals:
            price_key, model_key = intervals[-1][0].price_key, intervals[-1][0].model_key
        return _Filed(
            next_index=intervals[-1][0].interval_index + 1 if intervals else 0,
            finished_at=intervals[-1][0].finished_at if intervals else None,
            wall_nanoseconds=sum(i.wall_nanoseconds for i, _ in intervals),
            price_nanoseconds=sum(_price_nanoseconds(i, price) for i, price in intervals),
            cost=sum(_cost_of(i) for i, _ in intervals),
            busy_cost=sum(i.cost_busy_nano_usd for i, _ in intervals),
            requests_cost=int(requests_cost),
            price=price_record(session.get(models.Price, price_key) if price_key else None),
            model=_model_record(session.get(models.Model, model_key) if model_key else None),
        )


def _price_nanoseconds(interval: models.CapacityInterval, price: models.Price | None) -> int:
    return interval.wall_nanoseconds * (price.nano_usd_per_hour if price else 0)


def _cost_of(interval: models.CapacityInterval) -> int:
    busy, idle = interval.cost_busy_nano_usd, interval.cost_idle_nano_usd
    return busy + idle + interval.cost_lost_nano_usd


def _model_record(model: models.Model | None) -> ModelRecord | None:
    if model is None:
        return None
    return ModelRecord(
        name=model.name,
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        device=model.device,
        num_parameters=model.num_parameters,
        layout=model.layout,
        numerics=model.numerics,
        guarantee=model.guarantee,
    )


def price_record(price: models.Price | None) -> PriceRecord | None:
    """The record behind a row of `prices`; None for None."""
    if price is None:
        return None
    return PriceRecord(
        book_version=price.book_version,
        machine_type=price.machine_type,
        purchase=price.purchase,
        currency=price.currency,
        nano_usd_per_hour=price.nano_usd_per_hour,
        embodied_nano_usd_per_hour=price.embodied_nano_usd_per_hour,
        valid_from=price.valid_from,
        valid_to=price.valid_to,
    )
