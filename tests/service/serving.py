"""A real server on a real port, with a fake engine unless told otherwise."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio
from transformers import PreTrainedTokenizerBase

from service.app import Parts, Server
from service.experiments.live import LiveExperiments, no_experiments
from service.interceptors import Authenticator
from service.pb import generation_pb2_grpc as pb_grpc
from service.security import OpenAccess
from service.settings import ServiceSettings
from telemetry.recording import Recording
from tests.fakes import FakeEngine, FakeRecording
from tests.tiny import tiny_tokenizer

MODEL_NAME = "tiny"


class Running:
    """A started server, its fakes, and a stub connected to it."""

    def __init__(
        self,
        server: Server,
        engine: Any,
        recording: Any,
        channel: aio.Channel,
    ) -> None:
        self.server = server
        self.engine = engine
        self.recording = recording
        self.channel = channel
        self.stub: Any = pb_grpc.GenerationServiceStub(channel)
        self.address = f"127.0.0.1:{server.port}"


@asynccontextmanager
async def running_server(
    engine: Any = None,
    *,
    recording: Recording | None = None,
    build_engine: Callable[[], Any] | None = None,
    authenticator: Authenticator | None = None,
    experiments: LiveExperiments | None = None,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase] = tiny_tokenizer,
    load: bool = True,
    grace_seconds: float = 0.0,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Keyword arguments are settings. Stops the server without a grace period at the end."""
    engine = engine or FakeEngine()
    recording = recording or FakeRecording()
    configured = ServiceSettings(**{"port": 0, **settings})
    parts = Parts(
        build_engine=build_engine or (lambda: engine),
        load_tokenizer=load_tokenizer,
        open_recording=lambda info: recording,
        close_telemetry=lambda: None,
        authenticator=authenticator or OpenAccess(),
        experiments=experiments or no_experiments(),
    )
    server = Server(configured, parts, MODEL_NAME)
    await server.listen()
    channel = aio.insecure_channel(f"127.0.0.1:{server.port}")
    try:
        if load:
            await server.load()
        yield Running(server, engine, recording, channel)
    finally:
        if isinstance(engine, FakeEngine):
            engine.may_run.set()
        await channel.close()
        await server.stop(grace_seconds)
