"""What an export publishes, and that a rerun, a late row or a correction publishes the same."""

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from exports.errors import ReconciliationError, SourceError
from exports.extract import LedgerSource
from exports.facts import FACT_ACCEPTANCE, LATENCY_BOUNDS_SECONDS
from exports.job import ExportOptions, ExportSummary, run_export
from exports.ledger_facts import DayTotals
from exports.schemas import (
    DIMENSIONS,
    FACTS,
    TABLES,
)
from exports.transform import new_acceptance_fold
from tests.exports.ledgers import NOON, LedgerFill, new_ledger

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    return fill


def export(ledger: LedgerFill, out: Path, **options: Any) -> ExportSummary:
    now = options.pop("now", NOW)
    return run_export(ledger.url, out, ExportOptions(**options), now=now)


def read(out: Path, table: str) -> pa.Table:
    manifest = json.loads((out / "manifest.json").read_text())
    paths = [file["path"] for file in manifest["tables"][table]["files"]]
    parts = [parquet.read_table(out / path, partitioning=None) for path in paths]
    return pa.concat_tables(parts) if parts else TABLES[table].schema.empty_table()


def published(out: Path) -> dict[str, bytes]:
    manifest = json.loads((out / "manifest.json").read_text())
    return {
        file["path"]: (out / file["path"]).read_bytes()
        for table in manifest["tables"].values()
        for file in table["files"]
    }


def test_every_row_of_the_ledger_is_in_fact_request(ledger: LedgerFill, tmp_path: Path) -> None:
    for index in range(5):
        ledger.request(NOON + timedelta(days=index))
    ledger.request(outcome="refused", finish_reason=None, model_key=None, ttft_seconds=None)
    summary = export(ledger, tmp_path / "out")

    rows = read(tmp_path / "out", "fact_request").sort_by("ledger_id").to_pylist()
    assert summary.tables["fact_request"] == len(rows) == 6
    assert [row["date_key"] for row in rows] == [
        20260328,
        20260329,
        20260330,
        20260331,
        20260401,
        20260328,
    ]
    for row, added in zip(rows, ledger.added, strict=True):
        for name in ("request_id", "finished_at", "cost_nano_usd", "num_output_tokens"):
            assert row[name] == added[name]
    assert {row["hour_key"] for row in rows} == {12}
    assert rows[5]["model_key"] == -1
    assert rows[5]["ttft_seconds"] is None
    assert rows[5]["energy_microjoules"] is None


def test_every_key_of_a_fact_is_in_its_dimension(ledger: LedgerFill, tmp_path: Path) -> None:
    ledger.request(drafted=(3, 1), accepted=(2, 0))
    ledger.request(model_key=None, variant_key=None, tenant_key=None, price_key=None)
    ledger.request(outcome="abducted", finish_reason="length")
    ledger.interval(NOON, model_key=None)
    ledger.audit(NOON, drafter_key=None)
    out = tmp_path / "out"
    export(ledger, out)

    members = {t.columns[0].name: set(read(out, t.name)[0].to_pylist()) for t in DIMENSIONS}
    for fact in FACTS:
        rows = read(out, fact.name)
        assert rows.num_rows, fact.name
        for name in set(rows.column_names) & set(members):
            assert set(rows[name].to_pylist()) <= members[name], (fact.name, name)
    assert -1 in read(out, "fact_request")["outcome_key"].to_pylist()


def test_files_have_the_declared_schema(ledger: LedgerFill, tmp_path: Path) -> None:
    ledger.request(drafted=(3, 1), accepted=(2, 0))
    ledger.interval(NOON)
    ledger.audit(NOON)
    out = tmp_path / "out"
    export(ledger, out)
    for name, table in TABLES.items():
        assert read(out, name).schema.equals(table.schema, check_metadata=True), name


