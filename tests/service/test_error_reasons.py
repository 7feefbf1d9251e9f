"""Every ErrorInfo reason: documented with its status, and made to happen to a client."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from google.rpc import error_details_pb2
from grpc import aio

from service import errors
from service.pb import generation_pb2 as pb
from tests.fakes import FAKE_INFO, FakeEngine
from tests.service.serving import MODEL_NAME, running_server
from tests.service.test_durability import SlowRecording
from tests.service.test_generate import text_request, wait_until
from tests.service.test_security import TOKEN, access_file, listed
from tests.service.test_status_table import detail, failure_of
from tests.tiny import tiny_tokenizer

GUIDE = Path(__file__).parents[2] / "protos" / "guide.md"
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


async def not_supported(_: Path) -> aio.AioRpcError:
    request = pb.GenerateRequest()
    request.chat.messages.add(role=pb.ROLE_USER, content="what time is it?")
    request.chat.tools.add(name="clock", parameters_json_schema="{}")
    async with running_server() as running:
        return await failure_of(running.stub.Generate(request))


async def model_not_found(_: Path) -> aio.AioRpcError:
    async with running_server() as running:
        return await failure_of(running.stub.Generate(text_request(model="other")))


async def id_is_live(_: Path) -> aio.AioRpcError:
    engine = FakeEngine()
    engine.may_run.clear()
    async with running_server(engine) as running:
        first = running.stub.Generate(text_request(request_id="twice"))
        await wait_until(lambda: running.server.num_live_requests == 1)
        error = await failure_of(running.stub.Generate(text_request(request_id="twice")))
        first.cancel()
        return error


async def client_too_slow(_: Path) -> aio.AioRpcError:
    """It stops reading until the server has given its row to others, and then reads on."""
    engine = FakeEngine(info=replace(FAKE_INFO, max_model_tokens=10**8), tokens_per_step=2000)
    async with running_server(
        engine, max_unread_messages=16, max_tokens=10**8, max_waiting_tokens=10**9
    ) as running:
        request = text_request()
        request.stopping.max_tokens = 10**7
        stalled = aiter(running.stub.Generate(request))
        await anext(stalled)
        await wait_until(lambda: running.server.num_live_requests == 0, 20)
        return await failure_of(stalled)


async def not_serving(_: Path) -> aio.AioRpcError:
    async with running_server(load=False) as running:
        return await failure_of(running.stub.Generate(text_request()))


async def deadline(_: Path) -> aio.AioRpcError:
    """The server's own maximum: a client's deadline is told by the client's side itself."""
    engine = FakeEngine()
    engine.may_run.clear()
    async with running_server(engine, max_deadline_seconds=0.05) as running:
        return await failure_of(running.stub.Generate(text_request()))


async def credentials_required(folder: Path) -> aio.AioRpcError:
    async with running_server(authenticator=listed(access_file(folder))) as running:
        return await failure_of(running.stub.Generate(text_request()))


async def not_allowed(folder: Path) -> aio.AioRpcError:
    access = listed(access_file(folder, 'models = ["another"]\n'))
    async with running_server(authenticator=access) as running:
        request = text_request(model=MODEL_NAME)
        return await failure_of(running.stub.Generate(request, metadata=AUTHORIZED))


async def engine_lost(_: Path) -> aio.AioRpcError:
    engine = FakeEngine()
    engine.crash = True
    async with running_server(engine) as running:
        return await failure_of(running.stub.Generate(text_request()))


async def engine_error(_: Path) -> aio.AioRpcError:
    token_id = tiny_tokenizer()("z")["input_ids"][0]
    request = pb.GenerateRequest()
    request.tokens.ids.append(token_id)
    async with running_server(FakeEngine(fail_token_id=token_id)) as running:
        return await failure_of(running.stub.Generate(request))


async def ledger_write_failed(_: Path) -> aio.AioRpcError:
    recording = SlowRecording()
    recording.durable.set_result(False)
    async with running_server(recording=recording, finish_when_recorded=True) as running:
        return await failure_of(running.stub.Generate(text_request()))


HAPPENS: dict[str, Callable[[Path], Awaitable[aio.AioRpcError]]] = {
    "FEATURE_NOT_SUPPORTED": not_supported,
    "MODEL_NOT_FOUND": model_not_found,
    "REQUEST_ID_LIVE": id_is_live,
    "CLIENT_TOO_SLOW": client_too_slow,
    "NOT_SERVING": not_serving,
    "DEADLINE": deadline,
    "CREDENTIALS_REQUIRED": credentials_required,
    "NOT_ALLOWED": not_allowed,
    "ENGINE_LOST": engine_lost,
    "ENGINE_ERROR": engine_error,
    "LEDGER_WRITE_FAILED": ledger_write_failed,
}


def documented() -> dict[str, set[str]]:
    """Reason -> the codes of the rows of the status table that name it."""
    found: dict[str, set[str]] = {}
    for line in GUIDE.read_text("utf-8").splitlines():
        for reason in re.findall(r"`ErrorInfo` `([A-Z_]+)`", line):
            code = line.split("|")[2].strip().strip("`")
            found.setdefault(reason, set()).add(code)
    return found


def test_every_reason_that_the_service_has_is_documented_and_provoked_here() -> None:
    source = Path(errors.__file__).read_text("utf-8")
    reasons = set(re.findall(r'_reason\("([A-Z_]+)"', source))
    assert reasons == set(HAPPENS) == set(documented())


@pytest.mark.parametrize("reason", HAPPENS)
async def test_a_reason_comes_with_its_status(reason: str, tmp_path: Path) -> None:
    error = await HAPPENS[reason](tmp_path)
    info = detail(error, error_details_pb2.ErrorInfo)
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason, errors.ERROR_DOMAIN)
    assert {error.code().name} == documented()[reason]
