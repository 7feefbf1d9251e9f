"""Clients that are killed, frozen, slow, malformed or many: their neighbours never notice."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest
from google.protobuf.message import DecodeError
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.convert.requests import read_generate_request
from service.errors import ServiceError
from service.pb import generation_pb2 as pb
from tests.fakes import FakeEngine
from tests.service.serving import Running, running_server
from tests.service.test_generate import read_all, text_request, wait_until

# A client of its own process: starts a long stream, says so, and goes on reading.
_CLIENT = """
import sys, grpc
from service.pb import generation_pb2 as pb, generation_pb2_grpc as rpc
request = pb.GenerateRequest(text="x", request_id=sys.argv[2])
request.stopping.max_tokens = 4000
call = rpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1])).Generate(request)
for index, event in enumerate(call):
    if index == 1:
        print("reading", flush=True)
"""


def start_client(running: Running, request_id: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _CLIENT, running.address, request_id],
        stdout=subprocess.PIPE,
        text=True,
    )


async def assert_neighbours_are_served(running: Running) -> None:
    events = await asyncio.wait_for(read_all(running, text_request()), 5)
    assert events[-1].finished.usage.num_output_tokens == 10


async def test_killed_client_frees_its_row() -> None:
    async with running_server(FakeEngine(step_seconds=0.01)) as running:
        client = start_client(running, "killed")
        assert await asyncio.to_thread(client.stdout.readline) == "reading\n"
        client.kill()
        await wait_until(lambda: running.server.num_live_requests == 0, 2)
        client.wait()
        client.stdout.close()
        await assert_neighbours_are_served(running)
    assert ("killed", "CANCELLED") in running.recording.rows


async def test_frozen_client_frees_its_row_within_the_keepalive() -> None:
    engine = FakeEngine(step_seconds=0.02, tokens_per_step=1)
    async with running_server(engine, keepalive_seconds=1, keepalive_timeout_seconds=1) as running:
        client = start_client(running, "frozen")
        assert await asyncio.to_thread(client.stdout.readline) == "reading\n"
        os.kill(client.pid, signal.SIGSTOP)
        try:
            await wait_until(lambda: running.server.num_live_requests == 0, 15)
            await assert_neighbours_are_served(running)
        finally:
            client.kill()
            client.wait()
            client.stdout.close()


async def test_unary_calls_are_cancelled_as_well() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with running_server(engine) as running:
        request = text_request(request_id="unary")
        request.stopping.max_tokens = 4000
        call = running.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
        await wait_until(lambda: running.server.num_live_requests == 1)
        call.cancel()
        await wait_until(lambda: running.server.num_live_requests == 0)
    assert running.recording.rows == [("unary", "CANCELLED")]


@pytest.mark.parametrize("end", ["stream", "unary", "deadline"])
async def test_a_row_is_freed_by_the_step_that_follows_the_end_of_its_call(end: str) -> None:
    """No step runs between the client's end and the release: no clock can hide a second one."""
    engine = FakeEngine(step_seconds=0.001)
    async with running_server(engine) as running:
        request = text_request(request_id="gone")
        request.stopping.max_tokens = 4000
        if end == "unary":
            call = running.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
        else:
            call = running.stub.Generate(request, timeout=0.3 if end == "deadline" else None)
        await wait_until(lambda: engine.num_steps > 3)
        engine.may_run.clear()
        reading = asyncio.ensure_future(_drain(call) if end != "unary" else _answer(call))
        if end != "deadline":
            call.cancel()
        await wait_until(lambda: running.server._engine._inbox or engine.canceled_at_step)
        num_steps = engine.num_steps  # one more may be on its way
        engine.may_run.set()
        await wait_until(lambda: running.server.num_live_requests == 0)
        await asyncio.gather(reading, return_exceptions=True)
    assert engine.canceled_at_step["gone"] <= num_steps + 1
    assert engine.num_steps <= num_steps + 2


async def _answer(call: object) -> None:
    await call


