"""Landing the ledger in ClickHouse, for ledgers of billions of rows.

The ledger's tables become merge trees, partitioned by month and ordered by date, and views of
the ledger's own names show each row once, so that landing a range twice does no harm. The fact
tables are then `exports.table_sql.fact_statements(CLICKHOUSE)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Date, Double, String, TypeDecorator
from sqlalchemy.types import TypeEngine

from telemetry.ledger.models import (
    AuditResult,
    CapacityInterval,
    Request,
    RequestAcceptance,
    UtcInstant,
)


@dataclass(frozen=True, slots=True)
class LandedTable:
    """A table of the ledger. key: what counts up. day: the expression its partitions follow."""

    model: type[Any]
    key: str
    day: str

    @property
    def name(self) -> str:
        """The ledger's name of it."""
        return str(self.model.__tablename__)

    @property
    def columns(self) -> tuple[Column[Any], ...]:
        """Those that land; labels stay in the ledger."""
        return tuple(c for c in self.model.__table__.columns if not isinstance(c.type, JSON))


LANDED_TABLES = (
    LandedTable(Request, "ledger_id", "finished_on"),
    LandedTable(RequestAcceptance, "request_ledger_id", "finished_on"),
    LandedTable(CapacityInterval, "capacity_id", "toDate(started_at)"),
    LandedTable(AuditResult, "audit_id", "toDate(audited_at)"),
)


def create_statements() -> Iterator[str]:
    """What makes the tables and views, or adds what is new in them; harmless where they exist."""
    for table in LANDED_TABLES:
        columns = ",\n    ".join(f"{c.name} {_type(c)}" for c in table.columns)
        order = ", ".join(c.name for c in table.columns if c.primary_key)
        yield (
            f"CREATE TABLE IF NOT EXISTS landed_{table.name} (\n    {columns}\n)\n"
            f"ENGINE = ReplacingMergeTree PARTITION BY toYYYYMM({table.day}) "
            f"ORDER BY ({table.day}, {order})"
        )
        # The ledger's columns grow, and rows from before a column are NULL there.
        added = ", ".join(
            f"ADD COLUMN IF NOT EXISTS {c.name} {_type(c)}" for c in table.columns if c.nullable
        )
        if added:
            yield f"ALTER TABLE landed_{table.name} {added}"
        yield (
            f"CREATE OR REPLACE VIEW {table.name} AS SELECT * FROM landed_{table.name} FINAL"  # noqa: S608
        )


def landing_statement(table: LandedTable, source: str, after: int, until: int) -> str:
    """Lands the rows (after, until] of a table by its key.

    source: a table function with the ledger's columns, such as postgresql('host:port',
    'database', 'requests', 'user', 'password') or s3('.../*.parquet'). ClickHouse takes
    PostgreSQL's instants for UTC whatever zone they are shown in: the user's time zone must be
    UTC (ALTER ROLE ... SET timezone = 'UTC'); `misread_statement` finds out.
    """
    columns = ", ".join(column.name for column in table.columns)
    return (
        f"INSERT INTO landed_{table.name} ({columns}) SELECT {columns} FROM {source} "  # noqa: S608
        f"WHERE {table.key} > {after} AND {table.key} <= {until}"
    )


def misread_statement() -> str:
    """Counts the requests whose instants are not those of the ledger; 0 when all is well."""
    return "SELECT count() FROM requests WHERE toDate32(finished_at, 'UTC') != finished_on"


def _type(column: Column[Any]) -> str:
    kind: TypeEngine[Any] = column.type
    if isinstance(kind, UtcInstant):
        name = "DateTime64(6, 'UTC')"
    elif isinstance(kind, TypeDecorator):
        raise TypeError(f"{column.name}: {kind!r} has no counterpart in ClickHouse")
    else:
        names = {BigInteger: "Int64", Double: "Float64", String: "String", Date: "Date32"}
        name = next(name for base, name in names.items() if isinstance(kind, base))
    return f"Nullable({name})" if column.nullable else name
