"""Every measure, recomputed over the Parquet files, equals what the ledger itself says.

The right-hand sides are computed from the ledger's tables in plain Python, without the
export's code: a wrong join, unit or filter on the way shows here.
"""

import math
import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from exports.duck import open_export
from exports.job import run_export
from exports.powerbi.measures import BY_NAME, MEASURES
from exports.sample.ledger import write_sample_ledger
from exports.sample.trace import read_traces
from exports.sample.traffic import BEGIN
from tests.exports.test_sample import traces

__all__ = ["traces"]

Rows = list[dict[str, Any]]


class LedgerRows:
    """The ledger's tables as lists of dictionaries."""

    def __init__(self, path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.row_factory = sqlite3.Row
        self.requests = self._all(connection, "requests")
        self.acceptance = self._all(connection, "request_acceptance")
        self.capacity = self._all(connection, "capacity_intervals")
        self.audits = self._all(connection, "audit_results")
        self.prices = {row["price_key"]: row for row in self._all(connection, "prices")}
        connection.close()

    @staticmethod
    def _all(connection: sqlite3.Connection, table: str) -> Rows:
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]  # noqa: S608


@pytest.fixture(scope="module")
def sample(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LedgerRows, Any]:
    folder = tmp_path_factory.mktemp("measures")
    write_sample_ledger(folder / "ledger.db", read_traces(traces), 3)
    connection = sqlite3.connect(folder / "ledger.db")
    # What the sample's first days do not have: other variants, verdicts, gaps and losses.
    for statement in (
        "UPDATE requests SET variant_key = 2, drafter_key = 2 WHERE ledger_id % 3 = 0 "
        "AND drafter_key IS NOT NULL",
        "UPDATE requests SET energy_microjoules = NULL, energy_source = 'none' "
        "WHERE ledger_id % 5 = 0",
        "UPDATE requests SET estimated_cost_without_speculation_nano_usd = NULL "
        "WHERE ledger_id % 7 = 0",
        "UPDATE requests SET price_key = NULL WHERE ledger_id % 11 = 0",
        "UPDATE requests SET tenant_key = NULL WHERE ledger_id % 13 = 0",
        "UPDATE requests SET outcome = 'refused', finish_reason = NULL, model_key = NULL "
        "WHERE ledger_id % 17 = 0",
        "UPDATE request_acceptance SET num_accepted_of_length = NULL WHERE request_ledger_id < 40",
        "UPDATE audit_results SET verdict = 'divergence' WHERE audit_id % 4 = 0",
        "UPDATE audit_results SET verdict = 'numeric_tie' WHERE audit_id % 4 = 1",
        "UPDATE capacity_intervals SET lost_nanoseconds = idle_nanoseconds, idle_nanoseconds = 0,"
        " cost_lost_nano_usd = cost_idle_nano_usd, cost_idle_nano_usd = 0 "
        "WHERE capacity_id % 9 = 0",
        "UPDATE capacity_intervals SET price_key = NULL WHERE capacity_id % 10 = 0",
    ):
        connection.execute(statement)
    connection.commit()
    connection.close()
    run_export(f"sqlite:///{folder / 'ledger.db'}", folder / "out", now=BEGIN + timedelta(days=30))
    return LedgerRows(folder / "ledger.db"), open_export(folder / "out")


def total(rows: Rows, column: str) -> int:
    return sum(row[column] for row in rows if row[column] is not None)


def acceptance_length(rows: Rows) -> float:
    return 1 + total(rows, "num_accepted_tokens") / total(rows, "num_verify_steps")


