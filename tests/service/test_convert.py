"""What a message means, field by field, where it is more than a copy."""

from engine.request import AcceptanceRule, SamplingParams, SpeculationMode
from service.convert.requests import read_generate_request
from service.convert.responses import write_duration
from service.orders import ChatPrompt, GenerationOrder, TextPrompt
from service.pb import generation_pb2 as pb


def read(message: pb.GenerateRequest) -> GenerationOrder:
    return read_generate_request(message, default_max_tokens=16, max_completions=4)


def test_what_is_left_out_is_the_documented_default() -> None:
    order = read(pb.GenerateRequest(text="x"))
    assert order.prompt == TextPrompt("x", add_special_tokens=True)
    assert order.sampling == SamplingParams()
    assert order.stopping.max_tokens == 16
    assert order.stopping.time_limit_seconds is None
    assert order.speculation.mode is SpeculationMode.AUTO
    assert order.speculation.max_draft_tokens is None
    assert order.sampling.acceptance_rule is AcceptanceRule.COUPLED
    assert order.num_completions == 1
    assert order.seed is None
    assert order.request_id


def test_zero_that_is_sent_is_zero() -> None:
    message = pb.GenerateRequest(text="x")
    message.sampling.temperature = 0
    message.sampling.seed = 0
    message.speculation.max_draft_tokens = 0
    message.output.top_logprobs = 0
    order = read(message)
    assert order.sampling.is_greedy
    assert order.seed == 0
    assert order.speculation.max_draft_tokens == 0
    assert order.sampling.num_top_logprobs == 0


def test_32_bit_fractions_are_the_decimals_that_were_meant() -> None:
    message = pb.GenerateRequest(text="x")
    message.sampling.temperature = 0.7
    message.sampling.top_p = 0.9
    message.sampling.logit_bias[5] = -1.1
    order = read(message)
    assert (order.sampling.temperature, order.sampling.top_p) == (0.7, 0.9)
    assert order.sampling.logit_bias == ((5, -1.1),)


def test_tools_and_their_calls_are_what_chat_templates_expect() -> None:
    message = pb.GenerateRequest()
    call = pb.ToolCall(id="1", name="add", arguments_json='{"a": 1}')
    message.chat.messages.add(role=pb.ROLE_ASSISTANT, tool_calls=[call])
    message.chat.messages.add(role=pb.ROLE_TOOL, content="2", tool_call_id="1")
    message.chat.tools.add(
        name="add", description="adds", parameters_json_schema='{"type": "object"}'
    )
    prompt = read(message).prompt
    assert isinstance(prompt, ChatPrompt)
    function = {"name": "add", "arguments": {"a": 1}}
    assert prompt.messages[0]["tool_calls"] == [
        {"type": "function", "id": "1", "function": function}
    ]
    assert prompt.messages[1] == {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert prompt.tools[0]["function"]["parameters"] == {"type": "object"}


def test_durations_keep_their_nanoseconds_and_carry() -> None:
    assert write_duration(1.9999999999).seconds == 2
    duration = write_duration(0.25)
    assert (duration.seconds, duration.nanos) == (0, 250_000_000)
