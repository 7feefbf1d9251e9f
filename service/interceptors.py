"""What every method goes through: trace, authentication, and failures turned into statuses.

A stream is written from inside the interceptor, so that a cancelled call is noticed there and
the handler is closed at once, wherever it was.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import grpc
from grpc import aio

from service.calls import CallInfo, Principal, current_call
from service.errors import as_service_error
from telemetry.tracing import start_call_span

_log = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # subscriptable for checkers only
Behaviour = Callable[[Any, Context], Any]


class Authenticator(Protocol):
    """Finds out who calls; raises ServiceError with UNAUTHENTICATED."""

    async def authenticate(
        self, method: str, metadata: Mapping[str, str], peer_names: Iterable[str]
    ) -> Principal:
        """peer_names are those of the client's certificate, none without mutual TLS."""
        ...


class CallInterceptor(aio.ServerInterceptor):
    """Wraps every method of every service, health and reflection included."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.lstrip("/")
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                wrapped: Handler = make(
                    self._wrap(method, behaviour, is_stream=handler.response_streaming),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
                return wrapped
        return handler

    def _wrap(self, method: str, behaviour: Behaviour, *, is_stream: bool) -> Behaviour:
        run = _stream if is_stream and inspect.isasyncgenfunction(behaviour) else _answer

        async def call(request: Any, context: Context) -> Any:
            metadata = _text_metadata(context)
            span = start_call_span(method, metadata)
            status_code = "UNKNOWN"
            try:
                principal = await self._authenticator.authenticate(
                    method, metadata, _peer_names(context)
                )
                current_call.set(CallInfo(principal, span))
                response = await run(behaviour, request, context)
                status_code = "OK"
            except asyncio.CancelledError:
                status_code = "DEADLINE_EXCEEDED" if _is_overdue(context) else "CANCELLED"
                raise
            except aio.AbortError:
                code = context.code()
                status_code = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
                raise
            except Exception as error:
                failure = as_service_error(error)
                status_code = failure.code.name
                if failure.code is grpc.StatusCode.INTERNAL:
                    # The message of an exception may quote what the caller sent.
                    hidden = {"hides_messages": True}
                    _log.error("%s failed", method, exc_info=error, extra=hidden)
                await context.abort_with_status(failure.to_status())
            else:
                return response
            finally:
                span.end(status_code)

        return call


async def _answer(behaviour: Behaviour, request: Any, context: Context) -> Any:
    return await behaviour(request, context)


async def _stream(behaviour: Behaviour, request: Any, context: Context) -> None:
    responses: AsyncGenerator[Any] = behaviour(request, context)
    async with aclosing(responses) as open_responses:
        async for response in open_responses:
            await context.write(response)


def _is_overdue(context: Context) -> bool:
    remaining: float | None = context.time_remaining()
    return remaining is not None and remaining <= 0


def _peer_names(context: Context) -> tuple[str, ...]:
    """Names in a certificate that TLS has verified."""
    properties = context.auth_context()
    return tuple(
        name.decode(errors="replace")
        for key in ("x509_subject_alternative_name", "x509_common_name")
        for name in properties.get(key, ())
    )


def _text_metadata(context: Context) -> dict[str, str]:
    """Text entries by lower-case key; of a repeated key the first one counts."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found.setdefault(key.lower(), value)
    return found
