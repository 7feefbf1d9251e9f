"""The clients: retrying, resuming, and what they raise."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_span_in_context

from service.async_client import AsyncClient
from service.attempts import RetryPolicy
from service.client import Client
from service.client_calls import TandemError, build_request
from tests.fakes import FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import text_request, wait_until

QUICK = RetryPolicy(max_attempts=5, initial_seconds=0.02, max_seconds=0.1)


class BreakingProxy:
    """Forwards TCP and cuts each of the first connections after so many bytes of answer."""

    def __init__(self, port: int, cut_after_bytes: list[int]) -> None:
        self._target = port
        self._cuts = iter(cut_after_bytes)
        self.num_cut = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = next(self._cuts, None)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.create_task(self._pump(reader, up_writer, None))
        try:
            await self._pump(up_reader, writer, left)
        finally:
            up.cancel()
            writer.close()
            up_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None
    ) -> None:
        while data := await reader.read(256):
            if left is not None:
                left -= len(data)
                if left <= 0:
                    self.num_cut += 1
                    return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def proxied(port: int, cuts: list[int]) -> AsyncIterator[tuple[str, BreakingProxy]]:
    proxy = BreakingProxy(port, cuts)
    address = f"127.0.0.1:{await proxy.start()}"
    try:
        yield address, proxy
    finally:
        await proxy.close()


def long_request() -> object:
    request = text_request(request_id="long")
    request.stopping.max_tokens = 300
    return request


async def test_broken_streams_are_resumed_and_the_reader_sees_one_stream() -> None:
    async with running_server(FakeEngine(step_seconds=0.001)) as running:
        async with AsyncClient(running.address) as client:
            whole = await client.generate(long_request()).result()
        async with proxied(running.server.port, [1500, 1000]) as (address, proxy):
            async with AsyncClient(address, retry=QUICK) as client:
                stream = client.generate(long_request())
                events = [event async for event in stream.events()]
                result = await stream.result()
            assert proxy.num_cut == 2
    assert result.token_ids == whole.token_ids
    assert result.text == whole.text == "".join(event.delta.text for event in events)
    assert [event.WhichOneof("event") for event in events].count("started") == 1
    indices = [e.delta.first_token_index for e in events if e.delta.token_ids]
    assert indices == sorted(set(indices))
    assert result.usage is not None
    assert result.usage.num_output_tokens == 300


async def test_sync_client_resumes_too() -> None:
    async with running_server(FakeEngine(step_seconds=0.001)) as running:
        async with AsyncClient(running.address) as client:
            whole = await client.generate(long_request()).result()
        async with proxied(running.server.port, [1500]) as (address, proxy):

            def read() -> str:
                with Client(address, retry=QUICK) as client:
                    return "".join(client.generate(long_request()))

            text = await asyncio.to_thread(read)
            assert proxy.num_cut == 1
    assert text == whole.text


async def test_stream_that_cannot_be_repeated_is_not_resumed() -> None:
    async with (
        running_server(FakeEngine(step_seconds=0.001)) as running,
        proxied(running.server.port, [1500]) as (address, _),
    ):
        request = long_request()
        request.sampling.presence_penalty = 1.0
        async with AsyncClient(address, retry=QUICK) as client:
            with pytest.raises(TandemError) as broken:
                await client.generate(request).result()
    assert broken.value.code is grpc.StatusCode.UNAVAILABLE


async def test_refused_calls_are_repeated_until_the_server_is_ready() -> None:
    async with (
        running_server(load=False) as running,
        AsyncClient(running.address, retry=RetryPolicy(max_attempts=9)) as client,
    ):
        waiting = asyncio.ensure_future(client.generate(text_request()).result())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await running.server.load()
        result = await waiting
    assert len(result.token_ids) == 10


async def test_retries_end_and_wrong_requests_are_never_repeated() -> None:
    policy = RetryPolicy(max_attempts=2, initial_seconds=0.01)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with AsyncClient(f"127.0.0.1:{unused.getsockname()[1]}", retry=policy) as client:
            with pytest.raises(TandemError) as away:
                await client.generate("x").result()
    assert away.value.code is grpc.StatusCode.UNAVAILABLE
    async with (
        running_server() as running,
        AsyncClient(running.address, retry=policy) as client,
    ):
        with pytest.raises(TandemError) as wrong:
            await client.generate("x", temperature=-1, request_id="w").result()
    assert wrong.value.field_violations[0][0] == "sampling.temperature"
    assert [row for row in running.recording.rows if row[0] == "w"] == [("w", "INVALID_ARGUMENT")]


async def test_leaving_a_stream_early_ends_the_request() -> None:
    engine = FakeEngine(step_seconds=0.005)
    async with running_server(engine) as running, AsyncClient(running.address) as client:
        async with aclosing(client.generate(long_request()).events()) as events:
            await anext(events)
            await anext(events)
        await wait_until(lambda: running.server.num_live_requests == 0)
    assert running.recording.rows == [("long", "CANCELLED")]


async def test_sync_stream_can_be_cancelled_from_another_thread() -> None:
    async with running_server(FakeEngine(step_seconds=0.005)) as running:

        def read() -> Iterator[str]:
            with Client(running.address) as client:
                request = text_request(request_id="t")
                request.stopping.max_tokens = 4000
                stream = client.generate(request)
                threading.Timer(0.2, stream.cancel).start()
                with pytest.raises(TandemError) as cancelled:
                    stream.result()
                return cancelled.value.code

        assert await asyncio.to_thread(read) is grpc.StatusCode.CANCELLED
        await wait_until(lambda: running.server.num_live_requests == 0)


async def test_messages_and_tokens_are_prompts_too() -> None:
    request = build_request([{"role": "user", "content": "hello"}], max_tokens=3)
    assert request.WhichOneof("prompt") == "chat"
    assert build_request([5, 6]).tokens.ids == [5, 6]
    async with running_server() as running, AsyncClient(running.address) as client:
        assert len((await client.generate(request).result()).token_ids) == 3
        assert len((await client.generate([5, 6], max_tokens=4).result()).token_ids) == 4


async def test_trace_context_of_the_caller_reaches_the_server() -> None:
    from opentelemetry import context

    provider = TracerProvider()
    seen: list[dict[str, str]] = []

    class Watching:
        async def authenticate(self, method, metadata, peer_names):  # type: ignore[no-untyped-def]
            from service.security import OpenAccess

            seen.append(dict(metadata))
            return await OpenAccess().authenticate(method, metadata, peer_names)

    span = provider.get_tracer("test").start_span("caller")
    async with running_server(authenticator=Watching()) as running:
        token = context.attach(set_span_in_context(span))
        try:
            async with AsyncClient(running.address) as client:
                await client.generate(text_request()).result()
        finally:
            context.detach(token)
    trace_id = format(span.get_span_context().trace_id, "032x")
    assert seen[0]["traceparent"].split("-")[1] == trace_id