def acceptance_length_by_draft_length(ledger: LedgerRows) -> float:
    """Only over rows of the export whose requests are all counted by length."""
    names = ("model_key", "drafter_key", "variant_key", "tenant_key")
    slices = {
        row["ledger_id"]: (row["finished_at"] // 3_600_000_000, *(row[name] for name in names))
        for row in ledger.requests
    }
    drafts = {(r["request_ledger_id"], r["position"]): r["num_drafted"] for r in ledger.acceptance}
    unknown, counted = set(), []
    for row in ledger.acceptance:
        owner, position = row["request_ledger_id"], row["position"]
        cell = (*slices[owner], position)
        if row["num_accepted_of_length"] is None:
            unknown.add(cell)
        num_drafts = row["num_drafted"] - drafts.get((owner, position + 1), 0)
        counted.append((cell, row["num_accepted_of_length"], num_drafts))
    known = [(accepted, rounds) for cell, accepted, rounds in counted if cell not in unknown]
    assert 0 < len(known) < len(counted)
    num_rounds: int = sum(rounds for _, rounds in known)
    num_accepted: int = sum(accepted for accepted, _ in known)
    return 1 + num_accepted / num_rounds


def versus_default(ledger: LedgerRows) -> float:
    base = acceptance_length([r for r in ledger.requests if r["variant_key"] == 1])
    return (acceptance_length(ledger.requests) - base) / base


def total_cost(ledger: LedgerRows) -> float:
    unused = total(ledger.capacity, "cost_idle_nano_usd")
    unused += total(ledger.capacity, "cost_lost_nano_usd")
    return (total(ledger.requests, "cost_nano_usd") + unused) / 1e9


def embodied_cost(ledger: LedgerRows) -> float:
    """As `tandem ledger stats` has it: of all time, whatever the machine did in it."""
    of_intervals = (
        Fraction(row["wall_nanoseconds"], 3_600_000_000_000)
        * ledger.prices[row["price_key"]]["embodied_nano_usd_per_hour"]
        for row in ledger.capacity
        if row["price_key"] is not None
    )
    return float(sum(of_intervals)) / 1e9


def active_cost(ledger: LedgerRows) -> float:
    return total(ledger.requests, "cost_nano_usd") / 1e9


def output_tokens(ledger: LedgerRows) -> int:
    return total(ledger.requests, "num_output_tokens")


def saving(ledger: LedgerRows) -> float:
    name = "estimated_cost_without_speculation_nano_usd"
    known = [row for row in ledger.requests if row[name] is not None]
    return (total(known, name) - total(known, "cost_nano_usd")) / 1e9


def energy_per_token(ledger: LedgerRows) -> float:
    measured = [row for row in ledger.requests if row["energy_microjoules"] is not None]
    joules = total(measured, "energy_microjoules") / 1e6
    return joules / total(measured, "num_output_tokens")


def audits(ledger: LedgerRows, verdict: str) -> int:
    return sum(row["verdict"] == verdict for row in ledger.audits)


def missing(ledger: LedgerRows, column: str) -> int:
    return sum(row[column] is None for row in ledger.requests)


def seconds_ago(ledger: LedgerRows) -> datetime:
    newest = max(row["recorded_at"] for row in ledger.requests)
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=newest)


