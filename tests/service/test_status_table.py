"""Every row of the status table in protos/tandem/v1/generation.proto, with its details."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from service.pb import generation_pb2 as pb
from tests.fakes import FAKE_INFO, FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import text_request, wait_until
from tests.tiny import tiny_tokenizer

LOOKUP = "prompt_lookup"

Change = Callable[[pb.GenerateRequest], object]


async def failure_of(call: object) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def detail(error: aio.AioRpcError, kind: type) -> object:
    """The one google.rpc detail of that kind; fails when there is none."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    found = [d for d in status.details if d.Is(kind.DESCRIPTOR)]
    assert len(found) == 1, status
    return kind.FromString(found[0].value)


def violated_field(error: aio.AioRpcError) -> str:
    bad = detail(error, error_details_pb2.BadRequest)
    return str(bad.field_violations[0].field)


WRONG: list[tuple[str, Change]] = [
    ("prompt", lambda r: r.ClearField("text")),
    ("prompt", lambda r: setattr(r, "text", "")),
    ("prompt", lambda r: r.tokens.ids.append(FAKE_INFO.vocab_size)),
    ("prompt", lambda r: r.tokens.SetInParent()),
    ("prompt", lambda r: r.tokens.ids.extend([2] * FAKE_INFO.max_model_tokens)),
    ("text", lambda r: setattr(r, "text", "x" * 5000)),
    ("request_id", lambda r: setattr(r, "request_id", "two words")),
    ("request_id", lambda r: setattr(r, "request_id", "x" * 129)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", -1)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", float("nan"))),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", float("inf"))),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", 0)),
    ("sampling.min_p", lambda r: setattr(r.sampling, "min_p", 2)),
    ("sampling.typical_p", lambda r: setattr(r.sampling, "typical_p", 0)),
    ("sampling.repetition_penalty", lambda r: setattr(r.sampling, "repetition_penalty", 0)),
    ("sampling.presence_penalty", lambda r: setattr(r.sampling, "presence_penalty", 1e9)),
    ("sampling.logit_bias", lambda r: r.sampling.logit_bias.update(dict.fromkeys(range(301), 1))),
    ("sampling.logit_bias[3]", lambda r: r.sampling.logit_bias.update({3: float("nan")})),
    ("sampling.logit_bias", lambda r: r.sampling.logit_bias.update({2**31: 1})),
    ("sampling.banned_token_ids", lambda r: r.sampling.banned_token_ids.append(2**31)),
    ("sampling.seed", lambda r: setattr(r.sampling, "seed", 2**63)),
    ("sampling.acceptance_rule", lambda r: setattr(r.sampling, "acceptance_rule", 77)),
    ("stopping.max_tokens", lambda r: setattr(r.stopping, "max_tokens", 0)),
    ("stopping.max_tokens", lambda r: setattr(r.stopping, "max_tokens", 2_000_000)),
    ("stopping.min_tokens", lambda r: setattr(r.stopping, "min_tokens", 11)),
    ("stopping.stop_strings", lambda r: r.stopping.stop_strings.extend("abcdefghi")),
    ("stopping.stop_strings[0]", lambda r: r.stopping.stop_strings.append("")),
    ("stopping.stop_token_ids", lambda r: r.stopping.stop_token_ids.extend([2] * 33)),
    ("stopping.time_limit", lambda r: r.stopping.time_limit.FromSeconds(-1)),
    ("speculation.mode", lambda r: setattr(r.speculation, "mode", 9)),
    ("speculation.drafter", lambda r: setattr(r.speculation, "drafter", "oracle")),
    ("speculation.drafters[1]", lambda r: r.speculation.drafters.extend([LOOKUP, "oracle"])),
    ("speculation.drafters[1]", lambda r: r.speculation.drafters.extend([LOOKUP, LOOKUP])),
    ("speculation.drafters[0]", lambda r: r.speculation.drafters.extend(["", LOOKUP])),
    (
        "speculation.drafters",
        lambda r: r.speculation.MergeFrom(pb.SpeculationOptions(drafter=LOOKUP, drafters=[LOOKUP])),
    ),
    ("speculation.max_draft_tokens", lambda r: setattr(r.speculation, "max_draft_tokens", 5)),
    ("output.top_logprobs", lambda r: setattr(r.output, "top_logprobs", 21)),
    ("n", lambda r: setattr(r, "n", 0)),
    ("n", lambda r: setattr(r, "n", 10_000)),
    ("priority", lambda r: setattr(r, "priority", 101)),
    ("labels", lambda r: r.labels.update({str(i): "" for i in range(17)})),
    ("labels", lambda r: r.labels.update({"k" * 65: "v"})),
    ("labels[k]", lambda r: r.labels.update({"k": "v" * 65})),
    ("chat.messages", lambda r: r.chat.SetInParent()),
    ("chat.messages[0].role", lambda r: r.chat.messages.add(content="hello")),
    ("chat.messages[0].content", lambda r: r.chat.messages.add(role=pb.ROLE_USER)),
    (
        "chat.messages[1].content",
        lambda r: (
            r.chat.messages.add(role=pb.ROLE_USER, content="hello"),
            r.chat.messages.add(role=pb.ROLE_USER, content=" \n"),
        ),
    ),
    (
        "chat.messages[0].content",
        lambda r: r.chat.messages.add(role=pb.ROLE_USER, content="<eos>"),
    ),
    (
        "chat.tools[0].parameters_json_schema",
        lambda r: (
            r.chat.messages.add(role=pb.ROLE_USER, content="x"),
            r.chat.tools.add(name="f", parameters_json_schema="["),
        ),
    ),
    ("structured_output", lambda r: r.structured_output.SetInParent()),
    ("structured_output.regex", lambda r: setattr(r.structured_output, "regex", "")),
    ("structured_output.choice", lambda r: r.structured_output.choice.SetInParent()),
    ("structured_output.json_object", lambda r: setattr(r.structured_output, "json_object", False)),
    ("resume_token_ids", lambda r: r.resume_token_ids.extend([2] * 10)),
    (
        "resume_token_ids",
        lambda r: (r.resume_token_ids.append(2), r.sampling.ClearField("seed")),
    ),
    (
        "resume_token_ids",
        lambda r: (r.resume_token_ids.append(2), r.stopping.stop_strings.append("x")),
    ),
]


