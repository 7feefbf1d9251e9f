"""Writes batches of records into the database, each batch in one transaction.

Two ways, with the same result:
- fast: plain bulk insertion (executemany on SQLite, COPY on PostgreSQL) for records that have
  never been sent before; a unique violation rolls the batch back and it is written the other way,
- careful: looks up what is there already, so that a batch may be sent again after a failure
  whose outcome is unknown, or from the journal. Nothing is ever written twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, delete, func, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from telemetry.ledger import models, rows
from telemetry.ledger.bulk import insert_rows, next_ledger_ids
from telemetry.ledger.dimensions import Dimensions, insert_ignoring, table_of
from telemetry.ledger.partitions import ensure_partitions
from telemetry.ledger.records import (
    AuditRecord,
    CapacityRecord,
    InstanceRecord,
    Outcome,
    Record,
    RequestRecord,
    ShadowRecord,
    StartRecord,
)

_LOOKUP_CHUNK = 500
_CAREFUL_TRIES = 20
_R = TypeVar("_R")


class LedgerStore:
    """The only place that inserts into the ledger. One thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._dimensions = Dimensions()
        self._partitioned_days: set[date] = set()

    def require_answer(self) -> None:
        """Raises sqlalchemy.exc.SQLAlchemyError while the database is away."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")

    def write(self, records: Sequence[Record], *, may_exist: bool) -> None:
        """Write all records or none. `may_exist`: some may have been written before.

        Raises sqlalchemy.exc.SQLAlchemyError; after that the batch may or may not be there, and
        can be sent again with may_exist=True.
        """
        self._prepare_days(records)
        if not may_exist:
            try:
                self._write_batch(records, careful=False)
                return
            except IntegrityError:
                pass  # a request id that was used before, or a batch that had arrived after all
        for _ in range(_CAREFUL_TRIES - 1):
            try:
                self._write_batch(records, careful=True)
                return
            except IntegrityError:
                pass  # another server took the number of an attempt between look-up and insert
        self._write_batch(records, careful=True)

    def _write_batch(self, records: Sequence[Record], *, careful: bool) -> None:
        try:
            with self._engine.begin() as connection:
                self._write_all(connection, records, careful=careful)
        except BaseException:
            self._dimensions.discard()
            raise
        self._dimensions.keep()

    def _write_all(
        self, connection: Connection, records: Sequence[Record], *, careful: bool
    ) -> None:
        now = datetime.now(UTC)
        requests = _of(records, RequestRecord)
        finished = {record.record_id for record in requests}
        started = _of(records, StartRecord)
        starts = [start for start in started if start.record_id not in finished]
        if careful:
            requests = self._not_written_yet(connection, requests)
            starts = _without_finished(connection, starts)
        else:  # those whose start is in this very batch have none in the table
            finished -= {start.record_id for start in started}
        for instance in _of(records, InstanceRecord):
            _upsert_instance(connection, instance)
        self._insert_starts(connection, starts, now)
        self._insert_requests(connection, requests, now)
        _delete_starts(connection, finished)
        self._insert_capacity(connection, _of(records, CapacityRecord), now)
        audits = [(r, rows.audit_values(r)) for r in _of(records, AuditRecord)]
        self._insert_findings(connection, models.AuditResult, audits, now)
        shadow = [(r, rows.shadow_values(r)) for r in _of(records, ShadowRecord)]
        self._insert_findings(connection, models.ShadowResult, shadow, now)

    def _insert_starts(
        self, connection: Connection, starts: Sequence[StartRecord], now: datetime
    ) -> None:
        instant = _instant_of(connection)
        values = []
        for record in starts:
            dims = (record.model, record.variant, record.tenant, record.price)
            keys = [self._dimensions.key_of(connection, value, now) for value in dims]
            values.append(rows.start_row(record, keys, instant))
        insert_rows(connection, "request_starts", rows.START_COLUMNS, values, ignore_existing=True)

    def _insert_requests(
        self, connection: Connection, requests: Sequence[RequestRecord], now: datetime
    ) -> None:
        if not requests:
            return
        instant = _instant_of(connection)
        recorded_at = instant(now)
        values: list[tuple[Any, ...]] = []
        acceptance: list[tuple[Any, ...]] = []
        ids = next_ledger_ids(connection, len(requests))
        for ledger_id, record in zip(ids, requests, strict=True):
            dims = (record.model, record.drafter, record.variant, record.tenant, record.price)
            keys = [self._dimensions.key_of(connection, value, now) for value in dims]
            values.append(rows.request_row(record, ledger_id, recorded_at, keys, instant))
            acceptance.extend(rows.acceptance_rows(record, ledger_id))
        insert_rows(connection, "requests", rows.REQUEST_COLUMNS, values)
        insert_rows(connection, "request_acceptance", rows.ACCEPTANCE_COLUMNS, acceptance)

    def _insert_capacity(
        self, connection: Connection, intervals: Sequence[CapacityRecord], now: datetime
    ) -> None:
        table = table_of(models.CapacityInterval)
        for record in intervals:
            values = rows.capacity_values(record)
            values["recorded_at"] = now
            values["model_key"] = self._dimensions.key_of(connection, record.model, now)
            values["price_key"] = self._dimensions.key_of(connection, record.price, now)
            connection.execute(insert_ignoring(connection, table).values(values))

    def _insert_findings(
        self,
        connection: Connection,
        entity: type[models.Base],
        findings: Iterable[tuple[AuditRecord | ShadowRecord, dict[str, Any]]],
        now: datetime,
    ) -> None:
        for record, values in findings:
            values["recorded_at"] = now
            values["model_key"] = self._dimensions.key_of(connection, record.model, now)
            values["drafter_key"] = self._dimensions.key_of(connection, record.drafter, now)
            values["variant_key"] = self._dimensions.key_of(connection, record.variant, now)
            connection.execute(insert_ignoring(connection, table_of(entity)).values(values))

    def _not_written_yet(
        self, connection: Connection, requests: Sequence[RequestRecord]
    ) -> list[RequestRecord]:
        """Leave out what is there; number attempts after those of an earlier start.

        A row that was closed as an orphan by another server, while this one kept its records in
        the journal, is superseded by the real one.
        """
        newest = _newest_rows(connection, {record.record_id for record in requests})
        attempts = _highest_attempts(connection, {record.request_id for record in requests})
        fresh: list[RequestRecord] = []
        seen: set[tuple[str, int]] = set()
        for record in requests:
            if (record.record_id, record.revision) in seen:
                continue
            seen.add((record.record_id, record.revision))
            there = newest.get(record.record_id)
            if there is not None and record.revision <= there.revision:
                if there.outcome != Outcome.ORPHANED or record.outcome == Outcome.ORPHANED:
                    continue
                record = replace(
                    record,
                    attempt=there.attempt,
                    revision=there.revision + 1,
                    supersedes_ledger_id=there.ledger_id,
                )
            elif there is None and record.revision == 0:
                highest = attempts.get(record.request_id, 0)
                record = replace(record, attempt=max(record.attempt, highest + 1))
                attempts[record.request_id] = record.attempt
            fresh.append(record)
        return fresh

    def _prepare_days(self, records: Iterable[Record]) -> None:
        if self._engine.dialect.name != "postgresql":
            return
        today = datetime.now(UTC).date()
        days = {rows.finished_on(r) for r in records if isinstance(r, RequestRecord)}
        days |= {today, today + timedelta(days=1)}
        if missing := days - self._partitioned_days:
            ensure_partitions(self._engine, missing)
            self._partitioned_days |= missing


def _of(records: Iterable[Record], kind: type[_R]) -> list[_R]:
    return [record for record in records if isinstance(record, kind)]


def _instant_of(connection: Connection) -> rows.InstantValue:
    is_sqlite = connection.dialect.name == "sqlite"
    return rows.sqlite_instant if is_sqlite else rows.postgresql_instant


def _upsert_instance(connection: Connection, record: InstanceRecord) -> None:
    table = table_of(models.Instance)
    values = {
        "instance_id": record.instance_id,
        "node": record.node,
        "hostname": record.hostname,
        "version": record.version,
        "started_at": record.started_at,
        "last_seen_at": record.last_seen_at,
        "stopped_at": record.stopped_at,
    }
    connection.execute(insert_ignoring(connection, table).values(values))
    changes = {"last_seen_at": record.last_seen_at}
    if record.stopped_at is not None:
        changes["stopped_at"] = record.stopped_at
    connection.execute(
        update(table)
        .where(table.c.instance_id == record.instance_id)
        .where(table.c.last_seen_at <= record.last_seen_at)
        .values(changes)
    )


def _without_finished(connection: Connection, starts: Sequence[StartRecord]) -> list[StartRecord]:
    written = _newest_rows(connection, {record.record_id for record in starts})
    return [record for record in starts if record.record_id not in written]


def _newest_rows(connection: Connection, record_ids: Iterable[str]) -> dict[str, Any]:
    """The row of the highest revision of each record that is in the ledger."""
    table = table_of(models.Request)
    columns = (
        table.c.record_id,
        table.c.revision,
        table.c.ledger_id,
        table.c.attempt,
        table.c.outcome,
    )
    newest: dict[str, Any] = {}
    for chunk in _chunks(record_ids):
        query = select(*columns).where(table.c.record_id.in_(chunk)).order_by(table.c.revision)
        for row in connection.execute(query):
            newest[row.record_id] = row
    return newest


def _highest_attempts(connection: Connection, request_ids: Iterable[str]) -> dict[str, int]:
    table = table_of(models.Request)
    highest: dict[str, int] = {}
    for chunk in _chunks(request_ids):
        query = (
            select(table.c.request_id, func.max(table.c.attempt))
            .where(table.c.request_id.in_(chunk))
            .group_by(table.c.request_id)
        )
        highest.update({row[0]: int(row[1]) for row in connection.execute(query)})
    return highest


def _delete_starts(connection: Connection, record_ids: Iterable[str]) -> None:
    table = table_of(models.RequestStart)
    for chunk in _chunks(record_ids):
        connection.execute(delete(table).where(table.c.record_id.in_(chunk)))


def _chunks(values: Iterable[str]) -> Iterable[list[str]]:
    ordered = sorted(values)
    for start in range(0, len(ordered), _LOOKUP_CHUNK):
        yield ordered[start : start + _LOOKUP_CHUNK]


def is_connection_failure(error: DBAPIError) -> bool:
    """Whether the database is away or overloaded, rather than the data being refused."""
    return not isinstance(error.orig, _data_errors())


def _data_errors() -> tuple[type[BaseException], ...]:
    import sqlite3

    kinds: list[type[BaseException]] = [
        sqlite3.IntegrityError,
        sqlite3.DataError,
        sqlite3.InterfaceError,
    ]
    try:
        import psycopg
    except ImportError:
        return tuple(kinds)
    return (*kinds, psycopg.IntegrityError, psycopg.DataError)
