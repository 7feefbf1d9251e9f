"""The methods of tandem.v1.GenerationService: read, run, write."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from grpc import aio

from engine.request import (
    MAX_LABEL_CHARACTERS,
    MAX_LABELS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    RequestError,
)
from service import errors
from service.calls import CallInfo, OpenCalls, current_call
from service.convert.requests import read_generate_request, read_tokenize_input
from service.convert.responses import (
    write_duration,
    write_event,
    write_load,
    write_model,
)
from service.generation import generate
from service.intake import record_refusal
from service.orders import Event, GenerationOrder, Started
from service.pb import generation_pb2 as pb
from service.pb import generation_pb2_grpc as pb_grpc
from service.serving import Caller, Serving
from service.settings import ServiceSettings
from service.unary import collect
from telemetry.tracing import baggage_labels

Context = aio.ServicerContext[Any, Any]


class Lifecycle(Protocol):
    """Where the server stands."""

    def serving(self) -> Serving:
        """Raises UNAVAILABLE while the model is not loaded."""
        ...

    @property
    def is_draining(self) -> bool: ...


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Statuses other than OK are raised; the interceptor turns them into what the client sees."""

    def __init__(
        self, lifecycle: Lifecycle, settings: ServiceSettings, open_calls: OpenCalls
    ) -> None:
        self._lifecycle = lifecycle
        self._open_calls = open_calls
        self._settings = settings

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        with self._open_calls.one():
            async with aclosing(self._events(request, context)) as events:
                async for event in events:
                    yield write_event(event)

    async def GenerateUnary(  # noqa: N802
        self, request: pb.GenerateUnaryRequest, context: Context
    ) -> pb.GenerateUnaryResponse:
        with self._open_calls.one():
            async with aclosing(self._events(request.request, context)) as events:
                return await collect(events)

    async def _events(self, request: pb.GenerateRequest, context: Context) -> AsyncGenerator[Event]:
        serving = self._lifecycle.serving()
        call = current_call.get()
        caller = self._caller(call, context)
        try:
            _check_allowed(call, serving, request.model)
            order = _with_baggage_labels(self._read(request), call)
        except Exception as error:
            failure = errors.as_service_error(error)
            record_refusal(serving.recording, failure, request.request_id, {}, caller)
            raise
        await context.send_initial_metadata((("x-request-id", order.request_id),))
        async with aclosing(generate(serving, order, caller)) as events:
            async for event in events:
                if isinstance(event, Started) and serving.capture is not None:
                    serving.capture.offer(order, is_allowed=caller.may_be_captured)
                yield event

    def _read(self, request: pb.GenerateRequest) -> GenerationOrder:
        return read_generate_request(
            request,
            default_max_tokens=self._settings.default_max_tokens,
            max_completions=self._settings.max_completions,
        )

    def _caller(self, call: CallInfo, context: Context) -> Caller:
        seconds = self._settings.max_deadline_seconds
        remaining: float | None = context.time_remaining()
        if remaining is not None:
            seconds = min(seconds, remaining)
        return Caller(
            tenant=call.principal.tenant,
            quota=call.principal.quota,
            deadline_at=time.monotonic() + seconds,
            call=call.span,
            may_be_captured=call.principal.may_be_captured,
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        serving = self._serving_for(request.model)
        token_ids = await serving.encoder.encode(read_tokenize_input(request))
        return pb.TokenizeResponse(
            num_tokens=len(token_ids), token_ids=() if request.count_only else token_ids
        )

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        serving = self._serving_for(request.model)
        for index, token_id in enumerate(request.token_ids):
            if token_id >= serving.info.vocab_size:
                raise RequestError(
                    f"token_ids[{index}]",
                    f"{token_id} is outside the vocabulary of {serving.info.vocab_size}",
                )
        text = await serving.encoder.decode(
            tuple(request.token_ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.GetModelResponse:
        serving = self._serving_for(request.model)
        return write_model(
            serving.info,
            serving.model_name,
            has_chat_template=serving.encoder.has_chat_template,
            limits=self._limits(serving),
            variants=serving.experiments.variants,
        )

    def _serving_for(self, model: str) -> Serving:
        serving = self._lifecycle.serving()
        _check_allowed(current_call.get(), serving, model)
        serving.check_model(model)
        return serving

    def _limits(self, serving: Serving) -> pb.Limits:
        settings = self._settings
        limits = pb.Limits(
            max_model_tokens=serving.info.max_model_tokens,
            max_request_bytes=settings.max_request_bytes,
            max_prompt_bytes=settings.max_prompt_bytes,
            default_max_tokens=settings.default_max_tokens,
            max_tokens=settings.max_tokens,
            max_completions=settings.max_completions,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_characters=MAX_STOP_STRING_CHARACTERS,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            max_logit_bias_entries=MAX_LOGIT_BIAS_ENTRIES,
            max_draft_tokens=serving.limits.max_draft_tokens,
            max_labels=MAX_LABELS,
            max_label_characters=MAX_LABEL_CHARACTERS,
            max_running_requests=settings.max_num_rows,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
        )
        limits.max_deadline.CopyFrom(write_duration(settings.max_deadline_seconds))
        return limits

    async def GetLoad(  # noqa: N802
        self, request: pb.GetLoadRequest, context: Context
    ) -> pb.GetLoadResponse:
        serving = self._lifecycle.serving()
        return write_load(
            serving.engine.load,
            now=time.monotonic(),
            num_outstanding_tokens=serving.admission.num_live_tokens,
            estimated_wait_seconds=serving.admission.estimated_wait_seconds(),
            is_draining=self._lifecycle.is_draining,
        )


def _with_baggage_labels(order: GenerationOrder, call: CallInfo) -> GenerationOrder:
    """Labels that came as W3C baggage count unless the request sets the same ones."""
    found = baggage_labels(call.span.context)
    if not found:
        return order
    return replace(order, labels=tuple(sorted({**found, **dict(order.labels)}.items())))


def _check_allowed(call: CallInfo, serving: Serving, model: str) -> None:
    allowed = call.principal.models
    if allowed and (model or serving.model_name) not in allowed:
        raise errors.permission_denied(f"model: {model or serving.model_name!r} is not allowed")
