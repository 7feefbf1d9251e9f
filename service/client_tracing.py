"""Client spans for calls over grpc.aio, with the status that the caller got.

    channel = aio.insecure_channel(address, interceptors=tracing_interceptors())

A span ends when its call does, however that is: at its end, by cancel, by deadline or by a
status. The W3C context of the span, and the caller's baggage, travel in the metadata.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc import aio
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from telemetry import names
from telemetry.tracing import inject_context

_ending: set["asyncio.Task[None]"] = set()  # keeps what ends spans alive


def tracing_interceptors() -> list[aio.ClientInterceptor]:
    """For the two kinds of calls of the contract; spans go to the process's tracer provider."""
    return [_UnaryUnary(), _UnaryStream()]


class _UnaryUnary(aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await _traced(continuation, client_call_details, request)


class _UnaryStream(aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self,
        continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await _traced(continuation, client_call_details, request)


async def _traced(
    continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
    details: aio.ClientCallDetails,
    request: Any,
) -> Any:
    method = _text(details.method).lstrip("/")
    span = trace.get_tracer(names.SCOPE).start_span(
        method,
        kind=SpanKind.CLIENT,
        attributes={names.ATTR_RPC_SYSTEM: "grpc", names.ATTR_RPC_METHOD: method},
    )
    carried = inject_context(trace.set_span_in_context(span))
    kept = [(key, value) for key, value in details.metadata or () if key not in carried]
    try:
        call = await continuation(
            aio.ClientCallDetails(
                details.method,
                details.timeout,
                aio.Metadata(*kept, *carried.items()),
                details.credentials,
                details.wait_for_ready,
            ),
            request,
        )
    except BaseException:
        _end(span, "CANCELLED")
        raise
    call.add_done_callback(lambda done: _end_later(span, done))
    return call


def _end_later(span: Span, call: Any) -> None:
    """The code of a call that is done is known, but has to be awaited."""

    async def end() -> None:
        code: grpc.StatusCode = await call.code()
        _end(span, code.name)

    task = asyncio.ensure_future(end())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


def _end(span: Span, status_code: str) -> None:
    span.set_attribute(names.ATTR_RPC_STATUS_CODE, status_code)
    if status_code != "OK":
        span.set_attribute(names.ATTR_ERROR_TYPE, status_code)
        span.set_status(Status(StatusCode.ERROR, status_code))
    span.end()


def _text(method: "str | bytes | Sequence[int]") -> str:
    return method if isinstance(method, str) else bytes(method).decode()
