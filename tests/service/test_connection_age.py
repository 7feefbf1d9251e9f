"""Connections that have reached their age: no call is lost, and new ones go elsewhere."""

import grpc
import pytest
from grpc import aio

from tests.fakes import FakeEngine
from tests.service.serving import Running, running_server
from tests.service.test_generate import read_all, text_request, wait_until


def _long_request(running: Running) -> object:
    request = text_request()
    request.stopping.max_tokens = 60
    return running.stub.Generate(request)


async def test_an_old_connection_finishes_its_stream_and_takes_no_other() -> None:
    engine = FakeEngine(step_seconds=0.02, tokens_per_step=1)
    async with running_server(engine, max_connection_age_seconds=0.3) as running:
        events = [event async for event in _long_request(running)]
        assert events[-1].finished.usage.num_output_tokens == 60
        await wait_until(lambda: running.channel.get_state() is not grpc.ChannelConnectivity.READY)
        assert (await read_all(running, text_request()))[-1].HasField("finished")  # a new one


async def test_a_stream_that_outlasts_the_grace_ends_as_unavailable() -> None:
    engine = FakeEngine(step_seconds=0.05, tokens_per_step=1)
    ages = {"max_connection_age_seconds": 0.2, "max_connection_age_grace_seconds": 0.2}
    async with running_server(engine, **ages) as running:
        with pytest.raises(aio.AioRpcError) as cut:
            async for _ in _long_request(running):
                pass
        await wait_until(lambda: running.server.num_live_requests == 0)
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_connections_stay_unless_they_are_given_an_age() -> None:
    engine = FakeEngine(step_seconds=0.02, tokens_per_step=1)
    async with running_server(engine) as running:
        _ = [event async for event in _long_request(running)]
        assert running.channel.get_state() is grpc.ChannelConnectivity.READY
