"""DuckDB's SQL over the ledger and the export job agree to the row."""

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from exports.duck_tables import fact_statements
from exports.job import run_export
from exports.sample.ledger import write_sample_ledger
from exports.sample.trace import read_traces
from exports.sample.traffic import BEGIN
from exports.schemas import TABLES
from tests.exports.test_job import read
from tests.exports.test_sample import traces

__all__ = ["traces"]

LEDGER_TABLES = ("requests", "request_acceptance", "capacity_intervals", "audit_results")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def attach(connection: Any, path: Path) -> None:
    """The ledger's tables in DuckDB, instants as TIMESTAMPTZ as PostgreSQL has them."""
    ledger = sqlite3.connect(path)
    ledger.row_factory = sqlite3.Row
    for name in LEDGER_TABLES:
        rows = [dict(row) for row in ledger.execute(f"SELECT * FROM {name}")]  # noqa: S608
        columns: dict[str, pa.Array] = {}
        for column in rows[0]:
            values = [row[column] for row in rows]
            if column.endswith("_at"):
                values = [EPOCH + timedelta(microseconds=value) for value in values]
            columns[column] = pa.array(values)
        connection.register(name, pa.table(columns))
    ledger.close()


@pytest.fixture(scope="module")
def both(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("duck")
    path = folder / "ledger.db"
    write_sample_ledger(path, read_traces(traces), 2)
    ledger = sqlite3.connect(path)
    for statement in (
        "UPDATE requests SET model_key = NULL, outcome = 'new_word' WHERE ledger_id % 5 = 0",
        "UPDATE requests SET energy_microjoules = NULL, trace_id = 'ab' WHERE ledger_id % 7 = 0",
        "UPDATE requests SET ttft_seconds = 3e6 WHERE ledger_id = 3",
        "UPDATE requests SET revision = 1, supersedes_ledger_id = 4 WHERE ledger_id = 9",
        "UPDATE audit_results SET guarantee = NULL WHERE audit_id % 2 = 0",
    ):
        ledger.execute(statement)
    ledger.commit()
    ledger.close()
    run_export(f"sqlite:///{path}", folder / "out", now=BEGIN + timedelta(days=30))
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    attach(connection, path)
    return folder / "out", connection


@pytest.mark.parametrize("table", fact_statements())
def test_duckdb_makes_the_same_rows(table: str, both: tuple[Path, Any]) -> None:
    out, connection = both
    found = connection.sql(fact_statements()[table]).to_arrow_table()
    schema = TABLES[table].schema
    assert found.column_names == schema.names
    order = [(name, "ascending") for name in schema.names]
    expected = read(out, table).sort_by(order)
    assert expected.num_rows > 10
    assert found.cast(schema.remove_metadata()).sort_by(order).to_pylist() == expected.to_pylist()
