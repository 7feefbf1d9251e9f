"""Retention: old and exported rows go, everything else stays; on PostgreSQL by partition."""

import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, insert, make_url, select

from telemetry.ledger import models
from telemetry.ledger.partitions import partition_days
from telemetry.ledger.queries import check_ledger, ledger_stats, reconcile
from telemetry.ledger.records import RequestRecord
from telemetry.ledger.retention import RetentionError, prune
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from tests.telemetry.ledger_records import request_record
from tests.telemetry.recording_rig import recording_rig


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


@given(
    days=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    watermarks=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    before=st.integers(1, 6),
)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_one_of_the_exports_has_not_read_stays(
    tmp_path: Path, days: list[int], watermarks: list[int], before: int
) -> None:
    url = f"sqlite:///{tmp_path}/{uuid4().hex}.db"
    shutil.copyfile(_empty_ledger(tmp_path), make_url(url).database or "")
    engine = open_ledger(url)
    LedgerStore(engine).write([_on(day, f"r{n}") for n, day in enumerate(days)], may_exist=False)
    at = datetime.now(UTC)
    with engine.begin() as connection:
        marks = [
            {"name": f"export{n}", "ledger_id": mark, "exported_at": at}
            for n, mark in enumerate(watermarks)
        ]
        connection.execute(insert(models.ExportWatermark), marks)
    prune(engine, before=date(2026, 3, before))
    with engine.connect() as connection:
        left = set(connection.execute(select(models.Request.ledger_id)).scalars())
    engine.dispose()
    expected = {
        ledger_id
        for ledger_id, day in enumerate(days, start=1)
        if ledger_id > min(watermarks) or day >= before
    }
    assert left == expected


def _empty_ledger(folder: Path) -> Path:
    path = folder / "template.db"
    if not path.exists():
        migrate(f"sqlite:///{path}")
        engine = create_engine(f"sqlite:///{path}")
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        engine.dispose()
    return path


def test_accounts_still_add_up_when_retention_took_a_part_of_them(tmp_path: Path) -> None:
    for _ in range(2):
        with recording_rig(tmp_path) as rig:
            for number in range(4):
                request = rig.begin(f"r{number}")
                rig.run_step(f"r{number}")
                rig.finish(request)
    engine = open_ledger(rig.url)
    before = reconcile(engine)
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    assert prune(engine, before=tomorrow, through=2).num_requests == 2
    after = reconcile(engine)
    engine.dispose()
    assert before.differing == after.differing == {}
    assert after.charged_nano_usd == before.charged_nano_usd > 0


def test_a_day_gets_its_partition_before_its_rows(postgres_url: str) -> None:
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
