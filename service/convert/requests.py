"""From protobuf to what the service works with.

Raises RequestError or ServiceError naming the field that cannot be served; paths are those of
GenerateRequest.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.request import (
    AcceptanceRule,
    RequestError,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    StructuredOutput,
    StructuredOutputKind,
)
from service import orders
from service.pb import generation_pb2 as pb

_ACCEPTANCE_RULES = {
    pb.ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule.COUPLED,
    pb.ACCEPTANCE_RULE_COUPLED: AcceptanceRule.COUPLED,
    pb.ACCEPTANCE_RULE_REJECTION: AcceptanceRule.REJECTION,
}
_MODES = {
    pb.SpeculationOptions.MODE_UNSPECIFIED: SpeculationMode.AUTO,
    pb.SpeculationOptions.MODE_OFF: SpeculationMode.OFF,
    pb.SpeculationOptions.MODE_ON: SpeculationMode.ON,
    pb.SpeculationOptions.MODE_AUTO: SpeculationMode.AUTO,
}
_ROLES = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}


def read_generate_request(
    message: pb.GenerateRequest, *, default_max_tokens: int, max_completions: int
) -> orders.GenerationOrder:
    """What the client orders. A request_id is made where none is given."""
    num_completions = message.n if message.HasField("n") else 1
    if not 1 <= num_completions <= max_completions:
        raise RequestError("n", f"must be between 1 and {max_completions}, got {num_completions}")
    seed = message.sampling.seed if message.sampling.HasField("seed") else None
    return orders.GenerationOrder(
        request_id=message.request_id or uuid.uuid4().hex,
        model=message.model,
        prompt=_read_prompt(message),
        sampling=_read_sampling(message.sampling, message.output),
        stopping=_read_stopping(message.stopping, default_max_tokens),
        speculation=_read_speculation(message.speculation),
        structured_output=_read_structured_output(message),
        seed=seed,
        num_completions=num_completions,
        priority=message.priority,
        labels=tuple(sorted(message.labels.items())),
        resume_token_ids=tuple(message.resume_token_ids),
        wants_prompt_token_ids=message.output.prompt_token_ids,
    )


def _read_prompt(message: pb.GenerateRequest) -> orders.Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return orders.TextPrompt(message.text, not message.no_special_tokens)
        case "tokens":
            return orders.TokenPrompt(tuple(message.tokens.ids))
        case "chat":
            return read_chat(message.chat)
    raise RequestError("prompt", "one of text, tokens or chat must be set")


def read_tokenize_input(message: pb.TokenizeRequest) -> orders.Prompt:
    match message.WhichOneof("input"):
        case "text":
            return orders.TextPrompt(message.text, not message.no_special_tokens)
        case "chat":
            return read_chat(message.chat)
    raise RequestError("input", "one of text or chat must be set")


def read_chat(chat: pb.Chat) -> orders.ChatPrompt:
    """A conversation as chat templates expect it."""
    if not chat.messages:
        raise RequestError("chat.messages", "must hold at least one message")
    return orders.ChatPrompt(
        messages=tuple(
            _read_message(message, f"chat.messages[{index}]")
            for index, message in enumerate(chat.messages)
        ),
        tools=tuple(
            _read_tool(tool, f"chat.tools[{index}]") for index, tool in enumerate(chat.tools)
        ),
        continue_last_message=chat.continue_last_message,
    )


def _read_message(message: pb.ChatMessage, path: str) -> Mapping[str, object]:
    if message.role not in _ROLES:
        raise RequestError(f"{path}.role", "must be system, user, assistant or tool")
    if message.role == pb.ROLE_USER and not message.content.strip():
        raise RequestError(f"{path}.content", "must not be empty")
    entry: dict[str, object] = {"role": _ROLES[message.role], "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.name,
                    "arguments": _read_object(
                        call.arguments_json, f"{path}.tool_calls[{index}].arguments_json"
                    ),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    if message.name:
        entry["name"] = message.name
    return entry


def _read_tool(tool: pb.Tool, path: str) -> Mapping[str, object]:
    if not tool.name:
        raise RequestError(f"{path}.name", "must not be empty")
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": _read_object(
                tool.parameters_json_schema, f"{path}.parameters_json_schema"
            ),
        },
    }


def _read_object(text: str, path: str) -> Mapping[str, object]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(path, "is not JSON") from error
    if not isinstance(value, dict):
        raise RequestError(path, "must be a JSON object")
    return value


def _float32(value: float) -> float:
    """The shortest decimal number that a 32-bit field stands for: 0.7, not 0.699999988."""
    return float(f"{value:.7g}")


def _read_sampling(message: pb.SamplingParams, output: pb.OutputOptions) -> SamplingParams:
    given: dict[str, Any] = {
        name: _float32(getattr(message, name))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if message.HasField(name)
    }
    if message.acceptance_rule not in _ACCEPTANCE_RULES:
        raise RequestError("sampling.acceptance_rule", f"unknown value {message.acceptance_rule}")
    return replace(
        SamplingParams(),
        **given,
        top_k=message.top_k,
        logit_bias=tuple(
            sorted((token_id, _float32(bias)) for token_id, bias in message.logit_bias.items())
        ),
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        seed=message.seed,
        acceptance_rule=_ACCEPTANCE_RULES[message.acceptance_rule],
        prompt_logprobs=output.prompt_logprobs,
        num_top_logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
    )


def _read_stopping(message: pb.StoppingParams, default_max_tokens: int) -> StoppingParams:
    return StoppingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default_max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        include_stop_string=message.include_stop_string,
        ignore_eos=message.ignore_eos,
        time_limit_seconds=(
            message.time_limit.seconds + message.time_limit.nanos / 1e9
            if message.HasField("time_limit")
            else None
        ),
    )


def _read_structured_output(message: pb.GenerateRequest) -> StructuredOutput | None:
    if not message.HasField("structured_output"):
        return None
    wanted = message.structured_output
    match wanted.WhichOneof("constraint"):
        case "json_object":
            if not wanted.json_object:
                raise RequestError("structured_output.json_object", "must be true when given")
            return StructuredOutput(StructuredOutputKind.JSON_SCHEMA, '{"type": "object"}')
        case "json_schema":
            return StructuredOutput(StructuredOutputKind.JSON_SCHEMA, wanted.json_schema)
        case "regex":
            return StructuredOutput(StructuredOutputKind.REGEX, wanted.regex)
        case "choice":
            texts = json.dumps(list(wanted.choice.texts), ensure_ascii=False)
            if not all(wanted.choice.texts) or not wanted.choice.texts:
                raise RequestError("structured_output.choice", "needs texts that are not empty")
            return StructuredOutput(StructuredOutputKind.CHOICE, texts)
        case "grammar":
            return StructuredOutput(StructuredOutputKind.GRAMMAR, wanted.grammar)
    raise RequestError("structured_output", "a constraint must be set")


def _read_speculation(message: pb.SpeculationOptions) -> SpeculationParams:
    if message.mode not in _MODES:
        raise RequestError("speculation.mode", f"unknown value {message.mode}")
    return SpeculationParams(
        mode=_MODES[message.mode],
        max_draft_tokens=(
            message.max_draft_tokens if message.HasField("max_draft_tokens") else None
        ),
        drafter=message.drafter or None,
        drafters=_read_drafters(message),
    )


def _read_drafters(message: pb.SpeculationOptions) -> tuple[str, ...] | None:
    """Which of them there are is for the server to say."""
    names = tuple(message.drafters)
    if not names:
        return None
    if message.drafter:
        raise RequestError("speculation.drafters", "cannot be combined with speculation.drafter")
    for index, name in enumerate(names):
        if not name or name in names[:index]:
            reason = f"{name!r} is there already" if name else "must not be empty"
            raise RequestError(f"speculation.drafters[{index}]", reason)
    return names
