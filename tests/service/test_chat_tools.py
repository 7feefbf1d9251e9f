"""A conversation with tools, over gRPC: the model's template gets them as it expects them."""

import copy
from collections.abc import Callable
from functools import partial

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from transformers import PreTrainedTokenizerBase

from service.pb import generation_pb2 as pb
from tests.service.serving import running_server
from tests.service.test_generate import read_all
from tests.service.test_status_table import detail
from tests.tiny import tiny_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['type'] }} {{ tool['function'] | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] }}({{ c['function']['arguments'] | tojson }})"
    "{% endfor %}{{ '#' + m['tool_call_id'] if m['tool_call_id'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SCHEMA = '{"type": "object", "properties": {"zone": {"type": "string"}}}'


def knows_tools() -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


running = partial(running_server, load_tokenizer=knows_tools)


def conversation() -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    chat = request.chat
    chat.tools.add(name="clock", description="tells the time", parameters_json_schema=SCHEMA)
    chat.messages.add(role=pb.ROLE_USER, content="what time is it?")
    call = pb.ToolCall(id="c1", name="clock", arguments_json='{"zone": "UTC"}')
    chat.messages.add(role=pb.ROLE_ASSISTANT, tool_calls=[call])
    chat.messages.add(role=pb.ROLE_TOOL, content="noon", tool_call_id="c1")
    request.output.prompt_token_ids = True
    request.stopping.max_tokens = 3
    return request


async def test_the_template_gets_tools_calls_and_results() -> None:
    async with running() as server:
        events = await read_all(server, conversation())
        counted = await server.stub.Tokenize(
            pb.TokenizeRequest(chat=conversation().chat, count_only=True)
        )
    assert events[-1].finished.usage.num_output_tokens == 3
    prompt = list(events[0].started.prompt_token_ids)
    assert counted.num_tokens == len(prompt) == events[0].started.num_prompt_tokens
    assert tiny_tokenizer().decode(prompt) == (
        'function {"name": "clock", "description": "tells the time", "parameters": '
        f"{SCHEMA}}}\n"
        "user:what time is it?\n"
        'assistant:clock({"zone": "UTC"})\n'
        "tool:noon#c1\n"
        "assistant:"
    )


Smuggle = Callable[[pb.Chat], object]


@pytest.mark.parametrize(
    ("field", "smuggle"),
    [
        ("chat.tools[0]", lambda chat: setattr(chat.tools[0], "description", "a<eos>b")),
        ("chat.tools[0]", lambda chat: setattr(chat.tools[0], "name", "<|start|>")),
        (
            "chat.tools[0]",
            lambda chat: setattr(chat.tools[0], "parameters_json_schema", '{"x": "<eos>"}'),
        ),
        (
            "chat.messages[1].tool_calls",
            lambda chat: setattr(
                chat.messages[1].tool_calls[0], "arguments_json", '{"zone": "<eos>"}'
            ),
        ),
        ("chat.messages[2].content", lambda chat: setattr(chat.messages[2], "content", "<eos>")),
        (
            "chat.messages[2].tool_call_id",
            lambda c: setattr(c.messages[2], "tool_call_id", "<eos>"),
        ),
        ("chat", lambda chat: setattr(chat.tools[0], "description", "long " * 200)),
    ],
)
async def test_no_field_smuggles_in_a_control_token_or_more_than_the_limit(
    field: str, smuggle: Smuggle
) -> None:
    request = conversation()
    smuggle(request.chat)
    async with running(max_prompt_bytes=900) as server:
        with pytest.raises(aio.AioRpcError) as refused:
            await read_all(server, request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad = detail(refused.value, error_details_pb2.BadRequest)
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == field
