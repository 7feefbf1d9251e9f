"""Every call is traced with the status that its client got."""

import asyncio
import io
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from service.assembly import set_up_logs
from service.async_client import AsyncClient
from service.client_calls import TandemError
from service.pb import generation_pb2 as pb
from service.pb import generation_pb2_grpc as pb_grpc
from service.prompts import PromptEncoder
from service.settings import ServiceSettings
from telemetry import names
from tests.fakes import FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import text_request, wait_until
from tests.service.test_labels import LabelsSeen

PREFIX = "tandem.v1.GenerationService/"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the process traces while the test runs."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, *rest, **more: provider.get_tracer(name))
    return exporter


async def test_calls_and_spans_have_the_status_of_the_client(spans: InMemorySpanExporter) -> None:
    async with running_server(FakeEngine(step_seconds=0.005)) as running:
        async with AsyncClient(running.address) as client:
            await client.generate(text_request()).result()
            with pytest.raises(TandemError):
                await client.generate("x", temperature=-1).result()
            with pytest.raises(TandemError):
                await client.generate("x", max_tokens=4000, timeout_seconds=0.5).result()
            async with aclosing(client.generate("x", max_tokens=4000).events()) as events:
                await anext(events)
            await client.load()
            with pytest.raises(aio.AioRpcError):
                await running.stub.GetModel(pb.GetModelRequest(model="another"))
        await wait_until(lambda: len(_calls(spans)) == 6)
    expected = {
        (f"{PREFIX}Generate", "OK"),
        (f"{PREFIX}Generate", "INVALID_ARGUMENT"),
        (f"{PREFIX}Generate", "DEADLINE_EXCEEDED"),
        (f"{PREFIX}Generate", "CANCELLED"),
        (f"{PREFIX}GetLoad", "OK"),
        (f"{PREFIX}GetModel", "NOT_FOUND"),
    }
    assert set(_calls(spans)) == expected


def _calls(spans: InMemorySpanExporter) -> list[tuple[str, object]]:
    return [
        (span.name, span.attributes[names.ATTR_RPC_STATUS_CODE])
        for span in spans.get_finished_spans()
        if span.name.startswith(PREFIX)
    ]


async def test_a_connection_that_breaks_and_an_engine_that_dies_show_on_their_calls(
    spans: InMemorySpanExporter,
) -> None:
    engine = FakeEngine(step_seconds=0.005)
    request = text_request()
    request.stopping.max_tokens = 4000
    async with running_server(engine) as running:
        async with _wire_to(running.server.port) as (port, cut):
            channel = aio.insecure_channel(f"127.0.0.1:{port}")
            stream = pb_grpc.GenerationServiceStub(channel).Generate(request)
            await stream.read()
            cut()
            await wait_until(lambda: len(_calls(spans)) == 1)
            await channel.close()
        assert _calls(spans) == [(f"{PREFIX}Generate", "CANCELLED")]
        stream = running.stub.Generate(request)
        await stream.read()
        engine.crash = True
        with pytest.raises(aio.AioRpcError) as aborted:
            await _read_to_the_end(stream)
        assert aborted.value.code() is grpc.StatusCode.ABORTED
        await wait_until(lambda: len(_calls(spans)) == 2)
    assert _calls(spans)[1] == (f"{PREFIX}Generate", "ABORTED")
    for span in _of_kind(spans, SpanKind.SERVER):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes is not None
        status_code = span.attributes[names.ATTR_RPC_STATUS_CODE]
        assert span.attributes[names.ATTR_ERROR_TYPE] == status_code


async def _read_to_the_end(stream: Any) -> None:
    """A status comes only after what was sent before it has been read."""
    while await stream.read() is not aio.EOF:
        pass


