"""The views for DirectQuery show what an export of the same ledger holds, row by row."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text

from exports.job import run_export
from exports.powerbi import views
from exports.schemas import TABLES
from telemetry.ledger.session import migrate
from tests.exports.ledgers import NOON
from tests.exports.test_job import read
from tests.exports.test_postgresql import fill

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)


def test_the_script_in_the_repository_is_current() -> None:
    current = views.FILE.read_text("utf-8")
    assert current == views.views_sql(), "run python -m exports.powerbi.views"


def make_views(connection: Connection) -> None:
    for statement in views.view_statements():
        connection.exec_driver_sql(statement)


def without_zone(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.replace(tzinfo=None) if isinstance(value, datetime) else value
        for name, value in row.items()
    }


def test_every_view_shows_the_rows_of_an_export(postgres_url: str, tmp_path: Path) -> None:
    migrate(postgres_url)
    ledger = fill(postgres_url)
    ledger.request(NOON, outcome="new_word", model_key=None, ttft_seconds=3e6, tpot_seconds=1e-4)
    ledger.request(NOON, tenant_key=None, price_key=None, queue_seconds=0.01, ttft_seconds=None)
    ledger.audit(NOON, guarantee=None)
    run_export(postgres_url, tmp_path / "out", now=NOW + timedelta(days=20))
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        # A viewer elsewhere must see the same.
        connection.execute(text("SET timezone = 'America/New_York'"))
        for _ in range(2):
            make_views(connection)
        for name, table in TABLES.items():
            found = connection.execute(text(f"TABLE {views.SCHEMA}.{name}"))
            assert tuple(found.keys()) == tuple(table.schema.names)
            rows = [dict(row) for row in found.mappings()]
            expected = [without_zone(row) for row in read(tmp_path / "out", name).to_pylist()]
            assert expected, name
            assert sorted(rows, key=repr) == sorted(expected, key=repr), name
    engine.dispose()


def test_a_reader_of_the_views_needs_no_right_to_the_ledger(postgres_url: str) -> None:
    migrate(postgres_url)
    fill(postgres_url)
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        make_views(connection)
        connection.execute(text("DROP ROLE IF EXISTS dashboard"))
        connection.execute(text("CREATE ROLE dashboard"))
        connection.execute(text("GRANT USAGE ON SCHEMA tandem_bi TO dashboard"))
        connection.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA tandem_bi TO dashboard"))
        connection.execute(text("SET LOCAL ROLE dashboard"))
        assert connection.scalar(text("SELECT count(*) FROM tandem_bi.fact_request")) == 6
        connection.execute(text("RESET ROLE"))
        connection.execute(text("DROP OWNED BY dashboard"))
        connection.execute(text("DROP ROLE dashboard"))
    engine.dispose()
