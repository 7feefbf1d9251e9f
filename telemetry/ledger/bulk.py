"""Bulk insertion in each database's fastest way, inside the caller's transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, OperationalError


def next_ledger_ids(connection: Connection, count: int) -> list[int]:
    """`count` numbers for new rows of `requests`, growing.

    SQLite: the transaction holds the only write lock, so the numbers after the last one are
    free. PostgreSQL: from the sequence; numbers of a rolled-back batch stay unused.
    """
    if connection.dialect.name == "sqlite":
        query = "SELECT seq FROM sqlite_sequence WHERE name = 'requests'"
        last = connection.exec_driver_sql(query).scalar() or 0
        return list(range(last + 1, last + 1 + count))
    query = (
        "SELECT nextval(pg_get_serial_sequence('requests', 'ledger_id')) "
        "FROM generate_series(1, %s)"
    )
    return sorted(connection.exec_driver_sql(query, (count,)).scalars())


def insert_rows(
    connection: Connection,
    table: str,
    columns: Sequence[str],
    values: Sequence[tuple[Any, ...]],
    *,
    ignore_existing: bool = False,
) -> None:
    """Insert rows given as tuples in the order of `columns`.

    Raises IntegrityError where a row exists, unless `ignore_existing`, which is for small
    batches. Names come from this package, never from outside.
    """
    if not values:
        return
    names = ", ".join(columns)
    if connection.dialect.name == "postgresql" and not ignore_existing:
        _copy(connection, f"COPY {table} ({names}) FROM STDIN", values)
        return
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    marks = ", ".join([mark] * len(columns))
    tail = " ON CONFLICT DO NOTHING" if ignore_existing else ""
    sql = f"INSERT INTO {table} ({names}) VALUES ({marks}){tail}"  # noqa: S608 - fixed names
    connection.exec_driver_sql(sql, list(values))


def _copy(connection: Connection, sql: str, values: Sequence[tuple[Any, ...]]) -> None:
    import psycopg

    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor, cursor.copy(sql) as copy:
            for row in values:
                copy.write_row(row)
    except psycopg.IntegrityError as error:
        raise IntegrityError(sql, None, error) from error
    except psycopg.Error as error:
        raise OperationalError(sql, None, error) from error
