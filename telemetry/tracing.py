"""One trace per request: a server span for the call, child spans queue, prefill and decode.

Nothing here makes a span current: a generator that yields between attach and detach would run
its detach in another context. Contexts are passed by hand instead, so the spans can be started
in the event loop, fed from the engine thread and ended anywhere.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry import baggage, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from engine.stats import RequestStats, StepStats
from telemetry import names
from telemetry.instruments import create_instrument

_MAX_STEP_LINKS = 128
_call_duration = create_instrument(metrics.get_meter(names.SCOPE), names.CALL_DURATION)


def _wall_offset() -> int:
    """Nanoseconds to add to a monotonic instant; taken once per tree so that spans nest."""
    return time.time_ns() - time.monotonic_ns()


def _wall(instant: float, offset: int) -> int:
    return offset + int(instant * 1e9)


def extract_context(metadata: Mapping[str, str]) -> Context:
    """The caller's W3C trace context and baggage; keys of `metadata` are lower case.

    Malformed headers give an empty context, so that a new trace begins.
    """
    return propagate.extract(dict(metadata), context=Context())


def inject_context(context: Context | None = None) -> dict[str, str]:
    """Metadata that carries `context` (default: the current one) to a server."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=context)
    return carrier


def baggage_labels(context: Context, prefix: str = names.BAGGAGE_LABEL_PREFIX) -> dict[str, str]:
    """Labels that the caller sent as baggage entries `tandem.label.<key>`."""
    return {
        key.removeprefix(prefix): str(value)
        for key, value in baggage.get_all(context).items()
        if key.startswith(prefix)
    }


@dataclass(slots=True)
class CallSpan:
    """The SERVER span of one call. End it exactly once, with the status that the caller got."""

    span: Span
    context: Context
    method: str
    started_at: float
    ended: bool = False

    @property
    def trace_id(self) -> str | None:
        """32 hex digits; None when tracing is off."""
        found = self.span.get_span_context()
        return format(found.trace_id, "032x") if found.is_valid else None

    def end(self, status_code: str) -> None:
        """status_code is the gRPC status by name; everything but OK is an error.

        Later calls change nothing, so that a `finally` may end what a callback has ended.
        """
        if self.ended:
            return
        self.ended = True
        _call_duration.record(
            time.monotonic() - self.started_at,
            {names.ATTR_RPC_METHOD: self.method, names.ATTR_RPC_STATUS_CODE: status_code},
            context=self.context,
        )
        self.span.set_attribute(names.ATTR_RPC_STATUS_CODE, status_code)
        if status_code != "OK":
            self.span.set_attribute(names.ATTR_ERROR_TYPE, status_code)
            self.span.set_status(Status(StatusCode.ERROR, status_code))
        self.span.end()


def start_call_span(
    method: str, metadata: Mapping[str, str], tracer: Tracer | None = None
) -> CallSpan:
    """Begin the SERVER span of a call.

    `method` is the `package.Service/Method` of a registered handler, never what a caller made up:
    it becomes an attribute of a metric.
    """
    tracer = tracer or trace.get_tracer(names.SCOPE)
    parent = extract_context(metadata)
    span = tracer.start_span(
        method,
        context=parent,
        kind=SpanKind.SERVER,
        attributes={names.ATTR_RPC_SYSTEM: "grpc", names.ATTR_RPC_METHOD: method},
    )
    return CallSpan(span, trace.set_span_in_context(span, parent), method, time.monotonic())


