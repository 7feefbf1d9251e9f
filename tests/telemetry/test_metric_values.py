"""Values of the metrics that only some runs emit, their bounds, and what may name a series."""

import itertools
import re
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engine.stats import DrafterEvent, DrafterEventKind
from telemetry import names
from telemetry.cardinality import MAX_VALUES
from telemetry.latency import summarise_latency
from telemetry.ledger.records import Outcome, RequestCost, Verdict
from telemetry.ledger.writer_status import WriterStatus
from telemetry.metrics import Metrics
from telemetry.names import MetricSpec
from telemetry.otel import OtelConfig, start_telemetry
from tests.telemetry.step_stats import request_stats, row, step

Points = dict[tuple[Any, ...], Any]
LEDGER = WriterStatus(
    num_queued=4,
    num_written=70,
    num_requests_written=60,
    num_spilled=9,
    num_lost=2,
    num_set_aside=0,
    journal_bytes=512,
    lag_seconds=7.5,
    is_database_away=True,
)


def _points(reader: InMemoryMetricReader) -> dict[str, Points]:
    """Values by the values of the attributes, in the order that names.py declares them."""
    data = reader.get_metrics_data()
    assert data is not None
    declared = {spec.name: spec for spec in names.METRICS}
    return {
        metric.name: {
            tuple(p.attributes.get(a) for a in declared[metric.name].attributes): (
                p.sum if hasattr(p, "sum") else p.value
            )
            for p in metric.data.data_points
        }
        for scope in data.resource_metrics[0].scope_metrics
        for metric in scope.metrics
        if metric.name in declared
    }


def _after(use: Callable[[Metrics], object]) -> dict[str, Points]:
    reader = InMemoryMetricReader()
    use(Metrics(MeterProvider([reader]).get_meter("t")))
    return _points(reader)


def _ledger(metrics: Metrics) -> None:
    metrics.on_ledger(replace(LEDGER, num_written=20, num_requests_written=15, num_spilled=1))
    metrics.on_ledger(LEDGER)  # totals: what was counted before is not counted again


def _steps(metrics: Metrics) -> None:
    events = (
        DrafterEvent("head", DrafterEventKind.FAILED, reason="it raised"),
        DrafterEvent("head", DrafterEventKind.FAILED),
        DrafterEvent("head", DrafterEventKind.RECOVERED),
    )
    for preemptions in (1, 3):
        stats = replace(
            step(0, 2_000_000_000, row("a", draft=3)),
            num_preemptions=preemptions,
            num_audits_dropped=2 * preemptions,
        )
        metrics.on_step(replace(stats, drafter_events=events if preemptions == 3 else ()))


def _breaker(metrics: Metrics) -> None:
    for state in ("open", "half_open", "open"):
        metrics.on_breaker(state)


def _energy(metrics: Metrics) -> None:
    for measured, answers in ((1_500_000, True), (2_000_000, True), (None, False)):
        metrics.on_energy("rapl", measured, answers)


def _requests(metrics: Metrics) -> None:
    """One of variant "a" that "head" drafted for, two of "b" with prompt lookup, one plain."""
    for drafter, variant, outcome, changes in (
        ("head", "a", Outcome.COMPLETED, {"num_recomputed_tokens": 2}),
        ("prompt_lookup", "b", Outcome.COMPLETED, {}),
        ("prompt_lookup", "b", Outcome.CANCELLED, {"num_cached_prompt_tokens": 0}),
        ("", "", Outcome.COMPLETED, {"num_verify_steps": 0, "num_emitted_accepted_tokens": 1}),
    ):
        stats = request_stats(drafter=drafter, **changes)
        metrics.on_finished(stats, summarise_latency(stats), outcome, variant, None)
    for reason in ("resource_exhausted", "invalid_argument", "resource_exhausted"):
        metrics.on_refused(reason)


def _by_drafter(of_one: int) -> Points:
    return {("head", "a"): of_one, ("prompt_lookup", "b"): 2 * of_one}


def _by_position(first: int, second: int) -> Points:
    counts = ((0, first), (1, second))
    return {
        **{(at, "head", "a"): count for at, count in counts},
        **{(at, "prompt_lookup", "b"): 2 * count for at, count in counts},
    }