def test_acceptance_is_counted_by_position_and_by_length(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    # 5 verify steps: drafts of length 1, 2, 2, 3, 3; accepted 0, 1, 2, 0, 3.
    ledger.request(drafted=(5, 4, 2), accepted=(3, 2, 1), of_length=(0, 3, 3))
    ledger.request(drafted=(2,), accepted=(1,), of_length=(1,))
    ledger.request()
    export(ledger, tmp_path / "out")
    rows = {row["position"]: row for row in read(tmp_path / "out", "fact_acceptance").to_pylist()}
    assert sorted(rows) == [0, 1, 2, 3]
    assert [rows[n]["num_draft_tokens"] for n in range(4)] == [0, 7, 4, 2]
    assert [rows[n]["num_accepted_tokens"] for n in range(4)] == [0, 4, 2, 1]
    assert [rows[n]["num_steps_drafted"] for n in range(4)] == [0, 3, 2, 2]
    assert [rows[n]["num_steps_accepted"] for n in range(4)] == [3, 2, 1, 1]
    assert [rows[n]["num_accepted_of_length"] for n in range(4)] == [0, 1, 3, 3]


def test_what_was_not_counted_by_length_is_null_and_not_too_little(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    ledger.request(drafted=(5, 4, 2), accepted=(3, 2, 1), of_length=(0, 3, 3))
    ledger.request(drafted=(2, 1), accepted=(1, 1))  # before it was counted
    later = NOON + timedelta(hours=1)
    ledger.request(later, drafted=(1, 1), accepted=(1, 0), of_length=(0, 1))
    export(ledger, tmp_path / "out")
    found = [
        (row["hour_key"] - NOON.hour, row["position"], row["num_accepted_of_length"])
        for row in read(tmp_path / "out", "fact_acceptance").to_pylist()
    ]
    assert sorted(found) == [
        *((0, position, value) for position, value in enumerate((0, None, None, 3))),
        *((1, position, value) for position, value in enumerate((0, 0, 1))),
    ]


def test_a_batch_that_was_not_counted_makes_the_sum_over_batches_null() -> None:
    whole = dict.fromkeys(FACT_ACCEPTANCE.schema.names, 1)
    fold = new_acceptance_fold()
    for position, of_length in ((1, 4), (2, 3), (1, None), (2, 5), (1, 2)):
        row = whole | {"position": position, "num_accepted_of_length": of_length}
        fold.add(pa.Table.from_pylist([row], FACT_ACCEPTANCE.schema))
    found = fold.result()
    assert found["num_accepted_of_length"].to_pylist() == [None, 8]
    assert found["num_draft_tokens"].to_pylist() == [3, 2]


def test_latency_buckets_add_up_and_hold_their_values(ledger: LedgerFill, tmp_path: Path) -> None:
    values = [0.000_05, 0.0123, 0.0123, 3.5, 2_000_000.0]
    for value in values:
        ledger.request(ttft_seconds=value)
    ledger.request(ttft_seconds=None)
    export(ledger, tmp_path / "out")
    rows = read(tmp_path / "out", "fact_latency_histogram").to_pylist()
    ttft = [row for row in rows if row["metric"] == "ttft"]
    assert sum(row["num_requests"] for row in ttft) == len(values)
    assert sum(row["sum_microseconds"] for row in ttft) == round(sum(values) * 1e6)
    [bucket] = [row for row in ttft if row["num_requests"] == 2]
    assert bucket["upper_seconds"] / 1.071 < 0.0123 <= bucket["upper_seconds"]
    assert sum(row["num_requests"] for row in rows if row["metric"] == "e2e") == 6


def test_a_value_on_a_bound_is_in_the_bucket_that_the_bound_ends(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    bound = LATENCY_BOUNDS_SECONDS[100]
    ledger.request(ttft_seconds=bound)
    export(ledger, tmp_path / "out")
    rows = read(tmp_path / "out", "fact_latency_histogram").to_pylist()
    assert [row["upper_seconds"] for row in rows if row["metric"] == "ttft"] == [bound]


def test_a_second_run_without_news_publishes_nothing(ledger: LedgerFill, tmp_path: Path) -> None:
    ledger.request()
    first = export(ledger, tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    second = export(ledger, tmp_path / "out", now=NOW + timedelta(hours=1))
    assert (first.is_published, second.is_published) == (True, False)
    assert second.tables == first.tables
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


def test_incremental_runs_and_one_full_run_make_the_same_bytes(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    for index in range(4):
        ledger.request(NOON + timedelta(days=index % 2), drafted=(3, 2), accepted=(2, 1))
        ledger.interval(NOON + timedelta(hours=index))
        ledger.audit(NOON + timedelta(hours=index))
        export(ledger, steps)
    export(ledger, tmp_path / "once")
    export(ledger, steps, full=True)
    assert published(steps) == published(tmp_path / "once")


def test_a_late_row_rewrites_its_own_date_only(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for index in range(3):
        ledger.request(NOON + timedelta(days=index))
    export(ledger, out)
    before = set(published(out))
    ledger.request(NOON + timedelta(days=1, minutes=5), recorded_at=NOON + timedelta(days=3))
    summary = export(ledger, out, now=NOW + timedelta(days=20))
    assert summary.rewritten_dates == (date(2026, 3, 29),)
    changed = set(published(out)) - before
    assert {path.split("/")[1] for path in changed} == {"dt=2026-03-29"}
    assert summary.tables["fact_request"] == 4


def test_a_correction_replaces_the_row_it_names_on_both_dates(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    wrong = ledger.request(NOON, drafted=(4,), accepted=(4,), cost_nano_usd=999)
    ledger.request(NOON)
    export(ledger, out)
    later = NOON + timedelta(days=1)
    ledger.request(
        later,
        drafted=(4,),
        accepted=(1,),
        cost_nano_usd=7,
        request_id=f"request-{wrong}",
        record_id=f"{wrong:032}",
        revision=1,
        supersedes_ledger_id=wrong,
    )
    summary = export(ledger, out)
    rows = read(out, "fact_request").to_pylist()
    assert summary.rewritten_dates == (NOON.date(), later.date())
    assert sorted(row["ledger_id"] for row in rows) == [2, 3]
    acceptance = read(out, "fact_acceptance")
    assert sum(acceptance["num_accepted_tokens"].to_pylist()) == 1
    quality = {row["date_key"]: row for row in read(out, "fact_reconciliation").to_pylist()}
    assert quality[20260328]["num_superseded_rows"] == 1


def test_rows_younger_than_the_lag_wait_for_the_next_run(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ledger.request(recorded_at=NOW - timedelta(minutes=3))
    ledger.request(recorded_at=NOW - timedelta(minutes=1))
    lag = timedelta(minutes=2)
    assert export(ledger, out, lag=lag).tables["fact_request"] == 1
    later = export(ledger, out, lag=lag, now=NOW + timedelta(minutes=5))
    assert later.tables["fact_request"] == 2


def test_a_row_committed_behind_the_watermark_is_found_by_recounting(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    today = NOW - timedelta(hours=2)
    ledger.request(today, ledger_id=10)
    export(ledger, out)
    ledger.request(today, ledger_id=9)  # its transaction was slower than the lag
    assert export(ledger, out).tables["fact_request"] == 2


def test_an_empty_ledger_makes_typed_empty_tables(ledger: LedgerFill, tmp_path: Path) -> None:
    summary = export(ledger, tmp_path / "out")
    assert summary.tables["fact_request"] == 0
    assert summary.tables["dim_date"] == 365
    assert summary.tables["dim_model"] == 3


def test_pruned_dates_stay_as_published(ledger: LedgerFill, tmp_path: Path) -> None:
    from sqlalchemy import delete

    from telemetry.ledger.models import Request
    from telemetry.ledger.session import open_ledger

    out = tmp_path / "out"
    ledger.request()
    ledger.request()
    export(ledger, out)
    with open_ledger(ledger.url).begin() as connection:
        connection.execute(delete(Request))
    ledger.request(recorded_at=NOW)
    summary = export(ledger, out, full=True, now=NOW + timedelta(minutes=1))
    assert summary.protected_dates == (NOON.date(),)
    assert summary.tables["fact_request"] == 2


def test_a_difference_to_the_ledger_is_never_published(
    ledger: LedgerFill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    ledger.request()
    export(ledger, out)
    before = (out / "manifest.json").read_bytes()
    ledger.request()
    right = LedgerSource.day_totals

    def one_more(self: LedgerSource, day: date, until: int) -> DayTotals:
        totals = right(self, day, until)
        return DayTotals(totals.num_requests + 1, *list(totals_tail(totals)))

    monkeypatch.setattr(LedgerSource, "day_totals", one_more)
    with pytest.raises(ReconciliationError, match="2026-03-28"):
        export(ledger, out)
    assert (out / "manifest.json").read_bytes() == before


def totals_tail(totals: DayTotals) -> tuple[int, ...]:
    return (
        totals.num_superseded,
        totals.num_output_tokens,
        totals.num_prompt_tokens,
        totals.num_accepted_tokens,
        totals.cost_nano_usd,
    )


def test_a_missing_ledger_is_named_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"absent\.db"):
        run_export(f"sqlite:///{tmp_path / 'absent.db'}", tmp_path / "out")
    assert not (tmp_path / "absent.db").exists()


def test_a_column_that_is_null_in_the_first_thousand_rows_keeps_its_type(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    from sqlalchemy import insert

    from telemetry.ledger.models import Request
    from telemetry.ledger.session import open_ledger
    from tests.exports.ledgers import request_row

    rows = [
        request_row(index, NOON) | {"ttft_seconds": None, "trace_id": None, "price_key": None}
        for index in range(1, 2001)
    ]
    rows[-1] |= {"ttft_seconds": 0.25, "trace_id": "ab" * 16, "energy_microjoules": 5}
    with open_ledger(ledger.url).begin() as connection:
        connection.execute(insert(Request), rows)
    export(ledger, tmp_path / "out")
    last = read(tmp_path / "out", "fact_request").to_pylist()[-1]
    assert (last["ttft_seconds"], last["trace_id"], last["energy_microjoules"]) == (
        0.25,
        "ab" * 16,
        5,
    )