async def test_waiting_requests_are_cancelled_without_having_run() -> None:
    engine = FakeEngine(num_rows=1, step_seconds=0.01)
    async with running_server(engine, max_num_rows=1) as running:
        first = text_request(request_id="first")
        first.stopping.max_tokens = 3000
        running_call = running.stub.Generate(first)
        await running_call.read()
        waiting = running.stub.Generate(text_request(request_id="waiting"))
        await wait_until(lambda: running.server.num_live_requests == 2)
        waiting.cancel()
        await wait_until(lambda: running.server.num_live_requests == 1)
        running_call.cancel()
        await wait_until(lambda: running.server.num_live_requests == 0)
    assert running.recording.rows == [("waiting", "CANCELLED"), ("first", "CANCELLED")]


async def test_a_thousand_random_cancels_leak_nothing() -> None:
    import random

    draw = random.Random(1)
    engine = FakeEngine(step_seconds=0.0005)
    num_tasks = len(asyncio.all_tasks())
    async with running_server(engine, max_waiting_requests=2000) as running:

        async def storm(index: int) -> None:
            request = text_request(request_id=f"s{index}", n=draw.choice((None, 2)))
            request.stopping.max_tokens = 1000
            call = running.stub.Generate(request)
            task = asyncio.ensure_future(_drain(call))
            await asyncio.sleep(draw.random() * 0.02)
            call.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 1000, 50):
            await asyncio.gather(*(storm(index) for index in range(start, start + 50)))
        await wait_until(lambda: running.server.num_live_requests == 0)
        assert not engine.has_work()
        load = await running.stub.GetLoad(pb.GetLoadRequest())
        assert load.num_outstanding_tokens == 0
        assert not running.recording.open_requests
        await assert_neighbours_are_served(running)
    await wait_until(lambda: len(asyncio.all_tasks()) <= num_tasks)


async def _drain(call: object) -> None:
    async for _ in call:
        pass


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_GREETINGS = (  # a connection that is ready and idle, two that never get there, three wrong ones
    _PREFACE + _EMPTY_SETTINGS,
    _PREFACE[:10],
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(range(256)),
    _PREFACE + b"\xff" * 64,
)


