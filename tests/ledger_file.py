"""What a running server has written to its SQLite ledger so far."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path


def rows_filed(ledger: Path, query: str) -> list[tuple[object, ...]]:
    """The rows; none while the server has not made the file or its tables yet."""
    if not ledger.is_file():
        return []
    with closing(sqlite3.connect(ledger)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return []


def wait_until_filed(ledger: Path, query: str, *, patience_seconds: float = 30.0) -> None:
    """Until the query finds a row; a request may be answered before its row is in the tables."""
    patience_until = time.monotonic() + patience_seconds
    while not rows_filed(ledger, query):
        assert time.monotonic() < patience_until, query
        time.sleep(0.02)