async def test_wrong_values_are_invalid_argument_with_the_path_of_the_field() -> None:
    async with running_server(max_prompt_bytes=4096) as running:
        neighbour = running.stub.Generate(text_request(request_id="neighbour"))
        for field, change in WRONG:
            request = text_request()
            change(request)
            error = await failure_of(running.stub.Generate(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, error)
            assert violated_field(error) == field, error
        assert [e async for e in neighbour][-1].WhichOneof("event") == "finished"
    codes = [code for _, code in running.recording.rows]
    assert codes.count("INVALID_ARGUMENT") == len(WRONG)
    assert not running.recording.open_requests


async def test_unary_names_the_same_fields() -> None:
    async with running_server() as running:
        request = text_request()
        request.sampling.top_p = 7
        with pytest.raises(aio.AioRpcError) as caught:
            await running.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
    assert violated_field(caught.value) == "sampling.top_p"


async def test_what_the_engine_refuses_is_invalid_argument_too() -> None:
    token_id = tiny_tokenizer()("q")["input_ids"][0]
    async with running_server(FakeEngine(refuse_token_id=token_id)) as running:
        request = pb.GenerateRequest(request_id="refused")
        request.tokens.ids.append(token_id)
        error = await failure_of(running.stub.Generate(request))
        assert running.server.num_live_requests == 0
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error) == "sampling.typical_p"
    assert running.recording.rows == [("refused", "INVALID_ARGUMENT")]


async def test_other_model_is_not_found() -> None:
    async with running_server() as running:
        error = await failure_of(running.stub.Generate(text_request(model="other")))
        with pytest.raises(aio.AioRpcError) as caught:
            await running.stub.GetModel(pb.GetModelRequest(model="other"))
    assert error.code() is caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert detail(error, error_details_pb2.ErrorInfo).reason == "MODEL_NOT_FOUND"


async def test_second_live_request_with_an_id_already_exists() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with running_server(engine) as running:
        request = text_request(request_id="twice")
        request.stopping.max_tokens = 1000
        first = running.stub.Generate(request)
        await first.read()
        error = await failure_of(running.stub.Generate(request))
        first.cancel()
        await wait_until(lambda: running.server.num_live_requests == 0)
        request.stopping.max_tokens = 2
        again = [event async for event in running.stub.Generate(request)]
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert detail(error, error_details_pb2.ErrorInfo).reason == "REQUEST_ID_LIVE"
    assert again[-1].WhichOneof("event") == "finished"


