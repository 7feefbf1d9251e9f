"""Protobuf to domain and back: the one place where both are known.

Raises RequestError or ServiceError naming the field that cannot be served; paths are those of
GenerateRequest.
"""

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from engine.request import (
    AcceptanceRule,
    FinishReason,
    RequestError,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TokenLogprob,
)
from engine.stats import EngineLoad, ModelInfo, RequestStats
from service import orders
from service.errors import unimplemented
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
_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: pb.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}
_GUARANTEES = {
    "bit_exact": pb.GUARANTEE_BIT_EXACT,
    "rounding": pb.GUARANTEE_ROUNDING,
}


def read_generate_request(
    message: pb.GenerateRequest, *, default_max_tokens: int, max_completions: int
) -> orders.GenerationOrder:
    """What the client orders. A request_id is made where none is given."""
    if message.HasField("structured_output"):
        raise unimplemented("structured_output", "this server does not constrain the output")
    if message.output.prompt_logprobs:
        raise unimplemented("output.prompt_logprobs", "this server computes none")
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


def _read_speculation(message: pb.SpeculationOptions) -> SpeculationParams:
    if message.mode not in _MODES:
        raise RequestError("speculation.mode", f"unknown value {message.mode}")
    return SpeculationParams(
        mode=_MODES[message.mode],
        max_draft_tokens=(
            message.max_draft_tokens if message.HasField("max_draft_tokens") else None
        ),
        drafter=message.drafter or None,
    )


def write_event(event: orders.Event) -> pb.GenerateResponse:
    """One message of the stream."""
    match event:
        case orders.Started():
            return pb.GenerateResponse(started=write_started(event))
        case orders.Delta():
            return pb.GenerateResponse(
                delta=pb.Delta(
                    choice_index=event.choice_index,
                    first_token_index=event.first_token_index,
                    token_ids=event.token_ids,
                    text=event.text,
                    logprobs=write_logprobs(event.logprobs),
                    finish_reason=_FINISH_REASONS[event.finish_reason],
                )
            )
        case orders.Finished():
            return pb.GenerateResponse(
                finished=pb.Finished(
                    choices=[write_choice(choice) for choice in event.choices],
                    usage=write_usage(event),
                )
            )


def write_started(event: orders.Started) -> pb.Started:
    return pb.Started(
        request_id=event.request_id,
        model=event.model,
        num_prompt_tokens=event.num_prompt_tokens,
        seed=event.seed,
        max_tokens=event.max_tokens,
        guarantee=_GUARANTEES.get(event.guarantee, pb.GUARANTEE_UNSPECIFIED),
        prompt_token_ids=event.prompt_token_ids,
        resumed_text=event.resumed_text,
    )


def write_logprobs(logprobs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top],
        )
        for entry in logprobs
    ]


def write_usage(event: orders.Finished) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_prompt_tokens=sum(
            choice.stats.num_cached_prompt_tokens for choice in event.choices
        ),
        num_output_tokens=sum(choice.num_output_tokens for choice in event.choices),
    )


def write_choice(choice: orders.Choice) -> pb.ChoiceResult:
    stats = choice.stats
    result = pb.ChoiceResult(
        choice_index=choice.choice_index,
        finish_reason=_FINISH_REASONS.get(stats.finish_reason, pb.FINISH_REASON_UNSPECIFIED),
        num_output_tokens=choice.num_output_tokens,
        timing=_write_timing(stats),
        speculation=pb.SpeculationStats(
            drafter=stats.drafter,
            num_verify_steps=stats.num_verify_steps,
            num_plain_steps=stats.num_plain_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_emitted_accepted_tokens=stats.num_emitted_accepted_tokens,
            drafted_per_position=stats.drafted_per_position,
            accepted_per_position=stats.accepted_per_position,
            acceptance_histogram=stats.acceptance_histogram,
        ),
        cost=pb.Cost(nano_usd=choice.charge.nano_usd, microjoules=choice.charge.microjoules),
    )
    if choice.stop_token_id is not None:
        result.stop_token_id = choice.stop_token_id
    if choice.stop_string is not None:
        result.stop_string = choice.stop_string
    return result


def _write_timing(stats: RequestStats) -> pb.Timing:
    timing = pb.Timing(total=write_duration(stats.finished_at - stats.arrived_at))
    if stats.first_scheduled_at is not None:
        timing.queue.CopyFrom(write_duration(stats.first_scheduled_at - stats.arrived_at))
    if stats.first_token_at is not None:
        timing.time_to_first_token.CopyFrom(write_duration(stats.first_token_at - stats.arrived_at))
        if stats.last_token_at is not None and stats.num_output_tokens > 1:
            timing.time_per_output_token.CopyFrom(
                write_duration(
                    (stats.last_token_at - stats.first_token_at) / (stats.num_output_tokens - 1)
                )
            )
    return timing


def write_duration(seconds: float) -> Duration:
    nanoseconds = round(seconds * 1e9)
    return Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def write_model(
    info: ModelInfo, name: str, *, has_chat_template: bool, limits: pb.Limits
) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        name=name,
        fingerprint=info.fingerprint,
        dtype=info.dtype,
        device=info.device,
        num_parameters=info.num_parameters,
        vocab_size=info.vocab_size,
        numerics=info.numerics,
        guarantee=_GUARANTEES.get(info.guarantee, pb.GUARANTEE_UNSPECIFIED),
        layout=info.layout,
        drafters=info.drafters,
        eos_token_ids=info.eos_token_ids,
        has_chat_template=has_chat_template,
        limits=limits,
    )


def write_load(
    load: EngineLoad | None,
    *,
    now: float,
    num_outstanding_tokens: int,
    estimated_wait_seconds: float | None,
    is_draining: bool,
) -> pb.GetLoadResponse:
    """now is a monotonic instant."""
    response = pb.GetLoadResponse(
        num_outstanding_tokens=num_outstanding_tokens, draining=is_draining
    )
    if estimated_wait_seconds is not None:
        response.estimated_wait.CopyFrom(write_duration(estimated_wait_seconds))
    if load is not None:
        response.num_waiting_requests = load.num_waiting
        response.num_running_requests = load.num_running
        response.num_rows = load.num_rows
        response.num_free_blocks = load.num_free_blocks
        response.num_total_blocks = load.num_total_blocks
        response.num_steps = load.num_steps
        if load.last_step_at is not None:
            response.since_last_step.CopyFrom(write_duration(now - load.last_step_at))
    return response
