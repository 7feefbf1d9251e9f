"""What callers send and get leaves no word in the log, at DEBUG, nor in a span; nor do secrets."""

import asyncio
import hashlib
import io
import json
import logging
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from opentelemetry import trace

from service.async_client import AsyncClient
from service.calls import CallTraceFilter
from service.client_calls import Credentials, TandemError
from service.pb import generation_pb2 as pb
from service.prompts import PromptEncoder
from service.security import ListedAccess
from telemetry.ledger.session import open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.logs import configure_logging
from tests.engine.driver import tiny_engine
from tests.service.serving import running_server
from tests.service.test_generate import text_request
from tests.telemetry.recording_rig import recording_rig

PROMPT, OUTPUT, LABEL, SECRET = "quokkaprompt", "quokkaoutput", "quokkalabel", "quokkasecret"
MARK, NAME = "quokka", "quokkaname"
PROMPT_TOKENS = (301, 302, 303, 304, 301, 302, 303, 304)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that the process logs while the test runs, down to DEBUG."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    configure_logging("debug", stream=stream, filters=[CallTraceFilter()])
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def _fails(call: Any) -> None:
    with pytest.raises((aio.AioRpcError, TandemError)):
        await call


async def _use(address: str, stub: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of every kind and outcome that carry words; the texts that came back."""
    metadata = (
        ("authorization", f"Bearer {SECRET}"),
        ("baggage", f"tandem.label.team={LABEL}"),
    )
    labels = {"team": LABEL}
    async with AsyncClient(address, credentials=Credentials(token=SECRET)) as client:
        chat = [{"role": "user", "content": PROMPT}]
        for prompt in (PROMPT, chat, PROMPT_TOKENS):
            await client.generate(prompt, labels=labels, max_tokens=8, stop=[PROMPT]).result()
        async with aclosing(client.generate(PROMPT, max_tokens=400).events()) as events:
            await anext(events)
        late = client.generate(PROMPT, max_tokens=400, ignore_eos=True, timeout_seconds=0.02)
        await _fails(late.result())
        for wrong in (
            {"temperature": -1.0},
            {"stop": [PROMPT * 900]},
            {"model": NAME},
            {"drafter": NAME},
            {"labels": {LABEL * 90: LABEL}},
        ):
            await _fails(client.generate(PROMPT, **wrong).result())
    structured = text_request(PROMPT)
    structured.stopping.max_tokens = 60
    structured.structured_output.regex = OUTPUT
    texts = [e.delta.text async for e in stub.Generate(structured, metadata=metadata)]
    structured.structured_output.regex = f"({PROMPT}"
    await _fails(stub.Generate(structured, metadata=metadata).read())
    unary = pb.GenerateUnaryRequest(request=text_request(PROMPT))
    await stub.GenerateUnary(unary, metadata=metadata)
    tokens = await stub.Tokenize(pb.TokenizeRequest(text=PROMPT), metadata=metadata)
    known = pb.DetokenizeRequest(token_ids=tokens.token_ids)
    texts.append((await stub.Detokenize(known, metadata=metadata)).text)
    wrong_token = (("authorization", f"Bearer {SECRET}x"),)
    await _fails(stub.Tokenize(pb.TokenizeRequest(text=PROMPT), metadata=wrong_token))

    async def fail(self: object, prompt: object) -> None:
        raise RuntimeError(f"cannot read {prompt}")

    monkeypatch.setattr(PromptEncoder, "encode", fail)
    await _fails(stub.Generate(text_request(PROMPT), metadata=metadata).read())
    await _fails(stub.Tokenize(pb.TokenizeRequest(text=PROMPT), metadata=metadata))
    return texts


async def test_no_word_of_a_caller_is_logged_traced_or_filed(
    tmp_path: Path, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = tmp_path / "access.toml"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    access.write_text(f'[tenants.{MARK}]\ntoken_sha256 = ["{digest}"]\n')
    engine = tiny_engine()
    with recording_rig(tmp_path, step_span_every=1) as rig:
        provider = rig.telemetry.tracer_provider
        assert provider is not None
        monkeypatch.setattr(trace, "get_tracer", lambda name, *_, **__: provider.get_tracer(name))
        async with running_server(
            recording=rig.recorder,
            build_engine=lambda: engine,
            authenticator=ListedAccess(access, health_is_open=False),
            grace_seconds=5.0,
        ) as running:
            texts = await _use(running.address, running.stub, monkeypatch)
            await asyncio.to_thread(rig.recorder._writer.wait_until_written, 10)
    written = "".join(texts)
    assert OUTPUT in written
    assert PROMPT in written
    spans = rig.spans.get_finished_spans()
    assert {"queue", "prefill", "decode", "engine.step"} < {span.name for span in spans}
    told = log.getvalue()
    assert sum(line["level"] == "error" for line in _lines(log)) == 2, "of the calls that failed"
    shown = [told, *(span.to_json() for span in spans)]
    filed = b"".join(p.read_bytes() for p in tmp_path.glob("ledger.db*")).decode(errors="replace")
    assert LABEL in filed
    assert NAME in filed, "why a request was refused is filed; neither is content"
    for text in shown:
        assert MARK not in text
        assert "301, 302" not in text
    for word in (PROMPT, OUTPUT, SECRET):
        assert word not in filed


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_that_quotes_a_request_is_told_by_its_kind_and_place(as_json: bool) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    configure_logging("debug", as_json=as_json, stream=stream)
    try:
        try:
            raise KeyError(PROMPT)
        except KeyError as error:
            raise ValueError(f"no {PROMPT}") from error
    except ValueError as error:
        logging.getLogger("a").error("x", exc_info=error, extra={"hides_messages": True})
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert PROMPT not in stream.getvalue()
    assert stream.getvalue().rindex("KeyError") < stream.getvalue().rindex("ValueError")
    assert "test_no_content.py" in stream.getvalue()


async def _until(condition: Any) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in time")


@pytest.mark.parametrize(
    ("table", "told"), [("nowhere", "database is away"), ("tenants", "set aside a record")]
)
async def test_what_a_database_complains_about_is_told_without_the_row(
    tmp_path: Path, log: io.StringIO, monkeypatch: pytest.MonkeyPatch, table: str, told: str
) -> None:
    with recording_rig(tmp_path) as rig:
        assert rig.recorder._writer.wait_until_written(10)
        engine = open_ledger(rig.url)

        def refuse(self: LedgerStore, records: Any, *, may_exist: bool) -> None:
            with engine.begin() as connection:
                statement = f"INSERT INTO {table} (tenant_key) VALUES (?)"  # noqa: S608
                connection.exec_driver_sql(statement, (LABEL,))

        with monkeypatch.context() as patch:
            patch.setattr(LedgerStore, "write", refuse)
            rig.finish(rig.begin())
            await _until(lambda: told in log.getvalue())
        engine.dispose()
    assert LABEL not in log.getvalue()


async def test_the_password_of_a_database_that_is_away_is_not_logged(
    tmp_path: Path, log: io.StringIO
) -> None:
    url = f"postgresql://tandem:{SECRET}@127.0.0.1:1/ledger"
    with recording_rig(tmp_path, url=url) as rig:
        rig.finish(rig.begin())
        await _until(lambda: "database is away" in log.getvalue())
    assert SECRET not in log.getvalue()