async def test_speculation_without_a_drafter_is_failed_precondition() -> None:
    from dataclasses import replace

    async with running_server(FakeEngine(info=replace(FAKE_INFO, drafters=()))) as running:
        request = text_request()
        request.speculation.mode = pb.SpeculationOptions.MODE_ON
        error = await failure_of(running.stub.Generate(request))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    failure = detail(error, error_details_pb2.PreconditionFailure)
    assert failure.violations[0].subject == "speculation"


async def test_what_the_model_cannot_do_is_unimplemented_by_name() -> None:
    async with running_server() as running:
        request = pb.GenerateRequest()
        request.chat.messages.add(role=pb.ROLE_USER, content="what time is it?")
        request.chat.tools.add(name="clock", parameters_json_schema="{}")
        error = await failure_of(running.stub.Generate(request))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info.metadata["field"] == "chat.tools"


async def test_full_queue_is_resource_exhausted_with_retry_info() -> None:
    engine = FakeEngine(num_rows=1)
    async with running_server(engine, max_num_rows=1, max_waiting_requests=1) as running:
        engine.may_run.clear()
        calls = [running.stub.Generate(text_request(request_id=str(i))) for i in range(2)]
        for call in calls:
            asyncio.ensure_future(call.read())  # noqa: RUF006 - it is read again below
        await wait_until(lambda: running.server.num_live_requests == 2)
        error = await failure_of(running.stub.Generate(text_request(request_id="third")))
        for call in calls:
            call.cancel()
        engine.may_run.set()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.QuotaFailure)
    retry = detail(error, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToNanoseconds() > 0
    assert ("third", "RESOURCE_EXHAUSTED") in running.recording.rows


async def test_message_beyond_the_transport_limit_is_resource_exhausted() -> None:
    async with running_server(max_request_bytes=4096) as running:
        error = await failure_of(running.stub.Generate(text_request("x" * 10_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_unavailable_while_loading() -> None:
    async with running_server(load=False) as running:
        error = await failure_of(running.stub.Generate(text_request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.RetryInfo)


async def test_deadline_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    engine = FakeEngine(num_rows=1, step_seconds=0.01, tokens_per_step=1)
    async with running_server(engine, max_num_rows=1) as running:
        long = text_request(request_id="long")
        long.stopping.max_tokens = 4000
        first = running.stub.Generate(long)
        for _ in range(5):
            await first.read()
        error = await failure_of(running.stub.Generate(text_request(request_id="l"), timeout=2))
        num_live = running.server.num_live_requests
        first.cancel()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "wait" in error.details()
    assert num_live == 1


async def test_request_that_fails_in_the_engine_is_internal_and_alone() -> None:
    token_id = tiny_tokenizer()("z")["input_ids"][0]
    async with running_server(FakeEngine(fail_token_id=token_id)) as running:
        bad = pb.GenerateRequest(request_id="bad")
        bad.tokens.ids.append(token_id)
        error, good = await asyncio.gather(
            failure_of(running.stub.Generate(bad)),
            _read(running.stub.Generate(text_request(request_id="good"))),
        )
    assert error.code() is grpc.StatusCode.INTERNAL
    assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_ERROR"
    assert error.details() == "the engine failed on this request"  # and nothing of the inside
    assert good[-1].WhichOneof("event") == "finished"
    assert sorted(running.recording.rows) == [("bad", "INTERNAL"), ("good", "OK")]


async def test_crashed_engine_aborts_streams_and_refuses_new_ones() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with running_server(engine) as running:
        request = text_request(request_id="lost")
        request.stopping.max_tokens = 4000
        call = aiter(running.stub.Generate(request))
        await anext(call)
        engine.crash = True
        error = await failure_of(call)
        later = await failure_of(running.stub.Generate(text_request()))
        assert running.server.failed.is_set()
    assert error.code() is grpc.StatusCode.ABORTED
    assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_LOST"
    assert later.code() is grpc.StatusCode.UNAVAILABLE
    assert ("lost", "ABORTED") in running.recording.rows


async def _read(call: object) -> list[pb.GenerateResponse]:
    return [event async for event in call]
