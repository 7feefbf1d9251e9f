"""Grammars are compiled at admission: wrong ones are refused there, slow ones hold up nobody."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc import aio

from service.pb import generation_pb2 as pb
from tests.fakes import FakeEngine, FakeRecording
from tests.service.serving import running_server
from tests.service.test_generate import read_all, text_request


def _with_regex(regex: str) -> pb.GenerateRequest:
    request = text_request(request_id="structured")
    request.structured_output.regex = regex
    return request


class Errors(FakeRecording):
    """Keeps what refusals are filed with."""

    errors: tuple[str, ...] = ()

    def on_refused(self, request_id: str, *, error: str, **more: Any) -> None:
        self.errors = (*self.errors, error)
        FakeRecording.on_refused(self, request_id, error=error, **more)


async def test_a_wrong_grammar_is_refused_before_the_engine_and_not_quoted_in_the_ledger() -> None:
    recording = Errors()
    async with running_server(recording=recording) as running:
        with pytest.raises(aio.AioRpcError) as refused:
            await read_all(running, _with_regex("("))
        assert running.engine.num_steps == 0
        assert running.server.num_live_requests == 0
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "private words" in (refused.value.details() or "")
    assert recording.rows == [("structured", "INVALID_ARGUMENT")]
    assert recording.errors == ("structured_output.regex: refused",)


async def test_a_grammar_that_takes_long_holds_up_no_stream() -> None:
    engine = FakeEngine(step_seconds=0.005, tokens_per_step=1)
    async with running_server(engine) as running:
        stream = running.stub.Generate(_long())
        await stream.read()
        engine.prepare_seconds = 0.5
        slow = asyncio.ensure_future(read_all(running, _with_regex("[a-z]*")))
        gaps: list[float] = []
        while not slow.done():
            began_at = time.monotonic()
            await stream.read()
            gaps.append(time.monotonic() - began_at)
        assert (await slow)[-1].HasField("finished")
        stream.cancel()
    assert len(gaps) > 10
    assert max(gaps) < 0.5


def _long() -> pb.GenerateRequest:
    request = text_request()
    request.stopping.max_tokens = 4000
    return request
