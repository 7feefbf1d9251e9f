"""SQL over the ledger, run by DuckDB and by ClickHouse, and the export job agree to the row."""

import sqlite3
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet
from sqlalchemy import create_engine, make_url, text

from exports.clickhouse import (
    LANDED_TABLES,
    create_statements,
    landing_statement,
    misread_statement,
)
from exports.job import run_export
from exports.sample.ledger import write_sample_ledger
from exports.sample.trace import read_traces
from exports.sample.traffic import BEGIN
from exports.schemas import TABLES
from exports.table_sql import CLICKHOUSE, DUCKDB, fact_statements
from telemetry.ledger.session import migrate
from tests.exports.test_job import read
from tests.exports.test_postgresql import fill
from tests.exports.test_sample import traces

__all__ = ["traces"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def ledger_tables(path: Path) -> dict[str, pa.Table]:
    """The ledger's tables with instants as PostgreSQL has them."""
    ledger = sqlite3.connect(path)
    ledger.row_factory = sqlite3.Row
    tables = {}
    for table in LANDED_TABLES:
        rows = [dict(row) for row in ledger.execute(f"SELECT * FROM {table.name}")]  # noqa: S608
        columns: dict[str, pa.Array] = {}
        for column in table.columns:
            values = [row[column.name] for row in rows]
            if column.name.endswith("_at"):
                values = [EPOCH + timedelta(microseconds=value) for value in values]
            if column.name.endswith("_on"):
                values = [date.fromisoformat(value) for value in values]
            columns[column.name] = pa.array(values)
        tables[table.name] = pa.table(columns)
    ledger.close()
    return tables


def same_rows(table: str, found: pa.Table, out: Path, at_least: int = 10) -> None:
    schema = TABLES[table].schema
    assert found.column_names == schema.names
    order = [(name, "ascending") for name in schema.names]
    expected = read(out, table).sort_by(order)
    assert expected.num_rows >= at_least
    assert found.cast(schema.remove_metadata()).sort_by(order).to_pylist() == expected.to_pylist()


@pytest.fixture(scope="module")
def ledger(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A ledger with something of everything, and the folder of its export."""
    folder = tmp_path_factory.mktemp("duck")
    path = folder / "ledger.db"
    write_sample_ledger(path, read_traces(traces), 2)
    ledger = sqlite3.connect(path)
    for statement in (
        "UPDATE requests SET model_key = NULL, outcome = 'new_word' WHERE ledger_id % 5 = 0",
        "UPDATE requests SET energy_microjoules = NULL, trace_id = 'ab' WHERE ledger_id % 7 = 0",
        "UPDATE requests SET ttft_seconds = 3e6 WHERE ledger_id = 3",
        "UPDATE requests SET revision = 1, supersedes_ledger_id = 4 WHERE ledger_id = 9",
        "UPDATE request_acceptance SET num_accepted_of_length = position + request_ledger_id % 9",
        "UPDATE request_acceptance SET num_accepted_of_length = NULL WHERE request_ledger_id < 30",
        "UPDATE audit_results SET guarantee = NULL WHERE audit_id % 2 = 0",
    ):
        ledger.execute(statement)
    ledger.commit()
    ledger.close()
    run_export(f"sqlite:///{path}", folder / "out", now=BEGIN + timedelta(days=30))
    return path, folder / "out"


@pytest.fixture(scope="module")
def duck(ledger: tuple[Path, Path]) -> Any:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for name, rows in ledger_tables(ledger[0]).items():
        connection.register(name, rows)
    return connection


@pytest.fixture(scope="module")
def clickhouse(
    ledger: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    session = pytest.importorskip("chdb.session", reason="needs chdb-core: make test-exports")
    folder = tmp_path_factory.mktemp("clickhouse")
    engine = session.Session(str(folder / "store"))
    for statement in create_statements():
        engine.query(statement)
    tables = ledger_tables(ledger[0])
    for table in LANDED_TABLES:
        file = folder / f"{table.name}.parquet"
        parquet.write_table(tables[table.name], file)
        source = f"file('{file}', 'Parquet')"
        middle = 40
        # A run that was killed lands its range again.
        for after, until in ((0, middle), (0, middle), (middle, 10**9)):
            engine.query(landing_statement(table, source, after, until))
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_clickhouse_lands_from_postgresql_and_notices_a_time_zone(
    zone: str, postgres_url: str, tmp_path: Path
) -> None:
    session = pytest.importorskip("chdb.session", reason="needs chdb-core: make test-exports")
    migrate(postgres_url)
    fill(postgres_url)
    url = make_url(postgres_url)
    with create_engine(postgres_url).begin() as connection:
        connection.execute(text(f"ALTER DATABASE {url.database} SET timezone = '{zone}'"))
    engine = session.Session(str(tmp_path / "store"))
    for statement in create_statements():
        engine.query(statement)
    for table in LANDED_TABLES:
        place = f"'{url.host}:{url.port}', '{url.database}', '{table.name}'"
        source = f"postgresql({place}, '{url.username}', '{url.password or ''}')"
        engine.query(landing_statement(table, source, 0, 10**9))
    num_misread = engine.query(misread_statement(), "ArrowTable").column(0)[0].as_py()
    if zone == "UTC":
        run_export(postgres_url, tmp_path / "out", now=BEGIN + timedelta(days=365))
        for name, statement in fact_statements(CLICKHOUSE).items():
            same_rows(name, engine.query(statement, "ArrowTable"), tmp_path / "out", at_least=6)
    engine.close()
    assert (num_misread > 0) == (zone != "UTC")


@pytest.mark.slow
def test_clickhouse_adds_a_column_to_what_has_landed(tmp_path: Path) -> None:
    session = pytest.importorskip("chdb.session", reason="needs chdb-core: make test-exports")
    engine = session.Session(str(tmp_path / "store"))
    added = "num_accepted_of_length"
    for statement in create_statements():
        engine.query(statement.replace(f"{added} Nullable(Int64)", "of_old Nullable(Int64)"))
    engine.query("INSERT INTO landed_request_acceptance VALUES (1, 0, '2026-03-01', 5, 3, NULL)")
    for statement in create_statements():
        engine.query(statement)
    rows = "SELECT num_drafted, num_accepted_of_length FROM request_acceptance"
    found = engine.query(rows, "ArrowTable")
    engine.close()
    assert found.to_pylist() == [{"num_drafted": 5, added: None}]


@pytest.mark.parametrize("table", fact_statements(DUCKDB))
def test_duckdb_makes_the_same_rows(table: str, ledger: tuple[Path, Path], duck: Any) -> None:
    same_rows(table, duck.sql(fact_statements(DUCKDB)[table]).to_arrow_table(), ledger[1])


@pytest.mark.slow
@pytest.mark.parametrize("table", fact_statements(CLICKHOUSE))
def test_clickhouse_makes_the_same_rows(
    table: str, ledger: tuple[Path, Path], clickhouse: Any
) -> None:
    answer = clickhouse.query(fact_statements(CLICKHOUSE)[table], "ArrowTable")
    same_rows(table, answer, ledger[1])
