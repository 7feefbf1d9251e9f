"""Rows of the ledger as Arrow batches, streamed by ADBC: C fills the buffers, memory is bounded.

Only for a process that opens the ledger in no other way (exports.day_worker): the driver links
a second copy of SQLite, and two copies in one process undo each other's file locks on the same
database; apart they respect them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from exports.errors import SourceError

BATCH_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Statement:
    """A SELECT whose columns have these names. Its first `num_leading_rows` are not data."""

    sql: str
    names: tuple[str, ...]
    num_leading_rows: int = 0


@dataclass(frozen=True, slots=True)
class Database:
    """dialect: sqlite or postgresql. address: a path, or libpq's options, password included."""

    dialect: str
    address: str


class RowStream:
    """A connection that streams one answer at a time. Raises SourceError when the ledger fails."""

    def __init__(self, database: Database) -> None:
        is_sqlite = database.dialect == "sqlite"
        self._options = {"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)} if is_sqlite else {}
        self._connection = _connect(database)

    def batches(self, statement: Statement) -> Iterator[pa.RecordBatch]:
        """The statement's rows, in batches that are never empty. Take all before the next call."""
        to_skip = statement.num_leading_rows
        try:
            with self._connection.cursor(adbc_stmt_kwargs=self._options) as cursor:
                cursor.execute(statement.sql)
                for batch in cursor.fetch_record_batch():
                    rows, to_skip = batch.slice(to_skip), max(to_skip - batch.num_rows, 0)
                    if rows.num_rows:
                        yield pa.RecordBatch.from_arrays(rows.columns, list(statement.names))
        except (self._connection.Error, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise SourceError(f"the ledger cannot be read: {reason}") from error


def _connect(database: Database) -> Any:
    from adbc_driver_manager import dbapi

    try:
        if database.dialect == "sqlite":
            from adbc_driver_sqlite import dbapi as sqlite

            connection = sqlite.connect(database.address)
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA query_only=ON")
                cursor.execute("PRAGMA busy_timeout=30000")
            return connection
        from adbc_driver_postgresql import dbapi as postgresql

        return postgresql.connect(database.address, autocommit=True)
    except dbapi.Error as error:
        reason = " ".join(str(error).split())
        raise SourceError(f"the ledger cannot be opened: {reason}") from error
