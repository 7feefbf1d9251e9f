"""The sample is a ledger like any other: its money adds up and its counts agree."""

import csv
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from exports.errors import SourceError
from exports.job import run_export
from exports.sample import traffic
from exports.sample.costs import NANO_USD_PER_HOUR
from exports.sample.ledger import REFUSED, write_sample_ledger
from exports.sample.trace import FILES, read_traces
from exports.sample.traffic import BEGIN, draw_traffic, in_hours
from tests.exports.test_job import published, read

NUM_DAYS = 3
NOW = BEGIN + timedelta(days=30)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few requests in the form of the Azure trace."""
    folder = tmp_path_factory.mktemp("traces")
    generator = np.random.default_rng(1)
    begin = datetime(2023, 11, 16, 18, 15, tzinfo=UTC)
    for name in FILES.values():
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
            for index in range(50):
                instant = begin + timedelta(seconds=70 * index)
                prompt, output = generator.integers(1, 2000), generator.integers(1, 300)
                writer.writerow([f"{instant:%Y-%m-%d %H:%M:%S.%f}0", prompt, output])
    return folder


@pytest.fixture(scope="module")
def exported(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    write_sample_ledger(folder / "ledger.db", read_traces(traces), NUM_DAYS)
    run_export(f"sqlite:///{folder / 'ledger.db'}", folder / "out", now=NOW)
    return folder / "out"


def test_requests_idle_and_lost_time_cost_the_price_of_the_wall_time(exported: Path) -> None:
    capacity, requests = read(exported, "fact_capacity"), read(exported, "fact_request")
    hours = pc.sum(capacity["wall_nanoseconds"]).as_py() // 3_600_000_000_000
    unused = pc.sum(capacity["cost_idle_nano_usd"]).as_py()
    unused += pc.sum(capacity["cost_lost_nano_usd"]).as_py()
    assert hours >= NUM_DAYS * 24
    assert pc.sum(requests["cost_nano_usd"]).as_py() + unused == hours * NANO_USD_PER_HOUR


def test_token_counts_keep_the_identity_of_the_engine(exported: Path) -> None:
    rows = read(exported, "fact_request").to_pylist()
    assert len(rows) > 500
    for row in rows:
        emitted = row["num_plain_steps"] + row["num_verify_steps"]
        emitted += row["num_emitted_accepted_tokens"] - row["num_cut_tokens"]
        assert emitted == row["num_output_tokens"]
        parts = ("prefill", "decode", "draft", "drafter")
        assert row["cost_nano_usd"] == sum(row[f"cost_{part}_nano_usd"] for part in parts)
        assert row["cost_rejected_nano_usd"] <= row["cost_draft_nano_usd"]


def test_the_same_trace_makes_the_same_tables(traces: Path, exported: Path, tmp_path: Path) -> None:
    write_sample_ledger(tmp_path / "ledger.db", read_traces(traces), NUM_DAYS)
    run_export(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path / "out", now=NOW)
    assert published(tmp_path / "out") == published(exported)


def test_ninety_days_have_models_tenants_variants_and_incidents(traces: Path) -> None:
    drawn = draw_traffic(read_traces(traces))
    arrival = drawn.arrival_microseconds
    day = arrival // 86_400_000_000
    assert set(day) == set(range(90))
    assert set(drawn.tenant) == set(range(len(traffic.TENANT_SHARES)))
    assert set(drawn.is_code) == {False, True}  # a model each
    assert not drawn.is_candidate[day < traffic.CANDIDATE_FROM_DAY].any()
    of_variants = drawn.is_candidate[day >= traffic.CANDIDATE_FROM_DAY]
    assert 0.4 < of_variants.mean() < 0.6
    assert not in_hours(arrival, traffic.OUTAGE).any()
    overload = in_hours(arrival, traffic.OVERLOAD)
    assert (drawn.outcome[overload] == REFUSED).mean() > 0.2
    assert not (drawn.outcome[~overload] == REFUSED).any()
    regression = in_hours(arrival, traffic.REGRESSION)

    def acceptance(rows: np.ndarray) -> float:
        return float(drawn.accepted[rows].sum() / drawn.drafted[rows].sum())

    good, bad = (drawn.is_candidate & (regression == is_bad) for is_bad in (False, True))
    assert acceptance(good) > acceptance(~drawn.is_candidate) > 2 * acceptance(bad)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"azure_llm_trace_conv\.csv is missing"):
        read_traces(tmp_path)