@dataclass(slots=True)
class RequestTrace:
    """The spans of one request below its call.

    The generation span is written when the request ends, from the instants in its RequestStats,
    so the engine never touches a span. Events may be added while it runs, from any thread.
    """

    tracer: Tracer
    context: Context
    span: Span
    ended: bool = field(default=False)

    @property
    def trace_id(self) -> str | None:
        found = self.span.get_span_context()
        return format(found.trace_id, "032x") if found.is_valid else None

    def add_event(self, name: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """Note something that happened now: preemption, fall-back, breaker."""
        self.span.add_event(name, dict(attributes or {}))

    def finish(
        self,
        stats: RequestStats,
        status_code: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """Write the child spans and end the generation span."""
        if self.ended:
            return
        self.ended = True
        offset = _wall_offset()
        below = trace.set_span_in_context(self.span, self.context)
        for name, start, end in _phases(stats):
            child = self.tracer.start_span(name, context=below, start_time=_wall(start, offset))
            child.end(end_time=_wall(end, offset))
        if stats.first_token_at is not None:
            self.span.add_event(
                names.EVENT_FIRST_TOKEN, timestamp=_wall(stats.first_token_at, offset)
            )
        self._end(status_code, attributes, _wall(stats.finished_at, offset))

    def finish_without_stats(self, status_code: str) -> None:
        """End the generation span of a request that the engine lost."""
        if not self.ended:
            self.ended = True
            self._end(status_code, {}, time.time_ns())

    def _end(
        self, status_code: str, attributes: Mapping[str, AttributeValue], end_time: int
    ) -> None:
        self.span.set_attributes(dict(attributes))
        if status_code != "OK":
            self.span.set_attribute(names.ATTR_ERROR_TYPE, status_code)
            self.span.set_status(Status(StatusCode.ERROR, status_code))
        self.span.end(end_time=end_time)


def start_request_trace(
    call: CallSpan,
    model: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    tracer: Tracer | None = None,
) -> RequestTrace:
    """Begin the generation span of one completion below its call.

    `attributes` come from telemetry.names; the prompt and the output are never among them.
    """
    tracer = tracer or trace.get_tracer(names.SCOPE)
    span = tracer.start_span(
        f"{names.OPERATION_GENERATE} {model}",
        context=call.context,
        kind=SpanKind.INTERNAL,
        attributes={
            names.ATTR_GEN_AI_OPERATION: names.OPERATION_GENERATE,
            names.ATTR_GEN_AI_PROVIDER: names.PROVIDER,
            names.ATTR_GEN_AI_REQUEST_MODEL: model,
            **(attributes or {}),
        },
    )
    return RequestTrace(tracer, call.context, span)


def record_step_span(
    stats: StepStats, requests: Mapping[str, RequestTrace], tracer: Tracer | None = None
) -> None:
    """Write a span for one engine step, linked to the requests that took part in it.

    The caller samples: one in many steps.
    """
    tracer = tracer or trace.get_tracer(names.SCOPE)
    links = [
        Link(requests[row.request_id].span.get_span_context())
        for row in stats.rows[:_MAX_STEP_LINKS]
        if row.request_id in requests
    ]
    started = _wall(stats.started_at, _wall_offset())
    span = tracer.start_span(
        names.SPAN_ENGINE_STEP,
        context=Context(),
        links=links,
        start_time=started,
        attributes={
            names.ATTR_STEP_INDEX: stats.step_index,
            names.ATTR_STEP_ROWS: len(stats.rows),
            names.ATTR_STEP_PREFILL_POSITIONS: sum(r.num_prefill_positions for r in stats.rows),
            names.ATTR_STEP_DRAFT_POSITIONS: sum(r.num_draft_positions for r in stats.rows),
            names.ATTR_STEP_ACCEPTED_TOKENS: sum(r.num_accepted_tokens for r in stats.rows),
        },
    )
    span.end(end_time=started + stats.duration_nanoseconds)


def _phases(stats: RequestStats) -> list[tuple[str, float, float]]:
    """(span name, start, end) of the phases that the request reached."""
    scheduled, first_token, end = stats.first_scheduled_at, stats.first_token_at, stats.finished_at
    phases = [(names.SPAN_QUEUE, stats.arrived_at, end if scheduled is None else scheduled)]
    if scheduled is not None:
        phases.append((names.SPAN_PREFILL, scheduled, end if first_token is None else first_token))
    if first_token is not None:
        phases.append((names.SPAN_DECODE, first_token, end))
    return phases
