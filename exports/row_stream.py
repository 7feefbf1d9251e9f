"""Rows of the ledger as Arrow batches, streamed by ADBC: C fills the buffers, memory is bounded.

Only for a process that opens the ledger in no other way (exports.day_worker): the driver links
a second copy of SQLite, and two copies in one process undo each other's file locks on the same
database; apart they respect them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement
from adbc_driver_manager import Error as AdbcError

from exports.errors import SourceError

BATCH_ROWS = 16_384
_PRAGMAS = ("PRAGMA query_only=ON", "PRAGMA busy_timeout=30000")


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
        try:
            self._connection = AdbcConnection(_opened(database))
            for pragma in _PRAGMAS if is_sqlite else ():
                deque(self._answer(pragma), maxlen=0)
        except (AdbcError, pa.ArrowException, OSError) as error:
            raise SourceError(f"the ledger cannot be opened: {_reason(error)}") from error

    def batches(self, statement: Statement) -> Iterator[pa.RecordBatch]:
        """The statement's rows, in batches that are never empty. Take all before the next call."""
        to_skip = statement.num_leading_rows
        try:
            for batch in self._answer(statement.sql):
                rows, to_skip = batch.slice(to_skip), max(to_skip - batch.num_rows, 0)
                if rows.num_rows:
                    yield pa.RecordBatch.from_arrays(rows.columns, list(statement.names))
        except (AdbcError, pa.ArrowException, OSError) as error:
            raise SourceError(f"the ledger cannot be read: {_reason(error)}") from error

    def _answer(self, sql: str) -> Iterator[pa.RecordBatch]:
        # Not by adbc_driver_manager.dbapi: it imports pandas, where that is installed.
        with AdbcStatement(self._connection) as statement:
            if self._options:
                statement.set_options(**self._options)
            statement.set_sql_query(sql)
            stream, _ = statement.execute_query()
            with pa.RecordBatchReader.from_stream(stream) as reader:
                yield from reader


def _opened(database: Database) -> AdbcDatabase:
    if database.dialect == "sqlite":
        import adbc_driver_sqlite

        return adbc_driver_sqlite.connect(database.address)
    import adbc_driver_postgresql

    opened: AdbcDatabase = adbc_driver_postgresql.connect(database.address)
    return opened


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
