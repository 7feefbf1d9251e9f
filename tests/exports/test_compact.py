"""A closed month becomes one file per table, and stays correct when a late row opens it again."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from exports.job import ExportOptions, run_export
from tests.exports.ledgers import LedgerFill, new_ledger
from tests.exports.test_job import published, read

pytestmark = pytest.mark.thorough

MARCH = datetime(2026, 3, 3, 12, 0, tzinfo=UTC)
NOW = datetime(2026, 5, 20, 9, 0, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    for index in range(4):
        fill.request(MARCH + timedelta(days=7 * index), drafted=(3,), accepted=(2,))
        fill.interval(MARCH + timedelta(days=7 * index))
    return fill


def folders(out: Path, table: str) -> list[str]:
    manifest = json.loads((out / "manifest.json").read_text())
    return [file["path"].split("/")[1] for file in manifest["tables"][table]["files"]]


def test_a_month_is_merged_once_there_are_rows_a_week_after_it(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ledger.request(datetime(2026, 4, 7, 23, 59, tzinfo=UTC))
    run_export(ledger.url, out, now=NOW)
    assert len(folders(out, "fact_request")) == 5
    ledger.request(datetime(2026, 4, 8, 0, 0, tzinfo=UTC))
    run_export(ledger.url, out, now=NOW)
    assert folders(out, "fact_request") == ["dt=2026-04-07", "dt=2026-04-08", "month=2026-03"]
    assert folders(out, "fact_acceptance") == ["month=2026-03"]
    ids = sorted(read(out, "fact_request")["ledger_id"].to_pylist())
    assert ids == [1, 2, 3, 4, 5, 6]


def test_a_late_row_opens_its_month_and_nothing_else_changes(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ledger.request(datetime(2026, 5, 2, tzinfo=UTC))
    run_export(ledger.url, out, now=NOW)
    ledger.request(MARCH + timedelta(days=7, minutes=1), drafted=(4,), accepted=(1,))
    summary = run_export(ledger.url, out, now=NOW)
    assert summary.rewritten_dates == ((MARCH + timedelta(days=7)).date(),)
    assert folders(out, "fact_request") == ["dt=2026-05-02", "month=2026-03"]
    run_export(ledger.url, tmp_path / "once", now=NOW)
    assert published(out) == published(tmp_path / "once")
    run_export(ledger.url, out, ExportOptions(full=True), now=NOW)
    assert published(out) == published(tmp_path / "once")


def test_the_manifest_still_says_how_many_rows_each_date_has(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ledger.request(datetime(2026, 5, 2, tzinfo=UTC))
    run_export(ledger.url, out, now=NOW)
    manifest = json.loads((out / "manifest.json").read_text())
    [file] = [f for f in manifest["tables"]["fact_request"]["files"] if "month=" in f["path"]]
    assert file["date_rows"] == {f"2026-03-{day:02}": 1 for day in (3, 10, 17, 24)}
    assert (file["min_date"], file["max_date"]) == ("2026-03-03", "2026-03-24")
