"""The rows of the dimensions: generated ones, and those of the ledger with an unknown member."""

from collections.abc import Iterable
from datetime import date, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from exports.columns import (
    UNKNOWN_KEY,
    Table,
)
from exports.schemas import (
    DIM_DATE,
    DIM_DRAFTER,
    DIM_MODEL,
    DIM_OUTCOME,
    DIM_PRICE,
    DIM_TENANT,
    DIM_TIME_BAND,
    DIM_VARIANT,
)
from telemetry.ledger.records import Outcome

UNKNOWN = "unknown"

TIME_BANDS = ("night", "morning", "afternoon", "evening")  # six hours each, from midnight

FINISH_REASONS = (
    "none",
    "stop_token",
    "stop_string",
    "length",
    "context_full",
    "time_limit",
    "cancelled",
    "deadline",
    "error",
)
"""Place in this list is a part of outcome_key: append, never reorder."""

OUTCOMES = (
    Outcome.COMPLETED,
    Outcome.CANCELLED,
    Outcome.DEADLINE_EXCEEDED,
    Outcome.REFUSED,
    Outcome.FAILED,
    Outcome.ORPHANED,
)
"""Place in this list is a part of outcome_key: append, never reorder."""

KEYS_PER_OUTCOME = 100

LEDGER_COLUMNS: dict[str, tuple[str, ...]] = {
    DIM_MODEL.name: (
        "model_key",
        "name",
        "fingerprint",
        "dtype",
        "device",
        "num_parameters",
        "layout",
        "numerics",
        "guarantee",
    ),
    DIM_DRAFTER.name: ("drafter_key", "name", "fingerprint"),
    DIM_VARIANT.name: ("variant_key", "name"),
    DIM_TENANT.name: ("tenant_key", "pseudonym", "key_id"),
    DIM_PRICE.name: tuple(column.name for column in DIM_PRICE.columns),
}
"""For each dimension of the ledger: the ledger's columns, in the order of the table's."""


def outcome_keys(outcome: pa.Array, finish_reason: pa.Array) -> pa.Array:
    """outcome_key of each row; the unknown member for a word that this version does not know."""
    first = pc.index_in(outcome, value_set=pa.array([str(name) for name in OUTCOMES]))
    second = pc.index_in(
        pc.fill_null(finish_reason, FINISH_REASONS[0]), value_set=pa.array(FINISH_REASONS)
    )
    key = pc.add(pc.multiply(pc.add(first.cast(pa.int64()), 1), KEYS_PER_OUTCOME), second)
    return pc.fill_null(key, UNKNOWN_KEY).cast(pa.int64())


def dim_outcome() -> pa.Table:
    """Every pair of outcome and finish reason, and the unknown member."""
    rows: list[tuple[Any, ...]] = [(UNKNOWN_KEY, UNKNOWN, UNKNOWN, False)]
    for place, outcome in enumerate(OUTCOMES, start=1):
        for index, reason in enumerate(FINISH_REASONS):
            key = place * KEYS_PER_OUTCOME + index
            rows.append((key, str(outcome), reason, outcome is Outcome.COMPLETED))
    return _table(DIM_OUTCOME, rows)


def dim_time_band() -> pa.Table:
    """The 24 hours and the unknown member."""
    rows: list[tuple[Any, ...]] = [(UNKNOWN_KEY, UNKNOWN, UNKNOWN, 0)]
    rows += [(hour, f"{hour:02}:00", TIME_BANDS[hour // 6], hour // 6 + 1) for hour in range(24)]
    return _table(DIM_TIME_BAND, rows)


def dim_date(first: date, last: date) -> pa.Table:
    """Whole years from the year of `first` to that of `last`.

    No unknown member: a marked date table has no blank date, and every fact has one.
    """
    day, rows = date(first.year, 1, 1), []
    while day.year <= last.year:
        iso = day.isocalendar()
        rows.append(
            (
                date_key(day),
                day,
                day.year,
                (day.month + 2) // 3,
                day.month,
                _MONTHS[day.month - 1],
                f"{day.year:04}-{day.month:02}",
                iso.year,
                iso.week,
                day.day,
                iso.weekday,
                _WEEKDAYS[iso.weekday - 1],
                iso.weekday >= 6,
            )
        )
        day += timedelta(days=1)
    return _table(DIM_DATE, rows)


def ledger_dimension(table: Table, rows: Iterable[dict[str, Any]]) -> pa.Table:
    """A dimension from the ledger's rows, unknown member first, ordered by key."""
    names = LEDGER_COLUMNS[table.name]
    members = [tuple(row[name] for name in names) for row in rows]
    return _table(table, [_unknown_member(table), *sorted(members, key=lambda row: row[0])])


def date_key(day: date) -> int:
    """yyyymmdd as an integer."""
    return day.year * 10_000 + day.month * 100 + day.day


def date_of(key: int) -> date:
    """The inverse of date_key."""
    return date(key // 10_000, key // 100 % 100, key % 100)


def _unknown_member(table: Table) -> tuple[Any, ...]:
    def value(index: int) -> Any:
        column = table.columns[index]
        if index == 0:
            return UNKNOWN_KEY
        if column.null_when:
            return None
        return UNKNOWN if column.type == pa.string() else 0

    return tuple(value(index) for index in range(len(table.columns)))


def _table(table: Table, rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True))
    return pa.table(
        [
            pa.array(values, column.type)
            for values, column in zip(columns, table.columns, strict=True)
        ],
        schema=table.schema,
    )


_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
