"""From what the service works with to protobuf."""

from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from engine.request import (
    AcceptanceRule,
    FinishReason,
    SpeculationMode,
    SpeculationParams,
    TokenLogprob,
)
from engine.stats import EngineLoad, ModelInfo, RequestStats
from service import orders
from service.pb import generation_pb2 as pb

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: pb.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}
_MODES = {
    SpeculationMode.OFF: pb.SpeculationOptions.MODE_OFF,
    SpeculationMode.ON: pb.SpeculationOptions.MODE_ON,
    SpeculationMode.AUTO: pb.SpeculationOptions.MODE_AUTO,
}
_ACCEPTANCE_RULES = {
    AcceptanceRule.COUPLED: pb.ACCEPTANCE_RULE_COUPLED,
    AcceptanceRule.REJECTION: pb.ACCEPTANCE_RULE_REJECTION,
}
_GUARANTEES = {
    "bit_exact": pb.GUARANTEE_BIT_EXACT,
    "rounding": pb.GUARANTEE_ROUNDING,
}


def write_event(event: orders.Event) -> pb.GenerateResponse:
    """One message of the stream."""
    match event:
        case orders.Started():
            return pb.GenerateResponse(started=write_started(event))
        case orders.Delta():
            return _write_delta(event)
        case orders.Finished():
            return pb.GenerateResponse(
                finished=pb.Finished(
                    choices=[write_choice(choice) for choice in event.choices],
                    usage=write_usage(event),
                )
            )


def _write_delta(event: orders.Delta) -> pb.GenerateResponse:
    # The message of every token: filled in place, because what is given to a constructor is copied.
    response = pb.GenerateResponse()
    delta = response.delta
    delta.SetInParent()
    delta.choice_index = event.choice_index
    delta.first_token_index = event.first_token_index
    delta.token_ids.extend(event.token_ids)
    delta.text = event.text
    if event.finish_reason is not None:
        delta.finish_reason = _FINISH_REASONS[event.finish_reason]
    if event.logprobs:
        delta.logprobs.extend(write_logprobs(event.logprobs))
    if event.prompt_logprobs:
        delta.prompt_logprobs.extend(write_logprobs(event.prompt_logprobs))
    return response


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
        variant=event.variant,
        speculation=_write_speculation(event.speculation),
        acceptance_rule=_ACCEPTANCE_RULES[event.acceptance_rule],
        layout=event.layout,
    )


def _write_speculation(params: SpeculationParams) -> pb.SpeculationInForce:
    return pb.SpeculationInForce(
        mode=_MODES[params.mode],
        max_draft_tokens=params.max_draft_tokens or 0,
        drafters=params.named_drafters or (),
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
    info: ModelInfo,
    name: str,
    *,
    has_chat_template: bool,
    limits: pb.Limits,
    variants: Iterable[str] = (),
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
        variants=variants,
        quantization=info.quantization,
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
        response.num_waiting_audits = load.num_audits_waiting
        response.num_dropped_audits = load.num_audits_dropped
        if load.last_step_at is not None:
            response.since_last_step.CopyFrom(write_duration(now - load.last_step_at))
    return response