@asynccontextmanager
async def _wire_to(port: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A port that leads to another, and what breaks all connections without a farewell."""
    ends: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        ends.extend((writer, far_writer))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    def cut() -> None:
        for end in ends:
            end.transport.abort()

    wire = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with wire:
        yield wire.sockets[0].getsockname()[1], cut
        cut()


async def test_a_method_that_does_not_exist_makes_no_span_and_no_series(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(
        "telemetry.tracing._call_duration.record",
        lambda value, attributes, **_: counted.append(attributes[names.ATTR_RPC_METHOD]),
    )
    async with running_server() as running:
        for number in range(20):
            call = running.channel.unary_unary(f"/{PREFIX}MadeUp{number}")
            with pytest.raises(aio.AioRpcError) as refused:
                await call(b"")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await running.stub.GetLoad(pb.GetLoadRequest())
        await wait_until(lambda: counted)
    assert counted == [f"{PREFIX}GetLoad"]
    assert [span.name for span in spans.get_finished_spans()] == counted


def test_every_method_with_every_status_fits_into_the_series_of_calls() -> None:
    files = (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    num_methods = sum(len(service.methods) for service in services)
    assert len(services) == len(files)
    assert 8 < num_methods * len(grpc.StatusCode) <= names.CALL_DURATION.max_series


async def test_spans_of_a_request_belong_to_its_call_and_hold_no_text(
    spans: InMemorySpanExporter,
) -> None:
    async with running_server() as running, AsyncClient(running.address) as client:
        await asyncio.gather(*(client.generate("private words").result() for _ in range(4)))
    calls = [span for span in spans.get_finished_spans() if span.name == f"{PREFIX}Generate"]
    assert len({span.context.trace_id for span in calls}) == 4
    for span in spans.get_finished_spans():
        assert "private" not in span.to_json()


async def test_client_spans_end_as_their_calls_do_and_are_the_parents_of_the_servers(
    spans: InMemorySpanExporter,
) -> None:
    async with running_server(FakeEngine(step_seconds=0.005)) as running:
        async with AsyncClient(running.address, trace_calls=True) as client:
            await client.generate(text_request()).result()
            with pytest.raises(TandemError):
                await client.generate("x", temperature=-1).result()
            with pytest.raises(TandemError):
                await client.generate("x", max_tokens=4000, timeout_seconds=0.5).result()
            async with aclosing(client.generate("x", max_tokens=4000).events()) as events:
                await anext(events)
            await client.load()
            await wait_until(lambda: len(_of_kind(spans, SpanKind.CLIENT)) == 5)
        await wait_until(lambda: len(_of_kind(spans, SpanKind.SERVER)) == 5)
    clients, servers = (_of_kind(spans, kind) for kind in (SpanKind.CLIENT, SpanKind.SERVER))
    statuses = [span.attributes[names.ATTR_RPC_STATUS_CODE] for span in clients]
    assert sorted(statuses) == ["CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "OK", "OK"]
    by_id = {span.context.span_id: span for span in clients}
    for server in servers:
        parent = by_id[server.parent.span_id]
        assert parent.name == server.name
        assert parent.context.trace_id == server.context.trace_id
    for span in clients:
        is_ok = span.attributes[names.ATTR_RPC_STATUS_CODE] == "OK"
        assert (span.status.status_code is StatusCode.ERROR) is not is_ok


async def test_baggage_of_the_caller_becomes_labels_of_its_request(
    spans: InMemorySpanExporter,
) -> None:
    recording = LabelsSeen()
    async with (
        running_server(recording=recording) as running,
        AsyncClient(running.address, trace_calls=True) as client,
    ):
        token = context.attach(baggage.set_baggage("tandem.label.team", "search"))
        try:
            await client.generate(text_request()).result()
        finally:
            context.detach(token)
        await client.generate(text_request()).result()
    assert recording.seen == [{"team": "search"}, {}]


async def test_health_and_reflection_have_spans_with_their_status_too(
    spans: InMemorySpanExporter,
) -> None:
    async with running_server(reflection=True) as running:
        channel = running.channel
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        watch.cancel()
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for _ in stub.ServerReflectionInfo(iter([listing])):
            pass
        await wait_until(lambda: len(spans.get_finished_spans()) == 3)
    found = {
        (span.name.rpartition("/")[2], (span.attributes or {})[names.ATTR_RPC_STATUS_CODE])
        for span in spans.get_finished_spans()
    }
    assert found == {("Check", "OK"), ("Watch", "CANCELLED"), ("ServerReflectionInfo", "OK")}


def _of_kind(spans: InMemorySpanExporter, kind: SpanKind) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.kind is kind]


async def test_what_a_call_logs_is_json_with_the_id_of_its_trace(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise RuntimeError("planted")

    root, stderr = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(PromptEncoder, "encode", fail)
    try:
        set_up_logs(ServiceSettings())
        async with running_server() as running:
            with pytest.raises(aio.AioRpcError):
                await running.stub.Tokenize(pb.TokenizeRequest(text="private words"))
            await wait_until(lambda: len(_calls(spans)) == 1)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    (line,) = [line for line in lines if line["level"] == "error"]
    (call,) = spans.get_finished_spans()
    assert line["trace_id"] == format(call.context.trace_id, "032x")
    assert line["error"]["type"] == "RuntimeError"
    assert "private words" not in stderr.getvalue()
