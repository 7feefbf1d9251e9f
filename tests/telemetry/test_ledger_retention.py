"""Retention: old and exported rows go, everything else stays; on PostgreSQL by partition."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from telemetry.ledger import models
from telemetry.ledger.partitions import partition_days
from telemetry.ledger.queries import check_ledger, ledger_stats
from telemetry.ledger.records import RequestRecord
from telemetry.ledger.retention import RetentionError, prune
from telemetry.ledger.session import open_ledger
from telemetry.ledger.store import LedgerStore
from tests.telemetry.ledger_records import request_record


def _on(day: int, request_id: str) -> RequestRecord:
    at = datetime(2026, 3, day, 12, tzinfo=UTC)
    return request_record(request_id, started_at=at, finished_at=at + timedelta(seconds=1))


def test_only_old_and_exported_rows_go(ledger_url: str) -> None:
    engine = open_ledger(ledger_url)
    store = LedgerStore(engine)
    store.write([_on(1, "a"), _on(1, "b"), _on(2, "c"), _on(3, "d")], may_exist=False)
    store.write([_on(2, "late")], may_exist=False)
    with pytest.raises(RetentionError, match="tandem export"):
        prune(engine, before=date(2026, 3, 3))
    with engine.begin() as connection:
        watermark = {"name": "parquet", "ledger_id": 4, "exported_at": datetime.now(UTC)}
        connection.execute(insert(models.ExportWatermark), [watermark])
    pruned = prune(engine, before=date(2026, 3, 3))
    assert pruned.kept_days == (date(2026, 3, 2),)
    with engine.connect() as connection:
        left = set(connection.execute(select(models.Request.request_id)).scalars())
        positions = connection.execute(select(models.RequestAcceptance.request_ledger_id)).all()
        if engine.dialect.name == "postgresql":
            assert date(2026, 3, 1) not in partition_days(connection, "requests")
            assert left == {"c", "d", "late"}  # a day goes whole or not at all
        else:
            assert left == {"d", "late"}
    assert len(positions) == 2 * len(left)
    assert prune(engine, before=date(2026, 3, 4), through=99).num_requests == len(left)
    assert ledger_stats(engine).num_requests == 0
    engine.dispose()


def test_a_day_gets_its_partition_before_its_rows(postgres_url: str) -> None:
    from telemetry.ledger.session import migrate

    migrate(postgres_url)
    engine = open_ledger(postgres_url)
    LedgerStore(engine).write([_on(5, "a")], may_exist=False)
    with engine.connect() as connection:
        for table in ("requests", "request_acceptance"):
            assert date(2026, 3, 5) in partition_days(connection, table)
        where = "SELECT tableoid::regclass::text FROM requests"
        assert connection.exec_driver_sql(where).scalar() == "requests_p20260305"
    engine.dispose()


def test_a_check_names_what_is_wrong(ledger_url: str, tmp_path: Path) -> None:
    engine = open_ledger(ledger_url)
    store = LedgerStore(engine)
    store.write([_on(1, "a")], may_exist=False)
    assert all(finding.is_good for finding in check_ledger(engine))
    bad = request_record("bad")
    from dataclasses import replace

    store.write([replace(bad, cost=replace(bad.cost, cost_nano_usd=1))], may_exist=False)
    assert [f.name for f in check_ledger(engine) if not f.is_good] == ["cost parts"]
    stats = ledger_stats(engine)
    assert (stats.num_requests, stats.num_by_outcome) == (2, {"completed": 2})
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (14, 18)
    assert stats.energy_microjoules is None
    engine.dispose()


def test_a_ledger_without_a_schema_is_a_finding(empty_url: str) -> None:
    engine = open_ledger(empty_url)
    (finding,) = check_ledger(engine)
    assert not finding.is_good
    engine.dispose()
