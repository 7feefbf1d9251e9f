"""The client for asyncio; service.client is the one for threads.

    async with AsyncClient("127.0.0.1:50051") as client:
        result = await client.generate("Once upon a time", temperature=0).result()

A stream iterates text; `.events()` iterates the messages of the contract, `.result()` reads to
the end. TandemError is raised for a status other than OK.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from grpc import aio

from service.attempts import Attempts, GenerationResult, RetryPolicy
from service.client_calls import (
    CHANNEL_OPTIONS,
    NO_CREDENTIALS,
    Credentials,
    Prompt,
    as_request,
    fits_before,
    read_call_error,
    remaining_seconds,
)
from service.client_tracing import tracing_interceptors
from service.pb import generation_pb2 as pb
from service.pb import generation_pb2_grpc as pb_grpc

__all__ = ["AsyncClient", "AsyncGenerationStream", "Credentials", "GenerationResult"]


class AsyncGenerationStream:
    """One generation, for asyncio."""

    def __init__(
        self,
        stub: Any,
        request: pb.GenerateRequest,
        policy: RetryPolicy,
        credentials: Credentials,
        timeout_seconds: float | None,
    ) -> None:
        self._stub = stub
        self._attempts = Attempts(request, policy)
        self._credentials = credentials
        self._deadline_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._events = self._run()

    async def __aiter__(self) -> AsyncIterator[str]:
        async with aclosing(self._events) as events:
            async for event in events:
                if event.delta.text and event.delta.choice_index == 0:
                    yield event.delta.text

    def events(self) -> AsyncGenerator[pb.GenerateResponse]:
        """Close it (contextlib.aclosing) to leave early."""
        return self._events

    async def result(self) -> GenerationResult:
        async for _ in self._events:
            pass
        return self._attempts.result

    async def _run(self) -> AsyncGenerator[pb.GenerateResponse]:
        while not self._attempts.is_complete():
            call = self._stub.Generate(
                self._attempts.next_request(),
                timeout=remaining_seconds(self._deadline_at),
                metadata=self._credentials.metadata(),
            )
            try:
                async for response in call:
                    seen = self._attempts.take(response)
                    if seen is not None:
                        yield seen
            except aio.AioRpcError as error:
                if self._attempts.is_complete():
                    return
                failure = read_call_error(error)
                wait = self._attempts.wait_before_retry(failure)
                if wait is None or not fits_before(wait, self._deadline_at):
                    raise failure from error
                await asyncio.sleep(wait)
            finally:
                call.cancel()


class AsyncClient:
    """A connection for asyncio; made on the event loop.

    trace_calls gives every call, retries and resumptions included, a client span of its own.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        retry: RetryPolicy | None = None,
        trace_calls: bool = False,
    ) -> None:
        secure = credentials.channel_credentials()
        interceptors = tracing_interceptors() if trace_calls else None
        self._channel = (
            aio.insecure_channel(address, CHANNEL_OPTIONS, interceptors=interceptors)
            if secure is None
            else aio.secure_channel(address, secure, CHANNEL_OPTIONS, interceptors=interceptors)
        )
        self.stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._credentials = credentials
        self._retry = retry or RetryPolicy()

    def generate(
        self,
        prompt: Prompt | pb.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> AsyncGenerationStream:
        """Begin a generation; options are those of `build_request`."""
        request = as_request(prompt, options)
        return AsyncGenerationStream(
            self.stub, request, self._retry, self._credentials, timeout_seconds
        )

    async def model(self, name: str = "") -> pb.GetModelResponse:
        response: pb.GetModelResponse = await self._call(
            self.stub.GetModel, pb.GetModelRequest(model=name)
        )
        return response

    async def load(self) -> pb.GetLoadResponse:
        response: pb.GetLoadResponse = await self._call(self.stub.GetLoad, pb.GetLoadRequest())
        return response

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._credentials.metadata(), timeout=60)
        except aio.AioRpcError as error:
            raise read_call_error(error) from error

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
