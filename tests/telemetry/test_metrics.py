"""Metrics: what a run emits is what names.py declares, and nothing else; series are bounded."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engine.stats import DrafterEvent, DrafterEventKind
from telemetry import names
from telemetry.cardinality import MAX_VALUES
from telemetry.energy import EnergyMeter
from telemetry.latency import summarise_latency
from telemetry.ledger.records import Outcome, Verdict
from telemetry.metrics import SAMPLED_ROWS, Metrics, _sampled
from telemetry.otel import OtelConfig, start_telemetry
from telemetry.recording import AuditFinding
from telemetry.tracing import start_call_span, start_request_trace
from tests.telemetry.otlp_receiver import attributes_of, otlp_receiver
from tests.telemetry.recording_rig import MODEL_INFO, Rig, recording_rig
from tests.telemetry.step_stats import request_stats, row, step

RECORDED_ELSEWHERE = {
    names.CALL_DURATION.name,  # by the call's span, through the installed provider
    names.CAPTURED_PROMPTS.name,  # by the capture, likewise
    names.PREEMPTIONS.name,
    names.BREAKER_CHANGES.name,
    names.DRAFTER_EVENTS.name,
    names.ENERGY.name,
    names.ENERGY_SOURCE_UP.name,  # only with a counter
}


def _exercise(rig: Rig) -> None:
    request = rig.begin()
    rig.run_step("r")
    rig.finish(request)
    rig.recorder.on_refused("x", status_code="INVALID_ARGUMENT", reason="invalid", error="no")
    rig.recorder.on_audit(AuditFinding("r", Verdict.EXACT, 1, 0, None, None, None, 0.1))
    rig.recorder._live.tick()


def test_a_run_emits_the_declared_metrics_with_their_units_and_attributes(tmp_path: Path) -> None:
    with recording_rig(tmp_path, capacity_interval_seconds=0.001) as rig:
        _exercise(rig)
        emitted = rig.metrics()
    declared = {spec.name: spec for spec in names.METRICS}
    assert set(emitted) - set(declared) == set()
    assert set(declared) - set(emitted) - RECORDED_ELSEWHERE == set()
    for name, metric in emitted.items():
        spec = declared[name]
        assert (metric.unit, metric.description) == (spec.unit, spec.description)
        for point in metric.data.data_points:
            assert set(point.attributes) <= set(spec.attributes), name
            if spec.buckets:
                assert tuple(point.explicit_bounds) == spec.buckets, name


def test_names_are_unique_and_described() -> None:
    assert len({spec.name for spec in names.METRICS}) == len(names.METRICS)
    for spec in names.METRICS:
        assert spec.name.startswith(("tandem.", "gen_ai.server.", "rpc.server."))
        assert spec.unit
        assert spec.description.endswith(".")
        assert tuple(sorted(spec.buckets)) == spec.buckets


def test_series_stay_bounded_however_many_names_callers_make_up() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader]).get_meter("t"))
    for number in range(1000):
        stats = request_stats(drafter=f"drafter{number}", request_id=f"r{number}")
        latency = summarise_latency(stats)
        metrics.on_finished(stats, latency, Outcome.COMPLETED, f"variant{number}", None)
        metrics.on_refused(f"reason{number}")
    data = reader.get_metrics_data()
    assert data is not None
    limits = {spec.name: spec.max_series for spec in names.METRICS}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        assert len(metric.data.data_points) <= min(limits[metric.name], 3 * (MAX_VALUES + 1))


def test_preemptions_are_counted_once_though_the_engine_reports_its_total() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader]).get_meter("t"))
    for total in (0, 2, 2, 5):
        metrics.on_step(replace(step(0, 1, row("a")), num_preemptions=total))
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name: m for m in data.resource_metrics[0].scope_metrics[0].metrics}
    assert found[names.PREEMPTIONS.name].data.data_points[0].value == 5


def _values(reader: InMemoryMetricReader, name: str, attribute: str) -> dict[str, float]:
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name: m for m in data.resource_metrics[0].scope_metrics[0].metrics}
    return {p.attributes[attribute]: p.value for p in found[name].data.data_points}


def test_what_the_controller_chose_is_counted_for_every_decoding_row() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader]).get_meter("t"))
    rows = [row(f"r{n}", draft=n % 3) for n in range(30)]
    metrics.on_step(step(0, 1, row("p", prefill=9, decode=0), *rows))
    metrics.on_step(step(0, 1, row("a"), index=1))
    chosen = _values(reader, names.DECISIONS.name, names.ATTR_DECISION)
    assert chosen == {"draft": 20, "plain": 11}


def test_requests_tell_whether_their_prefix_was_cached_unless_they_never_ran() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader]).get_meter("t"))
    for changes in (
        {"num_cached_prompt_tokens": 4},
        {"num_cached_prompt_tokens": 0},
        {"num_cached_prompt_tokens": 0},
        {"first_scheduled_at": None, "first_token_at": None, "num_cached_prompt_tokens": 0},
    ):
        stats = request_stats(**changes)
        metrics.on_finished(stats, summarise_latency(stats), Outcome.COMPLETED, "", None)
    results = _values(reader, names.PREFIX_LOOKUPS.name, names.ATTR_CACHE_RESULT)
    assert results == {"hit": 1, "miss": 2}


def test_the_breaker_shows_in_metrics_and_on_the_traces_of_open_requests(tmp_path: Path) -> None:
    with recording_rig(tmp_path) as rig:
        call = start_call_span("tandem.v1.GenerationService/Generate", {}, rig.telemetry.tracer)
        request = rig.begin(trace=start_request_trace(call, "tiny", tracer=rig.telemetry.tracer))
        assert rig.metrics()[names.BREAKER_OPEN.name].data.data_points[0].value == 0
        rig.recorder.on_breaker("open")
        assert rig.metrics()[names.BREAKER_OPEN.name].data.data_points[0].value == 1
        rig.recorder.on_breaker("half_open")
        assert rig.metrics()[names.BREAKER_OPEN.name].data.data_points[0].value == 0
        rig.run_step("r")
        rig.finish(request)
        rig.recorder.on_breaker("closed")  # when nothing is open
        rig.telemetry.tracer_provider.force_flush()
        (span,) = [s for s in rig.spans.get_finished_spans() if s.name == "text_completion tiny"]
    states = [e.attributes[names.ATTR_BREAKER_STATE] for e in span.events if e.name == "breaker"]
    assert states == ["open", "half_open"]


def test_a_drafter_that_falls_short_shows_on_its_requests_alone(tmp_path: Path) -> None:
    events = (
        DrafterEvent("head", DrafterEventKind.FELL_SHORT, "a"),
        DrafterEvent("head", DrafterEventKind.FAILED, reason="it raised"),
    )
    with recording_rig(tmp_path) as rig:
        tracer = rig.telemetry.tracer
        requests = []
        for name in ("a", "b"):
            call = start_call_span("tandem.v1.GenerationService/Generate", {}, tracer)
            requests.append(rig.begin(name, trace=start_request_trace(call, name, tracer=tracer)))
        stats = step(time.monotonic_ns(), 1, row("a"), row("b"))
        rig.recorder.on_step(replace(stats, drafter_events=events))
        for request in requests:
            rig.finish(request)
        counted = rig.metrics()[names.DRAFTER_EVENTS.name].data.data_points
        rig.telemetry.tracer_provider.force_flush()
        spans = rig.spans.get_finished_spans()
    kinds = {
        span.name[-1]: [
            event.attributes[names.ATTR_DRAFTER_EVENT]
            for event in span.events
            if event.name == names.EVENT_FALL_BACK
        ]
        for span in spans
        if span.name.startswith("text_completion")
    }
    assert kinds == {"a": ["fell_short", "failed"], "b": ["failed"]}
    assert {p.attributes[names.ATTR_DRAFTER_EVENT]: p.value for p in counted} == {
        "fell_short": 1,
        "failed": 1,
    }


def test_a_preemption_shows_on_its_request_alone_and_when_it_happened(tmp_path: Path) -> None:
    with recording_rig(tmp_path) as rig:
        tracer = rig.telemetry.tracer
        requests = []
        for name in ("a", "b"):
            call = start_call_span("tandem.v1.GenerationService/Generate", {}, tracer)
            requests.append(rig.begin(name, trace=start_request_trace(call, name, tracer=tracer)))
        for preempted in (("b",), (), ("b",)):
            stats = step(time.monotonic_ns(), 1, row("a"))
            rig.recorder.on_step(replace(stats, preempted_request_ids=preempted))
        for request in requests:
            rig.finish(request, num_preemptions=2 * (request.request_id == "b"))
        rig.telemetry.tracer_provider.force_flush()
        spans = rig.spans.get_finished_spans()
    found = {
        span.name[-1]: [event.name for event in span.events if event.name == names.EVENT_PREEMPTED]
        for span in spans
        if span.name.startswith("text_completion")
    }
    assert found == {"a": [], "b": [names.EVENT_PREEMPTED] * 2}


def test_large_batches_are_sampled_and_every_row_has_its_turn() -> None:
    seen: set[str] = set()
    for index in range(15):
        rows = [row(f"r{n}") for n in range(30)]
        sampled = _sampled(step(0, 1, row("p", prefill=3, decode=0), *rows, index=index))
        assert len(sampled) == SAMPLED_ROWS
        seen |= {item.request_id for item in sampled}
    assert seen == {f"r{n}" for n in range(30)}
    assert len(_sampled(step(0, 1, row("a")))) == 1


def test_an_energy_counter_that_stops_answering_shows(tmp_path: Path) -> None:
    class Counter:
        name = "rapl"
        value: int | None = 0

        def read_microjoules(self) -> int | None:
            return self.value

    counter = Counter()
    with recording_rig(tmp_path) as rig:
        meter = EnergyMeter(counter, 0)
        rig.recorder._live._accounting._energy = meter
        counter.value = 2_000_000
        rig.recorder._live.tick()
        found = rig.metrics()
        assert found["tandem.energy"].data.data_points[0].value == pytest.approx(2.0)
        assert found["tandem.energy.source_up"].data.data_points[0].value == 1
        counter.value = None
        meter.poll(10**18)
        rig.recorder._live.tick()
        assert rig.metrics()["tandem.energy.source_up"].data.data_points[0].value == 0


def test_metrics_and_spans_reach_a_collector_with_exemplars(tmp_path: Path) -> None:
    from telemetry.assembly import RecorderConfig, open_recorder
    from telemetry.prices import fixed_price
    from tests.telemetry.recording_rig import Rig as DrivenRig

    with otlp_receiver() as received:
        telemetry = start_telemetry(
            OtelConfig(otlp_endpoint=received.endpoint, service_version="7", instance_id="i")
        )
        config = RecorderConfig(f"sqlite:///{tmp_path}/l.db", tmp_path / "j", fixed_price("1"))
        recorder = open_recorder(config, MODEL_INFO, telemetry)
        rig = DrivenRig(recorder, telemetry, config.ledger_url, None, None)  # type: ignore[arg-type]
        call = start_call_span("tandem.v1.GenerationService/Generate", {}, telemetry.tracer)
        request = rig.begin(trace=start_request_trace(call, "tiny", tracer=telemetry.tracer))
        rig.run_step("r")
        rig.finish(request)
        call.end("OK")
        recorder.close()
        telemetry.close()
    assert {span.name for span in received.spans} == {
        "tandem.v1.GenerationService/Generate",
        "text_completion tiny",
        "queue",
        "prefill",
        "decode",
    }
    assert attributes_of(received.resources[0])["service.version"] == "7"
    (point,) = received.metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    generation = next(s for s in received.spans if s.name.startswith("text_completion"))
    assert [e.trace_id for e in point.exemplars] == [generation.trace_id]
    assert telemetry.num_export_failures() == {}


@pytest.mark.thorough  # the exporter tries again for seconds; a refusal is counted elsewhere
def test_a_collector_that_is_away_is_counted_and_nothing_else() -> None:
    telemetry = start_telemetry(OtelConfig(otlp_endpoint="http://127.0.0.1:1"))
    telemetry.tracer.start_span("x").end()
    telemetry.close()
    assert telemetry.num_export_failures()["spans"] >= 1


def test_everything_is_off_unless_configured() -> None:
    telemetry = start_telemetry(OtelConfig())
    assert not telemetry.is_tracing
    assert not telemetry.tracer.start_span("x").is_recording()
    telemetry.close()


def test_prometheus_serves_the_metrics() -> None:
    import urllib.request

    telemetry = start_telemetry(OtelConfig(prometheus_port=0))
    Metrics(telemetry.meter).on_refused("full")
    url = f"http://127.0.0.1:{telemetry.prometheus_port}/metrics"
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    telemetry.close()
    assert "tandem_requests_refused_total{" in text
    assert 'tandem_reason="full"' in text
