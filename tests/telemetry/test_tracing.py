"""Traces: one tree per request, the caller's context continued, the right status at the end."""

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context

from telemetry import names
from telemetry.tracing import (
    baggage_labels,
    extract_context,
    inject_context,
    record_step_span,
    start_call_span,
    start_request_trace,
)
from tests.telemetry.recording_rig import recording_rig
from tests.telemetry.step_stats import request_stats, row, step

METHOD = "tandem.v1.GenerationService/Generate"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("t")


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_the_callers_trace_and_labels_are_continued(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    client = tracer.start_span("client")
    metadata = inject_context(set_span_in_context(client))
    metadata["baggage"] = "tandem.label.team=search,other=1"
    call = start_call_span(METHOD, metadata, tracer)
    call.end("OK")
    span = _by_name(exporter)[METHOD]
    assert span.parent is not None
    assert span.parent.span_id == client.get_span_context().span_id
    assert call.trace_id == format(client.get_span_context().trace_id, "032x")
    assert span.kind is SpanKind.SERVER
    assert baggage_labels(extract_context(metadata)) == {"team": "search"}


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-0-0-00", "00-" + "0" * 32])
def test_a_malformed_context_begins_a_new_trace(tracer: Tracer, traceparent: str) -> None:
    call = start_call_span(METHOD, {"traceparent": traceparent, "baggage": ";;=,"}, tracer)
    assert call.trace_id is not None
    assert call.span.parent is None  # type: ignore[attr-defined]
    call.end("OK")


@pytest.mark.parametrize("status_code", ["CANCELLED", "DEADLINE_EXCEEDED", "ABORTED"])
def test_everything_but_ok_is_an_error(
    tracer: Tracer, exporter: InMemorySpanExporter, status_code: str
) -> None:
    call = start_call_span(METHOD, {}, tracer)
    call.end(status_code)
    call.end("OK")  # a finally after the callback changes nothing
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes[names.ATTR_RPC_STATUS_CODE] == status_code
    assert span.attributes[names.ATTR_ERROR_TYPE] == status_code


def test_a_request_has_its_phases_as_children_within_it(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    import time

    call = start_call_span(METHOD, {}, tracer)
    trace = start_request_trace(call, "tiny", tracer=tracer)
    now = time.monotonic()
    trace.finish(request_stats(at=now), "OK", {"a": 1})
    trace.finish(request_stats(at=now), "INTERNAL", {})  # only the first counts
    call.end("OK")
    spans = _by_name(exporter)
    generation = spans["text_completion tiny"]
    assert generation.parent is not None
    assert generation.parent.span_id == call.span.get_span_context().span_id
    assert generation.status.status_code is StatusCode.UNSET
    assert [event.name for event in generation.events] == ["first_token"]
    previous_end = None
    for name in ("queue", "prefill", "decode"):
        child = spans[name]
        assert child.parent is not None
        assert child.parent.span_id == generation.context.span_id
        assert previous_end in (None, child.start_time)
        previous_end = child.end_time
    assert spans["decode"].end_time == generation.end_time


def test_a_request_that_never_ran_has_only_its_wait(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    trace = start_request_trace(start_call_span(METHOD, {}, tracer), "tiny", tracer=tracer)
    stats = request_stats(first_scheduled_at=None, first_token_at=None, last_token_at=None)
    trace.finish(stats, "CANCELLED", {})
    assert set(_by_name(exporter)) == {"queue", "text_completion tiny"}


def test_no_span_is_ever_current(tracer: Tracer) -> None:
    call = start_call_span(METHOD, {}, tracer)
    trace = start_request_trace(call, "tiny", tracer=tracer)
    assert not get_current_span().get_span_context().is_valid
    trace.finish_without_stats("ABORTED")
    call.end("ABORTED")
    assert not get_current_span().get_span_context().is_valid


def test_a_step_is_one_span_that_links_to_its_requests(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    calls = [start_call_span(METHOD, {}, tracer) for _ in range(3)]
    traces = {
        f"r{n}": start_request_trace(call, "tiny", tracer=tracer) for n, call in enumerate(calls)
    }
    record_step_span(step(0, 5, row("r0", draft=2), row("r2"), row("gone")), traces, tracer)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    linked = [link.context.span_id for link in span.links]
    assert linked == [traces[n].span.get_span_context().span_id for n in ("r0", "r2")]
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == 5


def test_steps_are_sampled_and_spans_hold_no_content(tmp_path: Path) -> None:
    with recording_rig(tmp_path, step_span_every=5) as rig:
        call = start_call_span(METHOD, {}, rig.telemetry.tracer)
        trace = start_request_trace(call, "tiny", tracer=rig.telemetry.tracer)
        request = rig.begin(trace=trace)
        for index in range(20):
            rig.run_step("r", index=index)
        assert rig.finish(request).durable.result(10)
        call.end("OK")
        (found,) = rig.requests()
        assert found.trace_id == call.trace_id
    spans = rig.spans.get_finished_spans()
    assert sum(span.name == names.SPAN_ENGINE_STEP for span in spans) == 4
    declared = {value for name, value in vars(names).items() if name.startswith("ATTR_")}
    for span in spans:
        assert set(span.attributes or {}) <= declared, span.name