EXPECTED: dict[str, Callable[[LedgerRows], Any]] = {
    "Requests": lambda x: len(x.requests),
    "Output Tokens": output_tokens,
    "Prompt Tokens": lambda x: total(x.requests, "num_prompt_tokens"),
    "Success Rate": lambda x: (
        sum(r["outcome"] == "completed" for r in x.requests) / len(x.requests)
    ),
    "Refused Requests": lambda x: sum(r["outcome"] == "refused" for r in x.requests),
    "Draft Tokens": lambda x: total(x.requests, "num_draft_tokens"),
    "Accepted Tokens": lambda x: total(x.requests, "num_accepted_tokens"),
    "Acceptance Rate": lambda x: (
        total(x.requests, "num_accepted_tokens") / total(x.requests, "num_draft_tokens")
    ),
    "Acceptance Length": lambda x: acceptance_length(x.requests),
    "Tokens per Step": lambda x: output_tokens(x) / total(x.requests, "num_steps"),
    "Acceptance Rate at Position": lambda x: (
        total(x.acceptance, "num_accepted") / total(x.acceptance, "num_drafted")
    ),
    "Verifications by Accepted Length": lambda x: total(x.requests, "num_verify_steps"),
    "Verifications by Draft Length": lambda x: total(x.requests, "num_verify_steps"),
    "Acceptance Length by Draft Length": acceptance_length_by_draft_length,
    "Acceptance Length vs Default": versus_default,
    "Active Cost USD": active_cost,
    "Idle Cost USD": lambda x: total(x.capacity, "cost_idle_nano_usd") / 1e9,
    "Lost Cost USD": lambda x: total(x.capacity, "cost_lost_nano_usd") / 1e9,
    "Total Cost USD": total_cost,
    "Embodied Cost USD": embodied_cost,
    "Embodied Cost Share": lambda x: embodied_cost(x) / total_cost(x),
    "Cost per Request USD": lambda x: active_cost(x) / len(x.requests),
    "Cost per 1K Tokens USD": lambda x: active_cost(x) / output_tokens(x) * 1e3,
    "Cost per 1M Tokens USD": lambda x: active_cost(x) / output_tokens(x) * 1e6,
    "Full Cost per 1M Tokens USD": lambda x: total_cost(x) / output_tokens(x) * 1e6,
    "Estimated Cost without Speculation USD": lambda x: (
        total(x.requests, "estimated_cost_without_speculation_nano_usd") / 1e9
    ),
    "Estimated Saving USD": saving,
    "Active Energy Wh": lambda x: total(x.requests, "energy_microjoules") / 3.6e9,
    "Idle Energy Wh": lambda x: total(x.capacity, "energy_idle_microjoules") / 3.6e9,
    "Energy per Token J": energy_per_token,
    "Energy Coverage": lambda x: 1 - missing(x, "energy_microjoules") / len(x.requests),
    "Utilisation": lambda x: (
        total(x.capacity, "busy_nanoseconds") / total(x.capacity, "wall_nanoseconds")
    ),
    "Busy Hours": lambda x: total(x.capacity, "busy_nanoseconds") / 3.6e12,
    "Idle Hours": lambda x: total(x.capacity, "idle_nanoseconds") / 3.6e12,
    "Lost Hours": lambda x: total(x.capacity, "lost_nanoseconds") / 3.6e12,
    "Peak Running": lambda x: max(r["max_num_running"] for r in x.capacity),
    "Peak Waiting": lambda x: max(r["max_num_waiting"] for r in x.capacity),
    "Audited Requests": lambda x: len(x.audits),
    "Checked Tokens": lambda x: total(x.audits, "num_checked_tokens"),
    "Exact Requests": lambda x: audits(x, "exact"),
    "Numeric Ties": lambda x: audits(x, "numeric_tie"),
    "Divergences": lambda x: audits(x, "divergence"),
    "Exact Share": lambda x: audits(x, "exact") / len(x.audits),
    "Rows Missing": lambda _: 0,
    "Cost Difference USD": lambda _: 0,
    "Requests without Price": lambda x: missing(x, "price_key"),
    "Requests without Energy": lambda x: missing(x, "energy_microjoules"),
    "Requests without Model": lambda x: missing(x, "model_key"),
    "Requests without Tenant": lambda x: missing(x, "tenant_key"),
    "Last Recorded": seconds_ago,
}
for part in ("prefill", "decode", "draft", "drafter", "rejected"):
    EXPECTED[f"{part.capitalize()} Cost USD"] = lambda x, part=part: (
        total(x.requests, f"cost_{part}_nano_usd") / 1e9
    )

LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "End-to-end": "e2e", "Queue": "queue"}


def value_of(connection: Any, name: str) -> Any:
    [[value]] = connection.execute(BY_NAME[name].sql).fetchall()
    return value


def test_every_measure_is_compared() -> None:
    latencies = {m.name for m in MEASURES if m.folder == "Latency"}
    assert {m.name for m in MEASURES} == set(EXPECTED) | latencies


@pytest.mark.parametrize("name", EXPECTED)
def test_a_measure_equals_the_ledger(name: str, sample: tuple[LedgerRows, Any]) -> None:
    ledger, connection = sample
    expected = EXPECTED[name](ledger)
    found = value_of(connection, name)
    if isinstance(expected, datetime):
        assert found == expected
    else:
        assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    trivial = name in {"Rows Missing", "Cost Difference USD", "Peak Waiting", "Drafter Cost USD"}
    assert trivial or expected, f"{name} is 0 here and would hide a defect"


def exact_percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


@pytest.mark.parametrize("name", [m.name for m in MEASURES if m.folder == "Latency"])
def test_a_latency_is_at_most_a_bucket_above_the_truth(
    name: str, sample: tuple[LedgerRows, Any]
) -> None:
    ledger, connection = sample
    label, kind, _ = name.split(" ")
    column = f"{LATENCIES[label]}_seconds"
    values = [row[column] for row in ledger.requests if row[column] is not None]
    found = value_of(connection, name)
    if kind == "Mean":
        assert found == pytest.approx(sum(values) / len(values), rel=1e-4)
    else:
        exact = exact_percentile(values, int(kind[1:]) / 100)
        assert exact <= found <= exact * 1.0701
