"""An export from before a column was added goes on: old rows are NULL there, in every reader."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyarrow import parquet

from exports import delta
from exports.duck import open_export
from exports.facts import FACT_ACCEPTANCE
from exports.job import run_export
from exports.manifest import read_manifest
from exports.schemas import TABLES
from exports.storage import Target
from tests.exports.ledgers import LedgerFill, new_ledger

pytestmark = pytest.mark.thorough

MARCH = datetime(2026, 3, 3, 12, 0, tzinfo=UTC)
NOW = datetime(2026, 5, 20, 9, 0, tzinfo=UTC)
ADDED = "num_accepted_of_length"


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    for index in range(3):
        fill.request(MARCH + timedelta(days=index), drafted=(3,), accepted=(2,), of_length=(2,))
    return fill


def make_old(out: Path) -> None:
    """The files as they were before the column."""
    for path in out.glob("fact_acceptance/**/*.parquet"):
        rows = parquet.read_table(path, partitioning=None)
        parquet.write_table(rows.drop_columns(ADDED), path)


def shown(out: Path) -> list[tuple[int, int | None]]:
    found = open_export(out).sql(
        "SELECT date_key % 100, num_accepted_of_length FROM fact_acceptance "
        "WHERE position = 1 ORDER BY ALL"
    )
    assert found.columns[1] == ADDED
    return [tuple(row) for row in found.fetchall()]


def test_old_files_are_shown_and_merged_with_null(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    assert shown(out) == [(3, 2), (4, 2), (5, 2)]
    make_old(out)
    assert shown(out) == [(3, None), (4, None), (5, None)]
    late = MARCH + timedelta(days=1, minutes=1)
    ledger.request(late, drafted=(3,), accepted=(1,), of_length=(1,))
    run_export(ledger.url, out, now=NOW)
    assert shown(out) == [(3, None), (4, 3), (5, None)]
    ledger.request(datetime(2026, 5, 2, tzinfo=UTC))  # closes the month
    run_export(ledger.url, out, now=NOW)
    [file] = read_manifest(Target(out)).tables["fact_acceptance"]
    assert file.path.startswith("fact_acceptance/month=2026-03")
    assert parquet.read_schema(out / file.path).equals(FACT_ACCEPTANCE.schema, check_metadata=True)
    assert shown(out) == [(3, None), (4, 3), (5, None)]


@pytest.mark.parametrize("misses_a_run", [False, True])
def test_a_delta_table_gets_the_column(
    misses_a_run: bool, ledger: LedgerFill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltalake = pytest.importorskip("deltalake")
    out, root = tmp_path / "out", str(tmp_path / "delta")

    def publish() -> None:
        run_export(ledger.url, out, now=NOW)
        delta.publish_delta(Target(out), read_manifest(Target(out)), root)

    old = replace(FACT_ACCEPTANCE, columns=FACT_ACCEPTANCE.columns[:-1])
    with monkeypatch.context() as before:
        before.setattr(delta, "TABLES", TABLES | {old.name: old})
        run_export(ledger.url, out, now=NOW)
        make_old(out)
        publish()
    ledger.request(
        MARCH + timedelta(days=1, minutes=1), drafted=(3,), accepted=(1,), of_length=(1,)
    )
    if misses_a_run:
        run_export(ledger.url, out, now=NOW)
        ledger.request(MARCH + timedelta(days=9))
    publish()
    rows = deltalake.DeltaTable(f"{root}/{old.name}").to_pyarrow_table().to_pylist()
    found = sorted((row["date_key"] % 100, row[ADDED]) for row in rows if row["position"] == 1)
    assert found == [(3, None), (4, 3), (5, None)]
