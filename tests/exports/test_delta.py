"""Delta tables hold what the published files hold, with one commit per table and run."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from exports.delta import publish_delta
from exports.errors import TargetError
from exports.job import run_export
from exports.manifest import read_manifest
from exports.schemas import TABLES
from exports.storage import Target
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_job import read

pytestmark = pytest.mark.thorough

deltalake = pytest.importorskip("deltalake")

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    for index in range(3):
        fill.request(NOON + timedelta(days=index), drafted=(3,), accepted=(2,))
    return fill


def run(ledger: LedgerFill, folder: Path) -> int:
    run_export(ledger.url, folder / "out", now=NOW)
    target = Target(folder / "out")
    return publish_delta(target, read_manifest(target), str(folder / "delta"))


def same_rows(folder: Path) -> None:
    for name, table in TABLES.items():
        found = deltalake.DeltaTable(str(folder / "delta" / name)).to_pyarrow_table()
        order = [(column.name, "ascending") for column in table.columns]
        expected = read(folder / "out", name).sort_by(order).to_pylist()
        assert found.sort_by(order).to_pylist() == expected, name


def test_every_table_is_there_with_its_rows(ledger: LedgerFill, tmp_path: Path) -> None:
    assert run(ledger, tmp_path) == len(TABLES)
    same_rows(tmp_path)
    requests = deltalake.DeltaTable(str(tmp_path / "delta" / "fact_request"))
    protocol = requests.protocol()
    # What every reader understands: naive times would ask for more.
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)


def test_a_later_run_replaces_its_dates_by_one_commit(ledger: LedgerFill, tmp_path: Path) -> None:
    run(ledger, tmp_path)
    ledger.request(NOON + timedelta(days=1, minutes=1), drafted=(3,), accepted=(0,))
    run(ledger, tmp_path)
    same_rows(tmp_path)
    [latest, first] = deltalake.DeltaTable(str(tmp_path / "delta" / "fact_request")).history()
    assert latest["operationParameters"]["predicate"] == "date_key = 20260329"
    assert latest["operationMetrics"]["num_added_rows"] == 2
    assert run(ledger, tmp_path) == 0
    assert first["version"] == 0


def test_a_table_that_missed_a_run_is_written_whole(ledger: LedgerFill, tmp_path: Path) -> None:
    run(ledger, tmp_path)
    ledger.request(NOON)
    run_export(ledger.url, tmp_path / "out", now=NOW)
    ledger.request(NOON + timedelta(days=2))
    run(ledger, tmp_path)
    same_rows(tmp_path)


def test_a_run_that_ended_before_its_tables_is_made_up_for_by_the_next(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    run(ledger, tmp_path)
    ledger.request(NOON + timedelta(days=1, minutes=1), drafted=(3,), accepted=(0,))
    run_export(ledger.url, tmp_path / "out", now=NOW)  # published, and killed before the tables
    assert run(ledger, tmp_path) == len(TABLES)
    same_rows(tmp_path)
    latest = deltalake.DeltaTable(str(tmp_path / "delta" / "fact_request")).history(1)[0]
    assert latest["operationParameters"]["predicate"] == "date_key = 20260329"


def test_a_place_that_cannot_be_written_is_named(ledger: LedgerFill, tmp_path: Path) -> None:
    (tmp_path / "delta").write_text("a file")
    with pytest.raises(TargetError, match="cannot write the Delta table"):
        run(ledger, tmp_path)