COST = RequestCost(10_000_000, 1_000_000, 2_000_000, 3_000_000, 1_000_000, 4_000_000)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (
            _steps,
            {
                names.PREEMPTIONS: {(): 3},
                names.AUDITS_DROPPED: {(): 6},
                names.DRAFTER_EVENTS: {("head", "failed"): 2, ("head", "recovered"): 1},
                names.STEP_DURATION: {(): 4.0},
                names.STEP_PHASE_TIME: {("verify",): 4.0},
                names.DRAFT_LENGTH: {(): 6},
                names.TOKENS_PER_STEP: {(): 2},
                names.DECISIONS: {("draft",): 2},
            },
        ),
        (
            _requests,
            {
                names.DRAFTS: _by_drafter(5),
                names.DRAFTED: _by_drafter(9),
                names.ACCEPTED: _by_drafter(5),
                names.EMITTED_ACCEPTED: _by_drafter(5),
                names.DRAFTED_BY_POSITION: _by_position(5, 4),
                names.ACCEPTED_BY_POSITION: _by_position(3, 2),
                names.REQUESTS: {
                    ("completed", "a"): 1,
                    ("completed", "b"): 1,
                    ("cancelled", "b"): 1,
                    ("completed", ""): 1,
                },
                names.REJECTS: {("resource_exhausted",): 2, ("invalid_argument",): 1},
                names.TOKENS: {
                    **{("input", variant): 7 * n for variant, n in (("a", 1), ("b", 2), ("", 1))},
                    **{("output", variant): 11 * n for variant, n in (("a", 1), ("b", 2), ("", 1))},
                    **{("cached_input", variant): 3 for variant in ("a", "b", "")},
                    ("recomputed", "a"): 2,
                },
                names.PREFIX_LOOKUPS: {("hit",): 3, ("miss",): 1},
                names.QUEUE_TIME: {("a",): 0.1, ("b",): 0.2, ("",): 0.1},
                names.TTFT: {("a",): 0.5, ("b",): 1.0, ("",): 0.5},
                names.TPOT: {("a",): 0.05, ("b",): 0.1, ("",): 0.05},
                names.REQUEST_DURATION: {
                    ("a", "completed"): 1.0,
                    ("b", "completed"): 1.0,
                    ("b", "cancelled"): 1.0,
                    ("", "completed"): 1.0,
                },
            },
        ),
        (
            _breaker,
            {
                names.BREAKER_CHANGES: {("open",): 2, ("half_open",): 1},
                names.BREAKER_OPEN: {(): 1},
            },
        ),
        (_energy, {names.ENERGY: {("rapl",): 3.5}, names.ENERGY_SOURCE_UP: {("rapl",): 0}}),
        (
            lambda metrics: metrics.on_load(step(0, 1, row("a"), row("b"))),
            {
                names.BLOCKS: {("free",): 6, ("used",): 4},
                names.ROWS: {(): 2},
                names.QUEUE_DEPTH: {(): 1},
            },
        ),
        (
            lambda metrics: (metrics.on_cost(COST), metrics.on_interval(5_000_000, 30, 10**10)),
            {
                names.COST: {
                    ("prefill",): 0.001,
                    ("decode",): 0.002,
                    ("draft",): 0.003,
                    ("drafter",): 0.004,
                    ("idle",): 0.005,
                },
                names.GOODPUT: {(): 3.0},
            },
        ),
        (
            _ledger,
            {
                names.LEDGER_RECORDS: {("request",): 60, ("other",): 10},
                names.LEDGER_QUEUE: {(): 4},
                names.LEDGER_LAG: {(): 7.5},
                names.LEDGER_SPILLED: {(): 9},
                names.LEDGER_LOST: {(): 2},
                names.LEDGER_JOURNAL_BYTES: {(): 512},
            },
        ),
    ],
)
def test_what_happened_is_the_value(
    use: Callable[[Metrics], object], expected: dict[MetricSpec, Points]
) -> None:
    found = _after(use)
    for spec, points in expected.items():
        assert found[spec.name] == pytest.approx(points), spec.name


