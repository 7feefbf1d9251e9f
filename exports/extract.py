"""Reading the ledger: small questions through SQLAlchemy, and the statements that read rows.

The rows themselves are read by other processes (exports.day_worker). Nothing is held open
between questions: the ledger is append-only and every question is bounded by the watermark, so
its answers agree without a long transaction. The role needs no more than SELECT.
"""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Engine,
    Executable,
    Select,
    func,
    select,
    type_coerce,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import InstrumentedAttribute

from exports.errors import SourceError
from exports.ledger_facts import DayTotals, Watermark
from exports.row_stream import Database, Statement
from exports.statements import (
    ACCEPTANCE_COLUMNS,
    AUDIT_COLUMNS,
    CAPACITY_COLUMNS,
    REQUEST_COLUMNS,
    compiled,
)
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
        self._engine.dispose()

    @property
    def database(self) -> Database:
        """How another process opens the ledger. It may hold a password."""
        if self._is_sqlite:
            return Database("sqlite", str(self._url.database))
        from psycopg.conninfo import make_conninfo

        arguments = self._url.translate_connect_args(username="user", database="dbname")
        options = make_conninfo(**{**arguments, **self._url.query})
        return Database(self._engine.dialect.name, options)

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
        # For all rows the index of dates is read, for the newest ones the rows themselves.
        fresh = self._is_up_to(until)
        if after:
            fresh = (Request.ledger_id > after) & (Request.ledger_id <= until)
        corrected = self._superseded_ids(until).where(Request.ledger_id > after)
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
        return sorted(self._column(self._superseded_ids(until)))

    def request_rows(self, day: date, until: int) -> Statement:
        """Requests of one UTC date in the order of the ledger, superseded rows included."""
        columns = [getattr(Request, name) for name in REQUEST_COLUMNS]
        of_day = (Request.finished_on == day) & (Request.ledger_id <= until)
        statement = select(*columns).where(of_day).order_by(Request.ledger_id)
        return compiled(statement, columns, self._engine.dialect)

    def acceptance_rows(self, day: date, until: int) -> Statement:
        """Acceptance by position of the requests of one UTC date, in their order."""
        of_day = (Request.finished_on == day) & (Request.ledger_id <= until)
        first, last = (
            self._scalar(select(function(Request.ledger_id)).where(of_day)) or 0
            for function in (func.min, func.max)
        )
        owner = RequestAcceptance.request_ledger_id
        columns = [getattr(RequestAcceptance, name) for name in ACCEPTANCE_COLUMNS]
        statement = select(*columns).where(
            owner.between(first, last), RequestAcceptance.finished_on == day
        )
        statement = statement.order_by(owner, RequestAcceptance.position)
        return compiled(statement, columns, self._engine.dialect)

    def capacity_rows(self, day: date, until: int) -> Statement:
        """Capacity intervals that begin on one UTC date, in the order of the ledger."""
        columns = [getattr(CapacityInterval, name) for name in CAPACITY_COLUMNS]
        statement = select(*columns).where(
            self._within(CapacityInterval.started_at, day), CapacityInterval.capacity_id <= until
        )
        statement = statement.order_by(CapacityInterval.capacity_id)
        return compiled(statement, columns, self._engine.dialect)

    def audit_rows(self, day: date, until: int) -> Statement:
        """Audits of one UTC date, in the order of the ledger."""
        columns = [getattr(AuditResult, name) for name in AUDIT_COLUMNS]
        statement = select(*columns).where(
            self._within(AuditResult.audited_at, day), AuditResult.audit_id <= until
        )
        return compiled(statement.order_by(AuditResult.audit_id), columns, self._engine.dialect)

    def dimension_rows(
        self, model: type[Model | Drafter | Variant | Tenant | Price], names: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        """All rows of a dimension in the order of their key."""
        columns = [getattr(model, name) for name in names]
        rows = self._rows(select(*columns).order_by(columns[0]))
        return [dict(zip(names, row, strict=True)) for row in rows]

    @classmethod
    def _superseded_ids(cls, until: int) -> Select[int | None]:
        # `> 0` and not `IS NOT NULL`: for that SQLite reads every row instead of the index.
        is_correction = Request.supersedes_ledger_id > 0
        return select(Request.supersedes_ledger_id).where(is_correction, cls._is_up_to(until))

    @classmethod
    def _is_current(cls, until: int) -> ColumnElement[bool]:
        superseded = cls._superseded_ids(until)
        return (Request.ledger_id <= until) & Request.ledger_id.not_in(superseded)

    @staticmethod
    def _is_up_to(until: int) -> ColumnElement[bool]:
        # The sum keeps SQLite from walking the table by its key to find what an index has.
        return Request.ledger_id + 0 <= until

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
