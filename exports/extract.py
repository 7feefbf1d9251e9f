"""Reading the ledger: small questions through SQLAlchemy, rows through Arrow.

Rows come over ADBC, which fills Arrow buffers in C and streams, so that memory does not grow
with the ledger. Nothing is held open between questions: the ledger is append-only and every
question is bounded by the watermark, so its answers agree without a long transaction. The
role needs no more than SELECT.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Engine,
    Executable,
    func,
    select,
    type_coerce,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import InstrumentedAttribute

from exports.arrow_reader import (
    ACCEPTANCE_COLUMNS,
    AUDIT_COLUMNS,
    CAPACITY_COLUMNS,
    REQUEST_COLUMNS,
    ArrowReader,
)
from exports.errors import SourceError
from telemetry.ledger.models import (
    AuditResult,
    CapacityInterval,
    Drafter,
    Model,
    Price,
    Request,
    RequestAcceptance,
    Tenant,
    Variant,
)
from telemetry.ledger.session import LedgerSchemaError, open_ledger, require_current_schema

POSTGRESQL_LAG = timedelta(minutes=2)

_MICROSECONDS_PER_DAY = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Watermark:
    """The last row of each append-only table that an export covers; 0 is before the first."""

    ledger_id: int = 0
    capacity_id: int = 0
    audit_id: int = 0


@dataclass(frozen=True, slots=True)
class DayTotals:
    """One UTC date of the ledger, summed by the database over its current rows."""

    num_requests: int = 0
    num_superseded: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_accepted_tokens: int = 0
    cost_nano_usd: int = 0


class LedgerSource:
    """An open ledger. Raises SourceError when it is missing, unreachable or of another schema."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        if self._is_sqlite and not Path(str(self._url.database)).is_file():
            raise SourceError(f"there is no ledger at {self._url.database}")
        try:
            self._engine: Engine = open_ledger(url, read_only=True)
            require_current_schema(self._engine)
            self._rows_reader = ArrowReader(self._url, self._engine.dialect)
            # A connection streams one answer at a time, and acceptance is read while requests are.
            self._acceptance_reader = ArrowReader(self._url, self._engine.dialect)
        except (SQLAlchemyError, LedgerSchemaError, ValueError, OSError) as error:
            raise SourceError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._rows_reader.close()
        self._acceptance_reader.close()
        self._engine.dispose()

    def start_reading(self) -> None:
        """Have the reading process start while other questions are answered."""
        self._rows_reader.start()

    @property
    def dialect(self) -> str:
        """sqlite or postgresql."""
        return self._engine.dialect.name

    def default_lag(self) -> timedelta:
        """How old a row must be before it is exported, unless told otherwise.

        PostgreSQL hands out numbers before transactions commit, so a younger row may still
        get an older neighbour. SQLite has one writer at a time: its rows appear in order.
        """
        return timedelta(0) if self._is_sqlite else POSTGRESQL_LAG

    def watermark(self, recorded_until: datetime) -> Watermark:
        """The last rows recorded at or before an instant."""
        return Watermark(
            *(
                self._scalar(select(func.max(key)).where(recorded_at <= recorded_until)) or 0
                for key, recorded_at in (
                    (Request.ledger_id, Request.recorded_at),
                    (CapacityInterval.capacity_id, CapacityInterval.recorded_at),
                    (AuditResult.audit_id, AuditResult.recorded_at),
                )
            )
        )

    def request_dates(self, after: int, until: int) -> set[date]:
        """UTC dates of the requests in (after, until], and of the rows that they correct."""
        fresh = (Request.ledger_id > after) & (Request.ledger_id <= until)
        corrected = select(Request.supersedes_ledger_id).where(
            fresh, Request.supersedes_ledger_id.is_not(None)
        )
        dates = self._column(select(Request.finished_on).where(fresh).distinct())
        dates |= self._column(
            select(Request.finished_on).where(Request.ledger_id.in_(corrected)).distinct()
        )
        return dates

    def capacity_dates(self, after: int, until: int) -> set[date]:
        """UTC dates on which capacity intervals in (after, until] begin."""
        return self._instant_dates(
            CapacityInterval.capacity_id, CapacityInterval.started_at, after, until
        )

    def audit_dates(self, after: int, until: int) -> set[date]:
        """UTC dates of the audits in (after, until]."""
        return self._instant_dates(AuditResult.audit_id, AuditResult.audited_at, after, until)

    def day_counts(self, since: date, until: int) -> dict[date, int]:
        """Current requests per UTC date from `since` on, counted by the database."""
        counted = self._rows(
            select(Request.finished_on, func.count())
            .where(Request.finished_on >= since, self._is_current(until))
            .group_by(Request.finished_on)
        )
        return {day: int(count) for day, count in counted}

    def day_totals(self, day: date, until: int) -> DayTotals:
        """Sums of one UTC date, to compare an export with."""
        of_day = (Request.finished_on == day) & (Request.ledger_id <= until)
        sums = (
            Request.num_output_tokens,
            Request.num_prompt_tokens,
            Request.num_accepted_tokens,
            Request.cost_nano_usd,
        )
        [row] = self._rows(
            select(func.count(), *(func.coalesce(func.sum(column), 0) for column in sums)).where(
                of_day, self._is_current(until)
            )
        )
        num_rows = self._scalar(select(func.count()).where(of_day)) or 0
        num_requests, *totals = (int(value) for value in row)
        return DayTotals(num_requests, num_rows - num_requests, *totals)

    def superseded_ids(self, until: int) -> list[int]:
        """Ledger rows that a correction replaces. Corrections are rare: the list is short."""
        statement = select(Request.supersedes_ledger_id).where(
            Request.supersedes_ledger_id.is_not(None), Request.ledger_id <= until
        )
        return sorted(self._column(statement))

    def request_batches(self, day: date, until: int) -> Iterator[pa.RecordBatch]:
        """Requests of one UTC date in the order of the ledger, superseded rows included."""
        columns = [getattr(Request, name) for name in REQUEST_COLUMNS]
        statement = select(*columns).where(Request.finished_on == day, Request.ledger_id <= until)
        yield from self._rows_reader.batches(statement.order_by(Request.ledger_id), columns)

    def acceptance_batches(self, day: date, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Acceptance by position of the requests first..last of one UTC date, in order."""
        columns = [getattr(RequestAcceptance, name) for name in ACCEPTANCE_COLUMNS]
        statement = select(*columns).where(
            RequestAcceptance.request_ledger_id.between(first, last),
            RequestAcceptance.finished_on == day,
        )
        statement = statement.order_by(
            RequestAcceptance.request_ledger_id, RequestAcceptance.position
        )
        yield from self._acceptance_reader.batches(statement, columns)

    def capacity_batches(self, day: date, until: int) -> Iterator[pa.RecordBatch]:
        """Capacity intervals that begin on one UTC date, in the order of the ledger."""
        columns = [getattr(CapacityInterval, name) for name in CAPACITY_COLUMNS]
        statement = select(*columns).where(
            self._within(CapacityInterval.started_at, day), CapacityInterval.capacity_id <= until
        )
        yield from self._rows_reader.batches(
            statement.order_by(CapacityInterval.capacity_id), columns
        )

    def audit_batches(self, day: date, until: int) -> Iterator[pa.RecordBatch]:
        """Audits of one UTC date, in the order of the ledger."""
        columns = [getattr(AuditResult, name) for name in AUDIT_COLUMNS]
        statement = select(*columns).where(
            self._within(AuditResult.audited_at, day), AuditResult.audit_id <= until
        )
        yield from self._rows_reader.batches(statement.order_by(AuditResult.audit_id), columns)

    def dimension_rows(
        self, model: type[Model | Drafter | Variant | Tenant | Price], names: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        """All rows of a dimension in the order of their key."""
        columns = [getattr(model, name) for name in names]
        rows = self._rows(select(*columns).order_by(columns[0]))
        return [dict(zip(names, row, strict=True)) for row in rows]

    @staticmethod
    def _is_current(until: int) -> ColumnElement[bool]:
        superseded = select(Request.supersedes_ledger_id).where(
            Request.supersedes_ledger_id.is_not(None), Request.ledger_id <= until
        )
        return (Request.ledger_id <= until) & Request.ledger_id.not_in(superseded)

    @staticmethod
    def _within(instant: InstrumentedAttribute[datetime], day: date) -> ColumnElement[bool]:
        begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
        return (instant >= begin) & (instant < begin + timedelta(days=1))

    def _instant_dates(
        self,
        key: InstrumentedAttribute[int],
        instant: InstrumentedAttribute[datetime],
        after: int,
        until: int,
    ) -> set[date]:
        fresh = (key > after) & (key <= until)
        if self._is_sqlite:
            days = type_coerce(instant, BigInteger) // _MICROSECONDS_PER_DAY
            numbers = self._column(select(days).where(fresh).distinct())
            return {(_EPOCH + timedelta(days=number)).date() for number in numbers}
        days = func.date(func.timezone("UTC", instant))
        return self._column(select(days).where(fresh).distinct())

    def _scalar(self, statement: Executable) -> Any:
        [[value]] = self._rows(statement)
        return value

    def _column(self, statement: Executable) -> set[Any]:
        return {value for (value,) in self._rows(statement)}

    def _rows(self, statement: Executable) -> list[Any]:
        try:
            with self._engine.connect() as connection:
                return list(connection.execute(statement))
        except SQLAlchemyError as error:
            raise SourceError(f"the ledger cannot be read: {error}") from error
