"""`finished` after the ledger's row, where the server promises that."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from engine.stats import RequestStats
from service.async_client import AsyncClient
from service.pb import generation_pb2 as pb
from telemetry.recording import FinishedRequest, OpenRequest
from tests.fakes import FakeRecording
from tests.service.serving import Running, running_server
from tests.service.test_generate import text_request


@dataclass(slots=True)
class SlowRecording(FakeRecording):
    """Rows become durable when the test says so."""

    durable: "Future[bool]" = field(default_factory=Future)

    def on_finished(
        self, open_request: OpenRequest, stats: RequestStats, *, status_code: str
    ) -> FinishedRequest:
        done = FakeRecording.on_finished(self, open_request, stats, status_code=status_code)
        return replace(done, durable=self.durable)


async def _until_last_delta(call: Any) -> None:
    while not (await call.read()).delta.finish_reason:
        pass


async def _code_at_the_end(running: Running) -> grpc.StatusCode:
    call = running.stub.Generate(text_request())
    await _until_last_delta(call)
    running.recording.durable.set_result(False)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    return failed.value.code()


async def test_finished_waits_for_the_row_and_tokens_do_not() -> None:
    recording = SlowRecording()
    async with running_server(recording=recording, finish_when_recorded=True) as running:
        call = running.stub.Generate(text_request())
        await _until_last_delta(call)
        last = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.1)
        assert not last.done()
        recording.durable.set_result(True)
        assert (await last).finished.usage.num_output_tokens == 10


async def test_without_the_setting_nothing_waits() -> None:
    async with (
        running_server(recording=SlowRecording()) as running,
        AsyncClient(running.address) as client,
    ):
        assert (await client.generate(text_request()).result()).usage is not None


async def test_a_row_that_could_be_written_nowhere_is_no_ok() -> None:
    async with running_server(recording=SlowRecording(), finish_when_recorded=True) as running:
        assert await _code_at_the_end(running) is grpc.StatusCode.INTERNAL


async def test_a_caller_that_leaves_does_not_cancel_the_write() -> None:
    recording = SlowRecording()
    async with running_server(recording=recording, finish_when_recorded=True) as running:
        call = running.stub.Generate(text_request())
        await _until_last_delta(call)
        call.cancel()
        await asyncio.sleep(0.1)
        assert not recording.durable.cancelled()
        recording.durable.set_result(True)


async def test_the_wait_ends_at_the_deadline() -> None:
    recording = SlowRecording()
    settings = {"finish_when_recorded": True, "max_deadline_seconds": 0.3}
    async with running_server(recording=recording, **settings) as running:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await running.stub.GenerateUnary(pb.GenerateUnaryRequest(request=text_request()))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
