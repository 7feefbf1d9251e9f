"""One call from its admission to the last event: hand to the engine, stream, record."""

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from engine.request import FinishReason, GenerationRequest, TokenDelta
from engine.stats import RequestStats
from service import errors
from service.coalescing import TokenGroups, merge
from service.durability import wait_until_durable
from service.engine_thread import EngineGoneError
from service.experiments.live import Assigned
from service.intake import Admitted, admit
from service.live_requests import Arrival, ArrivalQueue, ReaderTooSlowError
from service.orders import Charge, Choice, Delta, Event, Finished, GenerationOrder, Started
from service.output_text import OutputText
from service.serving import Caller, Serving
from telemetry import names
from telemetry.recording import OpenRequest
from telemetry.tracing import start_request_trace

# A client's own clock started earlier: its deadline cancels the call before ours has passed.
_DEADLINE_SLACK_SECONDS = 0.05
_STATUS_OF_REASON = {
    FinishReason.CANCELLED: "CANCELLED",
    FinishReason.DEADLINE: "DEADLINE_EXCEEDED",
    FinishReason.ERROR: "INTERNAL",
}


async def generate(
    serving: Serving, order: GenerationOrder, caller: Caller
) -> AsyncGenerator[Event]:
    """Started, deltas, Finished. Raises ServiceError or RequestError; closing it early frees
    the rows within one step."""
    assigned = serving.experiments.assign(order, caller.tenant, time.time())
    run = _Run(serving, assigned, caller, await admit(serving, assigned.order, caller))
    try:
        await run.submit()
        yield run.started()
        while not run.is_complete:
            for delta in await run.next_deltas():
                yield delta
        if serving.limits.finish_when_recorded:
            await wait_until_durable(run.rows(), caller.deadline_at)
        yield run.finished()
    finally:
        run.leave()


@dataclass(slots=True)
class _Completion:
    """One completion of a run; the owner of its engine request."""

    run: "_Run"
    index: int
    request: GenerationRequest
    open_request: OpenRequest
    text: OutputText
    groups: TokenGroups | None
    is_live: bool = True
    is_handed_over: bool = False
    choice: Choice | None = None
    row: "Future[bool] | None" = None  # of the ledger

    @property
    def queue(self) -> ArrivalQueue:
        return self.run.queue

    def parts_of(self, delta: TokenDelta) -> list[TokenDelta]:
        """The delta as it is sent: whole, or in groups of equal size."""
        return [delta] if self.groups is None else self.groups.push(delta)

    def ended(self, stats: RequestStats) -> Charge:
        self.is_live = False
        status_code = (
            "RESOURCE_EXHAUSTED"
            if self.queue.has_overflowed
            else _STATUS_OF_REASON.get(stats.finish_reason, "OK")
        )
        done = self.run.serving.recording.on_finished(
            self.open_request, stats, status_code=status_code
        )
        self.row = done.durable
        self.run.release(stats.num_prompt_tokens + stats.num_output_tokens)
        return Charge(done.cost.cost_nano_usd, done.cost.energy_microjoules)

    def lost(self, error: str) -> None:
        self.is_live = False
        self.run.serving.recording.on_lost(self.open_request, status_code="ABORTED", error=error)
        self.run.release(0)


