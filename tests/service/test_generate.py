"""What a client sees of a generation."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest
from grpc import aio

from engine.request import GenerationRequest
from service.client_calls import build_request
from service.pb import generation_pb2 as pb
from tests.fakes import FAKE_INFO, FakeEngine, fake_token
from tests.service.serving import MODEL_NAME, Running, running_server
from tests.tiny import tiny_tokenizer


def text_request(text: str = "the quick brown fox", **fields: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=text, **fields)
    request.sampling.seed = 5
    request.stopping.max_tokens = 10
    return request


async def wait_until(condition: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def read_all(running: Running, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [event async for event in running.stub.Generate(request)]


async def test_started_says_how_the_request_is_drafted_for() -> None:
    request = text_request()
    async with running_server() as running:
        chosen = (await read_all(running, request))[0].started
        request.speculation.mode = pb.SpeculationOptions.MODE_ON
        request.speculation.max_draft_tokens = 2
        request.speculation.drafter = "prompt_lookup"
        request.sampling.acceptance_rule = pb.ACCEPTANCE_RULE_REJECTION
        asked = (await read_all(running, request))[0].started
        off = text_request()
        off.speculation.mode = pb.SpeculationOptions.MODE_OFF
        plain = (await read_all(running, off))[0].started.speculation
    assert chosen.speculation == pb.SpeculationInForce(
        mode=pb.SpeculationOptions.MODE_AUTO, max_draft_tokens=4, drafters=["prompt_lookup"]
    )
    assert chosen.acceptance_rule == pb.ACCEPTANCE_RULE_COUPLED
    assert chosen.layout == "ragged"
    assert asked.speculation == pb.SpeculationInForce(
        mode=pb.SpeculationOptions.MODE_ON, max_draft_tokens=2, drafters=["prompt_lookup"]
    )
    assert asked.acceptance_rule == pb.ACCEPTANCE_RULE_REJECTION
    assert plain == pb.SpeculationInForce(mode=pb.SpeculationOptions.MODE_OFF)


async def test_a_fall_back_list_is_kept_in_its_order() -> None:
    """From the Python client's option to `started` and to the engine's request."""
    names = ("prompt_lookup", "suffix", "draft_model")
    engine = FakeEngine(info=replace(FAKE_INFO, drafters=names))
    wanted = build_request("hello", max_tokens=3, drafters=("draft_model", "prompt_lookup"))
    seen: list[GenerationRequest] = []
    submit = engine.submit
    engine.submit = lambda request: (seen.append(request), submit(request))[1]  # type: ignore[method-assign]
    async with running_server(engine) as running:
        started = (await read_all(running, wanted))[0].started
    assert list(started.speculation.drafters) == ["draft_model", "prompt_lookup"]
    assert seen[-1].speculation.named_drafters == ("draft_model", "prompt_lookup")


async def test_stream_is_started_then_deltas_then_one_finished() -> None:
    async with running_server() as running:
        events = await read_all(running, text_request(request_id="mine"))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "delta", "delta", "delta", "delta", "finished"]
    started, finished = events[0].started, events[-1].finished
    assert (started.request_id, started.model, started.seed) == ("mine", MODEL_NAME, 5)
    assert started.guarantee == pb.GUARANTEE_BIT_EXACT
    assert started.max_tokens == 10
    assert finished.usage.num_output_tokens == 10
    assert finished.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.choices[0].cost.nano_usd == 10
    assert not finished.choices[0].cost.HasField("microjoules")
    assert running.recording.rows == [("mine", "OK")]


async def test_deltas_number_their_tokens_and_join_to_the_text_of_all_tokens() -> None:
    async with running_server() as running:
        events = await read_all(running, text_request())
    deltas = [event.delta for event in events[1:-1]]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    num_prompt_tokens = events[0].started.num_prompt_tokens
    assert token_ids == [fake_token(5, num_prompt_tokens + i) for i in range(10)]
    index = 0
    for delta in deltas:
        assert delta.first_token_index == index
        index += len(delta.token_ids)
    assert "".join(delta.text for delta in deltas) == tiny_tokenizer().decode(token_ids)


async def test_unary_answer_equals_the_stream() -> None:
    async with running_server() as running:
        events = await read_all(running, text_request())
        answer = await running.stub.GenerateUnary(pb.GenerateUnaryRequest(request=text_request()))
    completion = answer.completions[0]
    deltas = [event.delta for event in events[1:-1]]
    assert completion.text == "".join(delta.text for delta in deltas)
    assert list(completion.token_ids) == [t for delta in deltas for t in delta.token_ids]
    assert completion.result.finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.usage == events[-1].finished.usage


async def test_several_completions_have_seeds_of_their_own() -> None:
    async with running_server() as running:
        request = text_request(n=3, request_id="many")
        answer = await running.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
        num_live = running.server.num_live_requests
    start = answer.started.num_prompt_tokens
    assert [list(c.token_ids) for c in answer.completions] == [
        [fake_token(5 + index, start + i) for i in range(10)] for index in range(3)
    ]
    assert answer.usage.num_output_tokens == 30
    assert num_live == 0
    assert sorted(running.recording.rows) == [("many", "OK"), ("many#1", "OK"), ("many#2", "OK")]


async def test_a_seed_is_drawn_and_told_when_none_is_given() -> None:
    async with running_server() as running:
        request = text_request()
        request.sampling.ClearField("seed")
        seeds = {(await read_all(running, request))[0].started.seed for _ in range(3)}
    assert len(seeds) == 3


async def test_resumed_stream_goes_on_where_the_broken_one_ended() -> None:
    async with running_server() as running:
        whole = await read_all(running, text_request())
        tokens = [t for event in whole for t in event.delta.token_ids]
        text = "".join(event.delta.text for event in whole)
        request = text_request()
        request.resume_token_ids.extend(tokens[:4])
        rest = await read_all(running, request)
    assert [t for event in rest for t in event.delta.token_ids] == tokens[4:]
    assert rest[1].delta.first_token_index == 4
    assert rest[0].started.resumed_text + "".join(e.delta.text for e in rest) == text
    assert rest[-1].finished.usage.num_output_tokens == 10


async def test_time_limit_keeps_the_output_and_ends_ok() -> None:
    async with running_server(FakeEngine(step_seconds=0.02)) as running:
        request = text_request()
        request.stopping.max_tokens = 4000
        request.stopping.time_limit.FromMilliseconds(100)
        events = await read_all(running, request)
    assert events[-1].finished.choices[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert events[-1].finished.usage.num_output_tokens > 0


async def test_request_id_comes_back_in_the_initial_metadata() -> None:
    async with running_server() as running:
        call = running.stub.Generate(text_request(request_id="abc"))
        metadata = dict(await call.initial_metadata())
        call.cancel()
    assert metadata["x-request-id"] == "abc"


async def test_cancelled_stream_frees_its_row_within_one_step() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with running_server(engine) as running:
        request = text_request(request_id="gone")
        request.stopping.max_tokens = 4000
        call = running.stub.Generate(request)
        await call.read()
        await call.read()
        call.cancel()
        await wait_until(lambda: not engine.has_work())
        await wait_until(lambda: running.server.num_live_requests == 0)
        assert running.recording.rows == [("gone", "CANCELLED")]
        neighbour = await read_all(running, text_request())
    assert neighbour[-1].finished.usage.num_output_tokens == 10


async def test_passed_deadline_frees_the_row_and_is_recorded_as_such() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with running_server(engine) as running:
        request = text_request(request_id="late")
        request.stopping.max_tokens = 4000
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in running.stub.Generate(request, timeout=0.2):
                pass
        await wait_until(lambda: running.server.num_live_requests == 0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert running.recording.rows == [("late", "DEADLINE_EXCEEDED")]


async def test_server_cuts_deadlines_to_its_own_maximum() -> None:
    engine = FakeEngine(step_seconds=0.01)
    async with running_server(engine, max_deadline_seconds=0.2) as running:
        request = text_request()
        request.stopping.max_tokens = 4000
        with pytest.raises(aio.AioRpcError) as caught:
            await read_all(running, request)
        await wait_until(lambda: not engine.has_work())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_reader_that_does_not_read_loses_its_row_and_slows_nobody() -> None:
    engine = FakeEngine(
        info=replace(FAKE_INFO, max_model_tokens=10**8), tokens_per_step=2000, step_seconds=0.002
    )
    async with running_server(
        engine, max_unread_messages=64, max_tokens=10**8, max_waiting_tokens=10**9
    ) as running:
        request = text_request(request_id="stalled")
        request.stopping.max_tokens = 10**7
        stalled = running.stub.Generate(request)
        await stalled.read()
        neighbour = await read_all(running, text_request(request_id="neighbour"))
        await wait_until(lambda: running.server.num_live_requests == 0, 20)
        stalled.cancel()
    assert ("stalled", "RESOURCE_EXHAUSTED") in running.recording.rows
    assert neighbour[-1].finished.usage.num_output_tokens == 10


async def test_chat_is_rendered_by_the_models_template() -> None:
    async with running_server() as running:
        request = pb.GenerateRequest()
        request.chat.messages.add(role=pb.ROLE_USER, content="hello")
        request.output.prompt_token_ids = True
        request.stopping.max_tokens = 1
        events = await read_all(running, request)
    text = tiny_tokenizer().decode(list(events[0].started.prompt_token_ids))
    assert text == "<|start|>user\nhello<eos><|start|>assistant\n"


async def test_control_tokens_in_text_are_ordinary_text() -> None:
    async with running_server() as running:
        answer = await running.stub.Tokenize(pb.TokenizeRequest(text="a<eos>b"))
        back = await running.stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
        count = await running.stub.Tokenize(pb.TokenizeRequest(text="a<eos>b", count_only=True))
    assert 1 not in answer.token_ids
    assert back.text == "a<eos>b"
    assert count.num_tokens == len(answer.token_ids)
    assert not count.token_ids
