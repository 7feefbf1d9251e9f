"""The ledger that exports are measured with is one that a server could have written."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from exports.job import ExportOptions, run_export
from exports.manifest import read_manifest
from exports.storage import Target
from telemetry.ledger.queries import check_ledger
from telemetry.ledger.session import open_ledger
from tests.benchmarks.exports_ledger import MINUTES_PER_DAY, fill

NUM_ROWS = 1_000
NUM_DAYS = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db"
    fill(url, NUM_ROWS, NUM_DAYS)
    return url


@pytest.fixture(scope="module")
def requests(url: str, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    out = tmp_path_factory.mktemp("out")
    options = ExportOptions(lag=timedelta(0))
    summary = run_export(url, out, options, now=datetime(2026, 5, 1, tzinfo=UTC))
    assert len(summary.rewritten_dates) == NUM_DAYS
    assert summary.tables["fact_capacity"] == NUM_DAYS * MINUTES_PER_DAY
    files = read_manifest(Target(out)).tables["fact_request"]
    return pa.concat_tables(parquet.read_table(out / f.path, partitioning=None) for f in files)


def test_its_rows_keep_the_rules_of_the_ledger(url: str) -> None:
    engine = open_ledger(url, read_only=True)
    findings = check_ledger(engine)
    engine.dispose()
    assert all(finding.is_good for finding in findings), findings


def test_its_tokens_and_costs_add_up(requests: pa.Table) -> None:
    rows = requests.to_pylist()
    assert len(rows) == NUM_ROWS
    for row in rows:
        emitted = row["num_plain_steps"] + row["num_verify_steps"] + row["num_accepted_tokens"]
        assert row["num_output_tokens"] == emitted
        assert row["num_plain_steps"] >= 0
        assert row["num_accepted_tokens"] <= row["num_draft_tokens"]
        parts = (row[f"cost_{part}_nano_usd"] for part in ("prefill", "decode", "draft", "drafter"))
        assert row["cost_nano_usd"] == sum(parts)


def test_its_rows_vary(requests: pa.Table) -> None:
    for name in ("request_id", "trace_id", "e2e_seconds", "busy_nanoseconds", "cost_nano_usd"):
        assert pc.count_distinct(requests[name]).as_py() > 0.9 * NUM_ROWS, name
    for name in ("num_prompt_tokens", "num_output_tokens", "num_draft_tokens"):
        assert pc.count_distinct(requests[name]).as_py() > 100, name
    by_tenant = sorted(pc.value_counts(requests["tenant_key"]).field("counts").to_pylist())
    assert len(by_tenant) > 5
    assert by_tenant[-1] > 10 * by_tenant[0]
