"""A server from loading to the end of its process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.pb import generation_pb2 as pb
from service.settings import ServiceSettings
from tests.fakes import FakeEngine
from tests.service.serving import Running, running_server
from tests.service.test_generate import read_all, text_request, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "tandem.v1.GenerationService")


async def health_of(running: Running, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(running.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def test_health_is_serving_only_once_the_engine_is_loaded() -> None:
    async with running_server(load=False) as running:
        before = [await health_of(running, name) for name in NAMES]
        await running.server.load()
        after = [await health_of(running, name) for name in NAMES]
    assert before == [NOT_SERVING, NOT_SERVING]
    assert after == [SERVING, SERVING]


async def test_hung_step_turns_health_off_and_back_on_for_watchers() -> None:
    engine = FakeEngine()
    async with running_server(engine, stall_seconds=0.2) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        watch = aiter(stub.Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == SERVING
        engine.may_run.clear()
        call = asyncio.ensure_future(read_all(running, text_request()))
        assert (await asyncio.wait_for(anext(watch), 5)).status == NOT_SERVING
        engine.may_run.set()
        assert (await asyncio.wait_for(anext(watch), 5)).status == SERVING
        await call


async def test_idle_engine_stays_healthy() -> None:
    async with running_server(stall_seconds=0.1) as running:
        await asyncio.sleep(0.4)
        assert await health_of(running) == SERVING


async def test_failed_load_is_raised_and_never_serves() -> None:
    def broken() -> FakeEngine:
        raise ValueError("no such model")

    async with running_server(load=False, build_engine=broken) as running:
        with pytest.raises(ValueError, match="no such model"):
            await running.server.load()
        assert await health_of(running) == NOT_SERVING


async def test_stopping_finishes_live_streams_and_refuses_new_ones() -> None:
    engine = FakeEngine(step_seconds=0.02)
    async with running_server(engine) as running:
        request = text_request()
        request.stopping.max_tokens = 180  # longer than the last writes are given
        live = asyncio.ensure_future(read_all(running, request))
        await wait_until(lambda: running.server.num_live_requests == 1)
        stopping = asyncio.ensure_future(running.server.stop(10))
        await asyncio.sleep(0.05)
        with pytest.raises(aio.AioRpcError) as refused:
            await read_all(running, text_request())
        events = await live
        await stopping
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert events[-1].finished.usage.num_output_tokens == 180
    assert running.recording.is_closed


async def test_streams_that_outlast_the_grace_period_end_with_a_status() -> None:
    engine = FakeEngine(step_seconds=0.02)
    async with running_server(engine) as running:
        request = text_request(request_id="long")
        request.stopping.max_tokens = 4000
        live = asyncio.ensure_future(read_all(running, request))
        await wait_until(lambda: running.server.num_live_requests == 1)
        await running.server.stop(0.1)
        with pytest.raises(aio.AioRpcError) as ended:
            await live
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [request_id for request_id, _ in running.recording.rows] == ["long"]
    assert not running.recording.open_requests


async def test_idle_server_does_not_wait_for_the_grace_period() -> None:
    async with running_server() as running:
        await asyncio.wait_for(running.server.stop(600), 10)


async def test_port_in_use_is_refused() -> None:
    async with running_server() as running:
        with pytest.raises(OSError, match="cannot listen"):
            async with running_server(port=running.server.port):
                pass


def test_plain_text_beyond_loopback_needs_an_explicit_flag() -> None:
    with pytest.raises(ValueError, match="not loopback"):
        ServiceSettings(host="0.0.0.0")  # noqa: S104 - the point of the test
    assert ServiceSettings(host="0.0.0.0", allow_insecure=True)  # noqa: S104


@pytest.fixture
def process(tmp_path: Path) -> "subprocess.Popen[str]":
    """A server process with a fake engine; prints its port once it serves."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.service.fake_server"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TANDEM_GRACE_SECONDS": "20"},
    )
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def _port(process: "subprocess.Popen[str]") -> int:
    return int(process.stdout.readline())


def _long_request() -> pb.GenerateRequest:
    request = text_request()
    request.stopping.max_tokens = 60
    return request


def test_sigterm_finishes_the_stream_and_exits_0(process: "subprocess.Popen[str]") -> None:
    from service.client import Client

    with Client(f"127.0.0.1:{_port(process)}") as client:
        stream = client.generate(_long_request())
        events = stream.events()
        next(events)
        process.send_signal(signal.SIGTERM)
        result = stream.result()
    assert len(result.token_ids) == 60
    assert process.wait(20) == 0


def test_sighup_reads_settings_again_and_a_broken_one_stops_no_other(
    process: "subprocess.Popen[str]",
) -> None:
    from service.client import Client

    with Client(f"127.0.0.1:{_port(process)}") as client:
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "reloaded\n"
        assert client.generate("x", max_tokens=4).result().usage is not None


def test_second_signal_ends_at_once(process: "subprocess.Popen[str]") -> None:
    from service.client import Client, TandemError

    with Client(f"127.0.0.1:{_port(process)}") as client:
        request = text_request()
        request.stopping.max_tokens = 4000
        stream = client.generate(request)
        events = stream.events()
        next(events)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        stream.cancel()
        with pytest.raises(TandemError):
            stream.result()


def test_crashed_engine_ends_the_process_with_an_error() -> None:
    crashing = subprocess.run(
        [sys.executable, "-m", "tests.service.fake_server", "crash"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert crashing.returncode == 1
