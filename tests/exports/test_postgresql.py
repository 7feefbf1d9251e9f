"""A ledger in PostgreSQL makes the same tables as one in SQLite, and needs only SELECT."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from exports.job import ExportOptions, run_export
from telemetry.ledger.session import migrate
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_job import published, read

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)


def fill(url: str) -> LedgerFill:
    ledger = LedgerFill(url)
    ledger.dimensions()
    for index in range(6):
        ledger.request(
            NOON + timedelta(hours=9 * index, microseconds=index),
            drafted=(5, 3, 1)[: index % 4],
            accepted=(4, 2, 0)[: index % 4],
            of_length=None if index == 1 else (1, 2, 3)[: index % 4],
            ttft_seconds=None if index == 2 else 0.1 * index,
            energy_microjoules=None if index < 4 else 17,
            trace_id=None if index < 3 else f"{index:032x}",
        )
        ledger.interval(NOON + timedelta(hours=index))
        ledger.audit(NOON + timedelta(hours=7 * index), "exact" if index else "divergence")
    ledger.request(
        NOON + timedelta(days=1),
        revision=1,
        supersedes_ledger_id=1,
        request_id="request-1",
        record_id=f"{1:032}",
    )
    return ledger


def test_both_databases_make_the_same_bytes(postgres_url: str, tmp_path: Path) -> None:
    migrate(postgres_url)
    fill(postgres_url)
    sqlite = fill(new_ledger(tmp_path))
    run_export(postgres_url, tmp_path / "pg", now=NOW)
    run_export(sqlite.url, tmp_path / "lite", now=NOW)
    assert len(read(tmp_path / "pg", "fact_request")) == 6
    assert published(tmp_path / "pg") == published(tmp_path / "lite")


def test_the_right_to_read_is_enough(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    migrate(postgres_url)
    fill(postgres_url)
    admin = create_engine(postgres_url)
    with admin.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS export_reader"))
        connection.execute(text("CREATE ROLE export_reader LOGIN PASSWORD 'only reads'"))
        connection.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO export_reader"))
    url = make_url(postgres_url).set(username="export_reader", password="only reads")
    with caplog.at_level(logging.WARNING):
        summary = run_export(url.render_as_string(hide_password=False), tmp_path / "out", now=NOW)
    assert summary.tables["fact_request"] == 6
    assert "does not record how far" in caplog.text
    with admin.begin() as connection:
        connection.execute(text("DROP OWNED BY export_reader"))
        connection.execute(text("DROP ROLE export_reader"))


def test_young_rows_wait_by_default(postgres_url: str, tmp_path: Path) -> None:
    migrate(postgres_url)
    ledger = LedgerFill(postgres_url)
    ledger.dimensions()
    ledger.request(recorded_at=NOW - timedelta(seconds=30))
    waiting = run_export(postgres_url, tmp_path / "out", now=NOW)
    at_once = run_export(postgres_url, tmp_path / "out", ExportOptions(lag=timedelta(0)), now=NOW)
    assert (waiting.tables["fact_request"], at_once.tables["fact_request"]) == (0, 1)