def test_batches_that_a_collector_does_not_take_are_a_series() -> None:
    collector = grpc.server(futures.ThreadPoolExecutor(1))  # knows no method: it refuses all
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    reader = InMemoryMetricReader()
    config = OtelConfig(otlp_endpoint=f"http://127.0.0.1:{port}")
    telemetry = start_telemetry(config, metric_readers=[reader])
    assert telemetry.tracer_provider is not None
    assert telemetry.meter_provider is not None
    telemetry.meter.create_counter("c").add(1)
    for _ in range(2):
        telemetry.tracer.start_span("x").end()
        telemetry.tracer_provider.force_flush()
    telemetry.meter_provider.force_flush()
    found = _points(reader)[names.EXPORT_FAILURES.name]
    telemetry.close()
    collector.stop(None)
    assert found == {("spans",): 2, ("metrics",): 1}


def test_what_alerts_look_at_begins_at_zero_so_that_the_first_one_is_an_increase() -> None:
    found = _after(lambda metrics: metrics.on_ledger(replace(LEDGER, num_lost=0)))
    assert found[names.AUDITS.name] == {(str(verdict),): 0 for verdict in Verdict}
    assert found[names.LEDGER_LOST.name] == {(): 0}
    reader = InMemoryMetricReader()
    telemetry = start_telemetry(OtelConfig(), metric_readers=[reader])
    assert _points(reader)[names.EXPORT_FAILURES.name] == {("spans",): 0, ("metrics",): 0}
    telemetry.close()


def test_histograms_see_what_speculation_does_below_ten_milliseconds() -> None:
    """The advised GenAI bounds, and those that they lack for tokens of 2 to 5 milliseconds."""
    fast = (0.001, 0.002, 0.003, 0.005, 0.0075)
    advised = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
    for spec in (names.TPOT, names.STEP_LATENCY, names.STEP_DURATION):
        assert spec.buckets == fast + advised, spec.name
    advised = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5)
    for spec in (names.TTFT, names.QUEUE_TIME):
        assert spec.buckets[: len(advised) + 3] == (*advised, 5.0, 7.5, 10.0), spec.name


MADE_UP = 20  # values of each attribute, every one with every other


def _make_up_names(metrics: Metrics) -> None:
    positions = (1,) * MADE_UP
    for one, other in itertools.product(range(MADE_UP), range(MADE_UP)):
        stats = request_stats(
            drafter=f"drafter{one}", drafted_per_position=positions, accepted_per_position=positions
        )
        outcome = list(Outcome)[one % len(Outcome)]
        metrics.on_finished(stats, summarise_latency(stats), outcome, f"variant{other}", None)
    for number in range(300):
        event = DrafterEvent(f"drafter{number}", DrafterEventKind.FAILED)
        metrics.on_step(replace(step(0, 1, row("a")), drafter_events=(event,)))
        metrics.on_audit(f"verdict{number}")
        metrics.on_refused(f"reason{number}")
        metrics.on_breaker(f"state{number}")
        metrics.on_energy(f"source{number}", 1, is_answering=True)
    for verdict in Verdict:
        metrics.on_audit(str(verdict))


def test_no_series_is_named_by_what_others_make_up() -> None:
    found = _after(_make_up_names)
    for spec in names.METRICS:
        assert len(found.get(spec.name, ())) <= spec.max_series, spec.name
    for spec in (names.DRAFTS, names.DRAFTED_BY_POSITION, names.ENERGY, names.BREAKER_CHANGES):
        assert len(found[spec.name]) == spec.max_series, "which is reached"
        assert ("other",) * len(spec.attributes) in found[spec.name]
    for spec in (names.DRAFTER_EVENTS, names.ACCEPTANCE_DROP, names.AUDITS, names.REJECTS):
        assert len(found[spec.name]) == MAX_VALUES + 1, spec.name
    assert len(Verdict) < MAX_VALUES


def test_what_is_beyond_the_bound_is_counted_as_other() -> None:
    found = _after(_make_up_names)
    assert sum(found[names.DRAFTS.name].values()) == 5 * MADE_UP**2
    assert found[names.ENERGY.name][("other",)] == pytest.approx(237e-6)
    for spec in names.METRICS:
        for attribute in spec.attributes:
            assert not {"tenant", "label", "trace", "id"} & set(re.split(r"[._]", attribute))
