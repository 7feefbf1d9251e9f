"""Deleting old requests: whole partitions on PostgreSQL, never beyond what has been exported.

Requests and their acceptance are deleted; capacity intervals, audits and dimensions stay: they
are small, and history needs them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date

from sqlalchemy import Connection, Engine, MetaData, delete, func, select

from telemetry.ledger import models
from telemetry.ledger.dimensions import table_of
from telemetry.ledger.partitions import PARTITIONED_TABLES, drop_partition, partition_days

_CHUNK_ROWS = 10_000


class RetentionError(RuntimeError):
    """Nothing may be deleted; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, and the days that were kept because they are not exported yet."""

    num_requests: int
    num_partitions: int
    kept_days: tuple[date, ...]


def exported_through(engine: Engine) -> int | None:
    """The ledger_id up to which every known export has read; None when there is no export."""
    with engine.connect() as connection:
        lowest = connection.execute(select(func.min(models.ExportWatermark.ledger_id))).scalar()
    return None if lowest is None else int(lowest)


def prune(engine: Engine, *, before: date, through: int | None = None) -> Pruned:
    """Delete the requests that finished before a UTC day and whose ledger_id is exported.

    through: delete up to this ledger_id instead of the exports' watermark, for a ledger that
    nothing exports. Raises RetentionError when neither is known.
    """
    limit = exported_through(engine) if through is None else through
    if limit is None:
        raise RetentionError(
            "nothing has been exported from this ledger: run `tandem export` first, or say up "
            "to which ledger id rows may go"
        )
    if engine.dialect.name == "postgresql":
        return _prune_partitions(engine, before, limit)
    with engine.connect() as connection:
        kept = _unexported_days(connection, before, limit)
    return Pruned(_delete_rows(engine, "requests", before, limit), 0, kept)


def _prune_partitions(engine: Engine, before: date, limit: int) -> Pruned:
    with engine.connect() as connection:
        kept = _unexported_days(connection, before, limit)
        days = [d for d in partition_days(connection, "requests") if d < before]
    num_requests = num_partitions = 0
    request = table_of(models.Request)
    for day in days:
        if day in kept:
            continue
        with engine.begin() as connection:
            # Writers wait for the lock, so no late row can slip into what is dropped.
            for table in PARTITIONED_TABLES:
                connection.exec_driver_sql(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
            in_day = request.c.finished_on == day
            late = select(func.count()).where(in_day, request.c.ledger_id > limit)
            if connection.execute(late).scalar():
                continue
            count = select(func.count()).where(in_day)
            num_requests += connection.execute(count).scalar() or 0
            drop_partition(connection, day)
            num_partitions += 1
    num_requests += _delete_rows(engine, "requests_default", before, limit)
    return Pruned(num_requests, num_partitions, kept)


def _unexported_days(connection: Connection, before: date, limit: int) -> tuple[date, ...]:
    request = table_of(models.Request)
    query = (
        select(request.c.finished_on)
        .where(request.c.finished_on < before, request.c.ledger_id > limit)
        .distinct()
    )
    return tuple(sorted(connection.execute(query).scalars()))


def _delete_rows(engine: Engine, table: str, before: date, limit: int) -> int:
    """Row by row, in short transactions, so that a writer never waits for long."""
    request = table_of(models.Request)
    source = request if table == "requests" else request.to_metadata(MetaData(), name=table)
    query = (
        select(source.c.ledger_id)
        .where(source.c.finished_on < before, source.c.ledger_id <= limit)
        .order_by(source.c.ledger_id)
        .limit(_CHUNK_ROWS)
    )
    num_deleted = 0
    while True:
        with engine.begin() as connection:
            ids = list(connection.execute(query).scalars())
            _delete(connection, ids)
        num_deleted += len(ids)
        if len(ids) < _CHUNK_ROWS:
            return num_deleted


def _delete(connection: Connection, ids: Iterable[int]) -> None:
    request, acceptance = table_of(models.Request), table_of(models.RequestAcceptance)
    ordered = list(ids)
    for start in range(0, len(ordered), 500):
        chunk = ordered[start : start + 500]
        connection.execute(delete(acceptance).where(acceptance.c.request_ledger_id.in_(chunk)))
        connection.execute(delete(request).where(request.c.ledger_id.in_(chunk)))
