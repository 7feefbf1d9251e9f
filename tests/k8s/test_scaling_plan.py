"""k8s/SCALING.md quotes what was measured and what the simulated fleet makes of it, and no more."""

import re

import pytest

from exports.sample.trace import Trace, read_traces
from telemetry.names import METRICS, Instrument
from tests.benchmarks.fleet import (
    DATA,
    FACTORS,
    FIGURES,
    KV_BYTES_PER_TOKEN,
    RECORDED_COST,
    SCHEDULE,
    fleet_rate,
    reaction,
    replay,
    table_row,
)
from tests.benchmarks.fleet_limits import demands, first_to_give
from tests.benchmarks.fleet_model import Shape
from tests.k8s.manifests import K8S

PLAN = re.sub(r"\s+", " ", (K8S / "SCALING.md").read_text(encoding="utf-8"))
SCALE = K8S / "base" / "scale.yaml"
SHAPE = Shape(RECORDED_COST, 16, 256, 2**30 // KV_BYTES_PER_TOKEN, 0.0, 45.0)
PRICE, SECONDS = 0.20, 1200.0


def quotes() -> list[str]:
    """Every sentence of the plan that rests on a measured figure."""
    ledger, exports, memory = FIGURES["ledger"], FIGURES["exports"], FIGURES["memory"]
    steps = [f"{1000 * RECORDED_COST.forward_seconds(n):.0f}" for n in (1, 16, 64, 128)]
    batch = 16 / RECORDED_COST.forward_seconds(16)
    kv_tokens = 2**30 / KV_BYTES_PER_TOKEN
    messages = f"{FIGURES['service']['messages_per_second']:,}"
    sqlite, postgresql = (ledger[f"{name}_rows_per_second"] for name in ("sqlite", "postgresql"))
    most = demands(8.00627 * FACTORS[-1], ledger, exports, SCHEDULE)["exports"]
    limits = first_to_give(1.0, ledger, exports, SCHEDULE)
    return [
        f"| {' / '.join(steps)} ms |",
        f"16 rows keep a token under {1000 * RECORDED_COST.forward_seconds(16) + 0.5:.0f} ms",
        f"without speculation | {batch:.0f} |",
        f"| {KV_BYTES_PER_TOKEN / 1000:.0f} KB per token: 1 GiB "
        f"holds {round(kv_tokens, -2):,.0f} |",
        f"With 1 GiB and 16 rows that is {round(kv_tokens / 16, -2):,.0f} tokens each",
        f"one process | {messages} | `make bench-service`",
        f"of the {messages} that one process can",
        f"SQLite / PostgreSQL | {sqlite:,} / {postgresql:,} | `make bench-ledger`",
        f"| some {round(postgresql / 2, -3):,.0f} requests per second, half of what PostgreSQL",
        f"| {exports['rows_per_cpu_second']:,} | `make bench-exports` |",
        f"by two processes | {exports['rows_per_second']:,} |",
        f"per request | {exports['bytes_per_row']} bytes |",
        f"10 million requests | {exports['peak_memory_mb']} MB |",
        f"| {memory['serve_start']:,} / {memory['pull']:,} / {memory['train']:,} MB |",
        f"{most['cores']:.1f} cores at {FACTORS[-1]:,}x",
        *(
            f"| {rate:,.0f} requests per second, {rate * 86_400 / 1e6:.0f} million a day | {what}"
            for rate, what in (
                (
                    limits["period of the export"],
                    "a run of the export takes longer",
                ),
                (limits["deadline of the export"], "the export's last run of a day takes longer"),
            )
        ),
    ]


def _rows() -> list[list[str]]:
    """Cells of the fleet's table."""
    text = (K8S / "SCALING.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| [\d,]+x \|.*$", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found]


def test_the_plan_quotes_the_recorded_figures() -> None:
    assert [quote for quote in quotes() if quote not in PLAN] == []


def test_a_replica_exposes_no_more_series_than_the_plan_says() -> None:
    (said,) = re.findall(r"at most ([\d,]+) series", PLAN)
    # A histogram has a series per bucket, one for what is beyond, a sum and a count.
    most = sum(
        (spec.max_series if spec.attributes else 1)
        * (len(spec.buckets) + 3 if spec.instrument is Instrument.HISTOGRAM else 1)
        for spec in METRICS
    )
    assert most <= int(said.replace(",", "")) < 2 * most


def test_the_demands_of_the_fleets_follow_from_the_recorded_figures() -> None:
    rows = _rows()
    assert [int(row[0][:-1].replace(",", "")) for row in rows] == list(FACTORS)
    for row in rows:
        rate = 8.00627 * int(row[0][:-1].replace(",", ""))  # of the trace's first twenty minutes
        assert float(row[1].replace(",", "")) == round(rate)
        found = demands(rate, FIGURES["ledger"], FIGURES["exports"], SCHEDULE)
        assert float(row[7].rstrip(" %")) == pytest.approx(
            100 * found["ledger"]["share_of_postgresql"], abs=0.06
        )
        seconds, gigabytes = re.findall(r"([\d,]+) s, ([\d.]+) GB", row[8])[0]
        assert float(seconds.replace(",", "")) == pytest.approx(
            found["exports"]["last_run_seconds"], abs=1.5
        )
        assert float(gigabytes) == pytest.approx(found["exports"]["gigabytes_per_day"], abs=0.06)


@pytest.fixture(scope="module")
def azure() -> list[Trace]:
    if not DATA.is_dir():
        pytest.skip("the Azure trace is not there: TANDEM_DATA names its folder")
    return list(read_traces(DATA))


@pytest.mark.thorough
@pytest.mark.parametrize("factor", FACTORS)
def test_the_table_is_what_the_simulated_fleets_did(azure: list[Trace], factor: int) -> None:
    entry = replay(azure, factor, SHAPE, SCALE, PRICE, SECONDS)
    ledger, exports = FIGURES["ledger"], FIGURES["exports"]
    asked = demands(entry["requests_per_second"], ledger, exports, SCHEDULE)
    assert table_row(entry | asked) in (K8S / "SCALING.md").read_text(encoding="utf-8")
    assert entry["one_fleet"]["num_refused"] == 0


def test_what_gives_first_stands_in_the_order_of_its_traffic(azure: list[Trace]) -> None:
    ledger, exports = FIGURES["ledger"], FIGURES["exports"]
    limits = first_to_give(fleet_rate(azure, SHAPE, SECONDS), ledger, exports, SCHEDULE)
    told = {
        "replicas of a fleet": f"here {limits['replicas of a fleet']:.0f} requests per second |",
        "period of the export": "| a run of the export takes longer",
        "deadline of the export": "| the export's last run of a day takes longer",
        "half of PostgreSQL": "half of what PostgreSQL took |",
    }
    places = [PLAN.index(told[what]) for what in limits]
    assert places == sorted(places)


@pytest.mark.thorough
def test_the_surge_is_as_told(azure: list[Trace]) -> None:
    found = reaction(azure, SHAPE, SCALE, SECONDS)
    for quote in (
        f"of {round(found['waiting_peak'], -1)} requests",
        f"waited for {found['queue_seconds']['p99']:.0f} seconds",
        f"(here {found['replicas_peak']},",
    ):
        assert quote in PLAN