@pytest.fixture
def many_files() -> Iterator[int]:
    """Lets this process open thousands of sockets; how many connections to make."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield min(1000, (wanted - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_thousand_idle_connections_cost_little_and_disturb_nobody(many_files: int) -> None:
    process = psutil.Process()
    async with running_server() as running:
        await assert_neighbours_are_served(running)
        before, num_files = process.memory_info().rss, process.num_fds()
        reader = asyncio.ensure_future(assert_neighbours_are_served(running))
        idle = []
        for index in range(many_files):
            connection = socket.create_connection(("127.0.0.1", running.server.port))
            connection.sendall(_GREETINGS[index % len(_GREETINGS)])
            idle.append(connection)
            if index % 50 == 0:
                await asyncio.sleep(0)
        await reader
        await assert_neighbours_are_served(running)
        grown = process.memory_info().rss - before
        for connection in idle:
            connection.close()
        await wait_until(lambda: process.num_fds() <= num_files + 20, 20)
        await assert_neighbours_are_served(running)
    assert many_files == 1000 or resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2200
    assert grown < 100e6, f"{grown / many_files:.0f} bytes a connection"


async def test_ping_floods_cost_the_flooder_its_connection_only() -> None:
    async with running_server() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(_PREFACE + _EMPTY_SETTINGS)
        ping = b"\0\0\x08\x06\0\0\0\0\0" + b"pingping"
        try:
            for _ in range(200):
                writer.write(ping * 50)
                await writer.drain()
            await asyncio.wait_for(reader.read(-1), 5)  # the server hangs up
        except ConnectionError:
            pass
        await assert_neighbours_are_served(running)
        writer.close()


async def test_huge_prompts_and_metadata_are_refused() -> None:
    async with running_server(max_prompt_bytes=100_000) as running:
        with pytest.raises(aio.AioRpcError) as huge:
            await read_all(running, text_request("x" * 10_000_000))
        with pytest.raises(aio.AioRpcError) as long:
            await read_all(running, text_request("x" * 200_000))
        big = (("x-big", "y" * 200_000),)
        with pytest.raises(aio.AioRpcError) as metadata:
            await _drain(running.stub.Generate(text_request(), metadata=big))
        await assert_neighbours_are_served(running)
    assert huge.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert long.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_long_prompt_does_not_hold_up_streams_of_others() -> None:
    engine = FakeEngine(step_seconds=0.005, tokens_per_step=1)
    async with running_server(engine) as running:
        request = text_request()
        request.stopping.max_tokens = 60
        gaps: list[float] = []

        async def read() -> None:
            last = time.monotonic()
            async for _ in running.stub.Generate(request):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        stream = asyncio.ensure_future(read())
        began_at = time.monotonic()
        await running.stub.Tokenize(pb.TokenizeRequest(text="the quick brown fox " * 50_000))
        encoding_seconds = time.monotonic() - began_at
        await stream
    # Held up means: a gap as long as the encoding took. A share of it, so that no clock is tested.
    assert max(gaps[1:]) < max(0.5 * encoding_seconds, 0.1)


async def test_invalid_utf8_and_wire_garbage_are_statuses() -> None:
    async with running_server() as running:
        raw = running.channel.unary_stream(
            "/tandem.v1.GenerationService/Generate",
            request_serializer=lambda data: data,
            response_deserializer=lambda data: data,
        )
        for data in (b"\x1a\x02\xff\xfe", b"\xff" * 50, b"\x1a\x7f", os.urandom(500)):
            with pytest.raises(aio.AioRpcError):
                await _drain(raw(data))
        await assert_neighbours_are_served(running)


def _reads_or_refuses(message: pb.GenerateRequest) -> None:
    try:
        read_generate_request(message, default_max_tokens=16, max_completions=8)
    except (ServiceError, ValueError):
        return


def _rich_request() -> bytes:
    request = text_request("hello", request_id="r", labels={"team": "a"}, n=2, priority=-3)
    request.sampling.MergeFrom(pb.SamplingParams(temperature=0.5, top_k=3, logit_bias={3: 1.5}))
    request.stopping.stop_strings.extend(["a", "é"])
    request.stopping.time_limit.FromMilliseconds(1500)
    request.speculation.drafter = "prompt_lookup"
    request.output.top_logprobs = 2
    return request.SerializeToString()


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6))
def test_damaged_requests_are_read_or_refused_with_a_reason(
    changes: list[tuple[int, int]],
) -> None:
    data = bytearray(_rich_request())
    for position, value in changes:
        data[position % len(data)] = value
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError:
        return
    _reads_or_refuses(message)


_EDGES = st.sampled_from([0.0, -1.0, 1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf")])
_INTEGERS = st.sampled_from([0, 1, 2, 63, 2**31 - 1, 2**32 - 1])
_TEXT = st.text(max_size=8)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_combination_of_fields_is_read_or_refused_with_a_reason(data: st.DataObject) -> None:
    message = pb.GenerateRequest(text="x")
    for part in (message, message.sampling, message.stopping, message.speculation, message.output):
        for descriptor in part.DESCRIPTOR.fields:
            if descriptor.message_type is not None or data.draw(st.integers(0, 3)):
                continue
            value = {
                descriptor.TYPE_FLOAT: _EDGES,
                descriptor.TYPE_STRING: _TEXT,
                descriptor.TYPE_BOOL: st.booleans(),
                descriptor.TYPE_ENUM: st.integers(0, 99),
                descriptor.TYPE_SINT32: st.integers(-(2**31), 2**31 - 1),
            }.get(descriptor.type, _INTEGERS)
            drawn = data.draw(value)
            if descriptor.is_repeated:
                getattr(part, descriptor.name).append(drawn)
            else:
                setattr(part, descriptor.name, drawn)
    _reads_or_refuses(message)