class _Run:
    """The state of one call while it streams."""

    def __init__(
        self, serving: Serving, assigned: Assigned, caller: Caller, admitted: Admitted
    ) -> None:
        self.serving = serving
        self.queue = ArrivalQueue(
            serving.limits.max_unread_messages * assigned.order.num_completions
        )
        self._order, self._variant = assigned.order, assigned.variant
        self._caller = caller
        self._num_prompt_tokens = admitted.num_prompt_tokens
        self._ticket = admitted.ticket
        self._num_unreleased = len(admitted.requests)
        self._num_used_tokens = 0
        self._began_at = time.monotonic()
        self._slot_seconds = serving.limits.coalesce_seconds
        self._completions = {
            request.request_id: self._begin(index, request)
            for index, request in enumerate(admitted.requests)
        }
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            max(0.0, caller.deadline_at - time.monotonic()), self._end_at_deadline
        )

    def _begin(self, index: int, request: GenerationRequest) -> _Completion:
        attributes = {names.ATTR_VARIANT: self._variant} if self._variant else None
        trace = start_request_trace(self._caller.call, self.serving.model_name, attributes)
        open_request = self.serving.recording.begin(
            request, labels=dict(self._order.labels), variant=self._variant, trace=trace
        )
        text = OutputText(self.serving.tokenizer, is_given=bool(request.stopping.stop_strings))
        size = self.serving.limits.coalesce_tokens
        groups = TokenGroups(size) if size else None
        completion = _Completion(self, index, request, open_request, text, groups)
        self.serving.live.add(request.request_id, completion)
        return completion

    async def submit(self) -> None:
        """Hand every completion to the engine. Raises what the engine refuses."""
        for completion in self._completions.values():
            try:
                accepted = self.serving.engine.submit(completion.request)
                completion.is_handed_over = True
                accepted.add_done_callback(partial(self._answered, completion))
                await asyncio.shield(accepted)
            except EngineGoneError as error:
                raise errors.unavailable(str(error), retry_after_seconds=1.0) from error

    def _answered(self, completion: _Completion, accepted: "asyncio.Future[None]") -> None:
        """Called even when the client has gone in the meantime."""
        error = accepted.exception()
        if error is not None:
            self._forget(completion, "INVALID_ARGUMENT", str(error))

    def _forget(self, completion: _Completion, status_code: str, error: str) -> None:
        """The engine does not have this completion and will never report its end."""
        if not completion.is_live:
            return
        self.serving.live.discard(completion.request.request_id)
        completion.is_live = False
        self.serving.recording.on_lost(
            completion.open_request, status_code=status_code, error=error
        )
        self.release(0)

    def started(self) -> Started:
        order, request = self._order, next(iter(self._completions.values())).request
        info, num_prompt_tokens = self.serving.info, self._num_prompt_tokens
        resumed_text = ""
        if order.resume_token_ids:
            resumed_text = self._completions[request.request_id].text.resume(order.resume_token_ids)
        return Started(
            request_id=order.request_id,
            model=self.serving.model_name,
            num_prompt_tokens=num_prompt_tokens,
            seed=request.sampling.seed,
            max_tokens=min(order.stopping.max_tokens, info.max_model_tokens - num_prompt_tokens),
            guarantee=info.guarantee,
            prompt_token_ids=(
                request.prompt_token_ids[:num_prompt_tokens] if order.wants_prompt_token_ids else ()
            ),
            resumed_text=resumed_text,
            variant=self._variant,
            speculation=self.serving.speculation_in_force(request.speculation),
            acceptance_rule=request.sampling.acceptance_rule,
            layout=info.layout,
        )

    @property
    def is_complete(self) -> bool:
        return all(completion.choice is not None for completion in self._completions.values())

    async def next_deltas(self) -> list[Delta]:
        """Waits for the engine. Raises when this run has ended otherwise than by finishing."""
        try:
            arrivals = [await self.queue.get()]
            if self._slot_seconds:
                await self._wait_for_slot()
                arrivals = _merged([*arrivals, *self.queue.take_all()])
        except ReaderTooSlowError as error:
            raise errors.client_too_slow(self.serving.limits.max_unread_messages) from error
        except EngineGoneError as error:
            raise errors.engine_lost("the engine stopped; start the request again") from error
        return [delta for arrival in arrivals for delta in self._read(arrival)]

    async def _wait_for_slot(self) -> None:
        """Slots are multiples of the interval since the start, whatever the engine does."""
        elapsed = time.monotonic() - self._began_at
        await asyncio.sleep(self._slot_seconds - elapsed % self._slot_seconds)

    def _read(self, arrival: Arrival) -> list[Delta]:
        delta, ending = arrival.delta, arrival.ending
        completion = self._completions[delta.request_id]
        num_resumed = len(self._order.resume_token_ids)
        if ending is not None:
            self._check_ending(ending.stats)
            completion.choice = Choice(
                choice_index=completion.index,
                stats=ending.stats,
                charge=ending.charge,
                num_output_tokens=num_resumed + ending.stats.num_output_tokens,
                stop_token_id=delta.stop_token_id,
                stop_string=delta.stop_string,
            )
        return [
            Delta(
                choice_index=completion.index,
                first_token_index=num_resumed + part.first_token_index,
                token_ids=part.token_ids,
                text=completion.text.push(part),
                logprobs=part.logprobs,
                prompt_logprobs=part.prompt_logprobs if completion.index == 0 else (),
                finish_reason=part.finish_reason,
            )
            for part in completion.parts_of(delta)
        ]

    def _check_ending(self, stats: RequestStats) -> None:
        match stats.finish_reason:
            case FinishReason.CANCELLED:
                raise errors.cancelled("the request was cancelled")
            case FinishReason.DEADLINE:
                raise errors.deadline_exceeded("the deadline has passed")
            case FinishReason.ERROR:
                # What it was is in the ledger's row: an exception may quote the inside.
                raise errors.internal("the engine failed on this request")

    def finished(self) -> Finished:
        return Finished(
            self._num_prompt_tokens,
            tuple(
                completion.choice
                for completion in self._completions.values()
                if completion.choice is not None
            ),
        )

    def rows(self) -> "list[Future[bool]]":
        """The ledger's rows on their way to the disk."""
        completions = self._completions.values()
        return [completion.row for completion in completions if completion.row is not None]

    def _end_at_deadline(self) -> None:
        self._cancel(FinishReason.DEADLINE)
        self.queue.fail(errors.deadline_exceeded("the deadline has passed"))

    def leave(self) -> None:
        """The client's side is over: what still runs is ended."""
        self._deadline.cancel()
        has_passed = time.monotonic() >= self._caller.deadline_at - _DEADLINE_SLACK_SECONDS
        self._cancel(FinishReason.DEADLINE if has_passed else FinishReason.CANCELLED)
        for completion in self._completions.values():
            if not completion.is_handed_over:
                self._forget(completion, "CANCELLED", "ended before the engine had it")

    def _cancel(self, reason: FinishReason) -> None:
        for completion in self._completions.values():
            if completion.is_live and completion.is_handed_over:
                self.serving.engine.cancel(completion.request.request_id, reason)

    def release(self, num_used_tokens: int) -> None:
        """A completion has ended; the last one gives the place back."""
        self._num_used_tokens += num_used_tokens
        self._num_unreleased -= 1
        if self._num_unreleased == 0:
            self.serving.admission.release(
                self._ticket, self._num_used_tokens, time.monotonic(), self._caller.quota
            )


def _merged(arrivals: list[Arrival]) -> list[Arrival]:
    """One arrival per completion, in the order of their first ones."""
    by_request: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        by_request.setdefault(arrival.delta.request_id, []).append(arrival)
    return [
        Arrival(merge([arrival.delta for arrival in group]), group[-1].ending)
        for group in by_request.values()
    ]
