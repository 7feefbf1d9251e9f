"""From an order to a place in the queue: what can refuse before the engine hears of it."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.request import (
    GenerationRequest,
    RequestError,
    SpeculationMode,
    StructuredOutput,
    validate_against_model,
)
from service import errors
from service.admission import DeadlineRefusedError, RefusedError, Ticket
from service.engine_thread import EngineGoneError
from service.orders import GenerationOrder
from service.serving import Caller, Serving
from telemetry.recording import Recording

_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class Admitted:
    """One engine request per completion, and their place; whoever holds it releases the ticket."""

    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int
    ticket: Ticket


async def admit(serving: Serving, order: GenerationOrder, caller: Caller) -> Admitted:
    """Raises what refuses the order, after a ledger row has been written for it."""
    num_prompt_tokens = 0
    try:
        serving.gate.check_open()
        serving.check_model(order.model)
        prompt_token_ids = await serving.encoder.encode(order.prompt)
        num_prompt_tokens = len(prompt_token_ids)
        requests = _requests_of(serving, order, caller, prompt_token_ids)
        for request in requests:
            if request.request_id in serving.live:
                raise errors.already_live(order.request_id)
        if order.structured_output is not None:
            await _prepare(serving, order.structured_output)
        ticket = _take_place(serving, caller, requests)
    except Exception as error:
        failure = errors.as_service_error(error)
        record_refusal(
            serving.recording, failure, order.request_id, order.labels, caller, num_prompt_tokens
        )
        raise
    return Admitted(requests, num_prompt_tokens, ticket)


async def _prepare(serving: Serving, wanted: StructuredOutput) -> None:
    try:
        await serving.engine.prepare(wanted)
    except EngineGoneError as error:
        raise errors.unavailable(str(error), retry_after_seconds=1.0) from error


def record_refusal(
    recording: Recording,
    failure: errors.ServiceError,
    request_id: str,
    labels: tuple[tuple[str, str], ...] | Mapping[str, str],
    caller: Caller,
    num_prompt_tokens: int = 0,
) -> None:
    """A ledger row for a call that never reached the engine."""
    recording.on_refused(
        request_id,
        status_code=failure.code.name,
        reason=failure.code.name.lower(),
        error=_without_content(failure.message),
        tenant=caller.tenant,
        labels=dict(labels),
        num_prompt_tokens=num_prompt_tokens,
        trace_id=caller.call.trace_id,
    )


def _without_content(message: str) -> str:
    """What is wrong with a grammar quotes it: the ledger keeps the field alone."""
    field, _, _ = message.partition(":")
    return f"{field}: refused" if field.startswith("structured_output") else message


def _requests_of(
    serving: Serving,
    order: GenerationOrder,
    caller: Caller,
    prompt_token_ids: tuple[int, ...],
) -> tuple[GenerationRequest, ...]:
    """One engine request per completion, checked against the model."""
    _check_limits(serving, order)
    num_resumed = len(order.resume_token_ids)
    stopping = replace(
        order.stopping,
        max_tokens=order.stopping.max_tokens - num_resumed,
        min_tokens=max(0, order.stopping.min_tokens - num_resumed),
    )
    first_seed = secrets.randbelow(_MAX_SEED) if order.seed is None else order.seed
    arrived_at = time.monotonic()
    requests = tuple(
        GenerationRequest(
            request_id=order.request_id if index == 0 else f"{order.request_id}#{index}",
            prompt_token_ids=prompt_token_ids + order.resume_token_ids,
            sampling=replace(order.sampling, seed=(first_seed + index) % _MAX_SEED),
            stopping=stopping,
            speculation=order.speculation,
            structured_output=order.structured_output,
            priority=order.priority,
            tenant=caller.tenant,
            arrived_at=arrived_at,
        )
        for index in range(order.num_completions)
    )
    if not prompt_token_ids:
        raise RequestError("prompt", "must contain at least one token")
    validate_against_model(requests[0], serving.info.vocab_size, serving.info.max_model_tokens)
    eos_token_ids = () if order.stopping.ignore_eos else serving.info.eos_token_ids
    if order.resume_token_ids and order.resume_token_ids[-1] in eos_token_ids:
        raise RequestError("resume_token_ids", "already ends with an end-of-sequence token")
    return requests


def _check_limits(serving: Serving, order: GenerationOrder) -> None:
    if order.stopping.max_tokens > serving.limits.max_tokens:
        raise RequestError(
            "stopping.max_tokens",
            f"must be at most {serving.limits.max_tokens}, got {order.stopping.max_tokens}",
        )
    wanted = order.speculation
    if wanted.mode is SpeculationMode.ON and not serving.info.drafters:
        raise errors.speculation_impossible("this server has no drafter")
    for index, name in enumerate(wanted.named_drafters or ()):
        if name not in serving.info.drafters:
            field = "drafter" if wanted.drafter is not None else f"drafters[{index}]"
            raise RequestError(
                f"speculation.{field}",
                f"unknown drafter {name!r}; this server has {list(serving.info.drafters)}",
            )
    max_draft_tokens = serving.limits.max_draft_tokens
    if wanted.max_draft_tokens is not None and wanted.max_draft_tokens > max_draft_tokens:
        raise RequestError(
            "speculation.max_draft_tokens",
            f"must be at most {max_draft_tokens}, got {wanted.max_draft_tokens}",
        )


def _num_tokens(serving: Serving, request: GenerationRequest) -> int:
    """Prompt plus the most that can be output."""
    num_prompt_tokens = len(request.prompt_token_ids)
    room = serving.info.max_model_tokens - num_prompt_tokens
    return num_prompt_tokens + min(request.stopping.max_tokens, room)


def _take_place(
    serving: Serving, caller: Caller, requests: tuple[GenerationRequest, ...]
) -> Ticket:
    now = time.monotonic()
    try:
        return serving.admission.admit(
            caller.tenant,
            caller.quota,
            len(requests),
            sum(_num_tokens(serving, request) for request in requests),
            now,
            caller.deadline_at - now,
        )
    except RefusedError as error:
        raise errors.exhausted(error.subject, error.reason, error.retry_after_seconds) from error
    except DeadlineRefusedError as error:
        raise errors.deadline_exceeded(str(error)) from error
