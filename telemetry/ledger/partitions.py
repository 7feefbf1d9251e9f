"""PostgreSQL's daily partitions: made ahead of the rows, dropped whole by retention."""

import logging
from collections.abc import Iterable
from datetime import date, timedelta

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError

PARTITIONED_TABLES = ("requests", "request_acceptance")
_LOCK = 0x74616E64656E  # next to the migrations' lock
_log = logging.getLogger(__name__)


def ensure_partitions(engine: Engine, days: Iterable[date]) -> None:
    """Create the partitions of the given UTC days where they are missing.

    A day whose rows already sit in the default partition cannot get its own any more; they stay
    there, and retention deletes them row by row.
    """
    for day in sorted(days):
        for table in PARTITIONED_TABLES:
            try:
                with engine.begin() as connection:
                    _create(connection, table, day)
            except IntegrityError as error:
                _log.warning("ledger partition %s", partition_name(table, day), exc_info=error)


def partition_name(table: str, day: date) -> str:
    """The name of a day's partition."""
    return f"{table}_p{day:%Y%m%d}"


def partition_days(connection: Connection, table: str) -> list[date]:
    """The days that have a partition of their own, oldest first."""
    query = (
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = CAST(%s AS regclass)"
    )
    prefix = f"{table}_p"
    names = connection.exec_driver_sql(query, (table,)).scalars()
    digits = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(date(int(d[:4]), int(d[4:6]), int(d[6:8])) for d in digits)


def drop_partition(connection: Connection, day: date) -> None:
    """Remove a day with all its rows."""
    for table in PARTITIONED_TABLES:
        connection.exec_driver_sql(f"DROP TABLE IF EXISTS {partition_name(table, day)}")


def _create(connection: Connection, table: str, day: date) -> None:
    name = partition_name(table, day)
    found = connection.exec_driver_sql("SELECT to_regclass(%s)", (name,)).scalar()
    if found is not None:
        return
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    connection.exec_driver_sql(
        f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF {table} "
        f"FOR VALUES FROM ('{day.isoformat()}') TO ('{(day + timedelta(days=1)).isoformat()}')"
    )
