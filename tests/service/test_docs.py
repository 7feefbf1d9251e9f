"""The published description of the interface is that of the proto, and its examples work."""

import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import grpc
from grpc import aio

from service.pb import generation_pb2 as pb
from service.pb import generation_pb2_grpc as pb_grpc
from tests.service.serving import running_server
from tests.service.test_generate import text_request

PROTOS = Path(__file__).parents[2] / "protos"
README = (PROTOS / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, language
    return found.group(1)


def test_reference_is_what_the_proto_says(tmp_path: Path) -> None:
    fresh = tmp_path / "README.md"
    subprocess.run([sys.executable, PROTOS / "document.py", fresh], check=True)
    assert fresh.read_text(encoding="utf-8") == README, "run: make docs"


def test_every_field_is_described_or_plain() -> None:
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert f"| `{field.name}` |" in README, field.full_name


def test_status_table_names_every_code_that_the_service_can_send() -> None:
    source = (PROTOS.parent / "service" / "errors.py").read_text(encoding="utf-8")
    codes = set(re.findall(r"grpc\.StatusCode\.([A-Z_]+)", source))
    assert len(codes) > 10
    assert {code for code in codes if f"| `{code}` |" not in README} == set()


async def test_retry_policy_is_one_that_grpc_takes_and_follows() -> None:
    options = [("grpc.service_config", json.dumps(json.loads(block("json"))))]
    async with (
        running_server(load=False) as running,
        aio.insecure_channel(running.address, options) as channel,
    ):
        call = pb_grpc.GenerationServiceStub(channel).Generate(text_request())
        waiting = asyncio.ensure_future(_last(call))
        await asyncio.sleep(0.05)
        await running.server.load()
        assert (await waiting).WhichOneof("event") == "finished"
        assert await call.code() is grpc.StatusCode.OK


async def _last(call: object) -> pb.GenerateResponse:
    return [event async for event in call][-1]


async def test_python_example_runs() -> None:
    async with running_server() as running:
        code = block("python").replace("127.0.0.1:50051", running.address)
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            await asyncio.to_thread(exec, compile(code, "example", "exec"), {})
    assert shown.getvalue().endswith("length\n")


def test_grpcurl_example_is_a_request() -> None:
    from google.protobuf import json_format

    body = re.search(r"-d '(.*?)'", block("console"))
    assert body
    request = json_format.Parse(body.group(1), pb.GenerateRequest())
    assert request.stopping.max_tokens == 20
