"""Stand-ins with the interfaces of real parts: an engine without a model, a ledger in memory."""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from engine.breaker import SpeculationBreaker
from engine.config import HeadSource
from engine.request import (
    FinishReason,
    GenerationRequest,
    RequestError,
    StructuredOutput,
    TokenDelta,
    validate_against_model,
)
from engine.stats import EngineLoad, ModelInfo, RequestStats, RowStepStats, StepStats
from engine.step import StepOutput
from telemetry.ledger.records import LatencySummary, RequestCost, SamplingSummary
from telemetry.prices import PriceSchedule
from telemetry.recording import AuditFinding, FinishedRequest, OpenRequest, ShadowFinding
from telemetry.tracing import RequestTrace

FAKE_INFO = ModelInfo(
    name="fake",
    fingerprint="0" * 16,
    dtype="float32",
    device="cpu",
    num_parameters=1,
    vocab_size=320,
    max_model_tokens=4096,
    numerics="invariant",
    guarantee="bit_exact",
    layout="ragged",
    drafters=("prompt_lookup",),
    eos_token_ids=(1,),
)


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_output: int = 0
    num_steps: int = 0


class FakeEngine:
    """Emits tokens_per_step tokens per row and step: token i of a request depends on its seed and
    on the length of everything before it, as with the real engine, and is never special.

    step_seconds is slept in each step. `hang` blocks steps until it is set again; `crash` makes
    the next step raise; refuse_token_id in a prompt makes submit refuse it.
    """

    def __init__(
        self,
        *,
        info: ModelInfo = FAKE_INFO,
        num_rows: int = 16,
        tokens_per_step: int = 3,
        step_seconds: float = 0.0,
        refuse_token_id: int | None = None,
        fail_token_id: int | None = None,
    ) -> None:
        self.info = info
        self.tokens_per_step = tokens_per_step
        self.step_seconds = step_seconds
        self.breaker = SpeculationBreaker()
        self.prepare_seconds = 0.0
        self.shadow_plans: object = ()
        self.may_run = threading.Event()
        self.may_run.set()
        self.crash = False
        self.canceled_at_step: dict[str, int] = {}
        self.num_steps = 0
        self._num_rows = num_rows
        self._refuse_token_id = refuse_token_id
        self._fail_token_id = fail_token_id
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        self._to_end: dict[str, FinishReason] = {}

    def prepare(self, wanted: StructuredOutput) -> None:
        """Takes as long as the test wants; the regular expression "(" is refused."""
        time.sleep(self.prepare_seconds)
        if wanted.text == "(":
            raise RequestError("structured_output.regex", "unclosed ( in private words")

    def load_head(self, source: HeadSource) -> Any:
        """A head is its name; those of a folder "broken" are refused."""
        time.sleep(self.prepare_seconds)
        if source.folder.endswith("broken"):
            raise ValueError(f"heads.{source.name}: hidden_size: is another")
        return f"head:{source.name}"

    def add_drafter(self, ready: Any) -> ModelInfo:
        self.info = replace(self.info, drafters=(*self.info.drafters, ready))
        return self.info

    def remove_drafter(self, name: str) -> ModelInfo:
        drafters = tuple(d for d in self.info.drafters if d != name)
        self.info = replace(self.info, drafters=drafters)
        return self.info

    def submit(self, request: GenerationRequest) -> None:
        validate_against_model(request, self.info.vocab_size, self.info.max_model_tokens)
        if self._refuse_token_id in request.prompt_token_ids:
            raise RequestError("sampling.typical_p", "refused by the engine")
        self._rows[request.request_id] = _Row(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if request_id in self._rows:
            self.canceled_at_step[request_id] = self.num_steps
            self._to_end[request_id] = reason

    def has_work(self) -> bool:
        return bool(self._rows)

    def audit_slice(self) -> None:
        return None

    def shadow(self, plans: object) -> ModelInfo:
        self.shadow_plans = plans
        return self.info

    def shadow_next(self) -> None:
        return None

    def load(self) -> EngineLoad:
        num_running = min(len(self._rows), self._num_rows)
        return EngineLoad(
            len(self._rows) - num_running, num_running, self._num_rows, 8, 8, self.num_steps, None
        )

    def step(self) -> StepOutput:
        self.may_run.wait()
        if self.crash:
            raise RuntimeError("the fake engine was told to crash")
        started_at = time.monotonic()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        deltas: list[TokenDelta] = []
        finished: list[RequestStats] = []
        for request_id, reason in self._to_end.items():
            row = self._rows.pop(request_id)
            deltas.append(TokenDelta(request_id, row.num_output, (), finish_reason=reason))
            finished.append(self._stats(row, reason))
        self._to_end.clear()
        rows = tuple(self._advance(row, deltas, finished) for row in self._running(started_at))
        self.num_steps += 1
        return StepOutput(tuple(deltas), tuple(finished), self._step_stats(started_at, rows))

    def _running(self, now: float) -> list[_Row]:
        rows = list(self._rows.values())[: self._num_rows]
        for row in rows:
            row.first_scheduled_at = row.first_scheduled_at or now
        return rows

    def _advance(
        self, row: _Row, deltas: list[TokenDelta], finished: list[RequestStats]
    ) -> RowStepStats:
        request = row.request
        reason, num_new = None, self.tokens_per_step
        if self._fail_token_id in request.prompt_token_ids:
            reason, num_new = FinishReason.ERROR, 0
        limit = request.stopping.time_limit_seconds
        if limit is not None and time.monotonic() - request.arrived_at >= limit:
            reason, num_new = FinishReason.TIME_LIMIT, 0
        left = request.stopping.max_tokens - row.num_output
        if reason is None and left <= num_new:
            reason, num_new = FinishReason.LENGTH, left
        start = len(request.prompt_token_ids) + row.num_output
        token_ids = tuple(fake_token(request.sampling.seed, start + i) for i in range(num_new))
        error = "planted" if reason is FinishReason.ERROR else None
        deltas.append(
            TokenDelta(
                request.request_id, row.num_output, token_ids, finish_reason=reason, error=error
            )
        )
        row.num_output += num_new
        row.num_steps += 1
        row.last_token_at = time.monotonic()
        row.first_token_at = row.first_token_at or row.last_token_at
        if reason is not None:
            del self._rows[request.request_id]
            finished.append(self._stats(row, reason))
        return RowStepStats(request.request_id, 0, 1, max(0, num_new - 1), 0, num_new, 0)

    def _step_stats(self, started_at: float, rows: tuple[RowStepStats, ...]) -> StepStats:
        duration = int((time.monotonic() - started_at) * 1e9) + 1
        return StepStats(
            self.num_steps - 1, started_at, duration, 0, 0, 0, 0, rows, 0, len(rows), 8, 8, 0
        )

    def _stats(self, row: _Row, reason: FinishReason) -> RequestStats:
        return RequestStats(
            request_id=row.request.request_id,
            finish_reason=reason,
            arrived_at=row.request.arrived_at,
            first_scheduled_at=row.first_scheduled_at,
            first_token_at=row.first_token_at,
            last_token_at=row.last_token_at,
            finished_at=time.monotonic(),
            num_prompt_tokens=len(row.request.prompt_token_ids),
            num_cached_prompt_tokens=0,
            num_recomputed_tokens=0,
            num_output_tokens=row.num_output,
            num_prefill_positions=0,
            num_steps=row.num_steps,
            num_plain_steps=row.num_output,
            num_verify_steps=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_emitted_accepted_tokens=0,
            num_cut_tokens=0,
            num_drafter_positions=0,
            num_preemptions=0,
            drafted_per_position=(),
            accepted_per_position=(),
            accepted_per_length=(),
            acceptance_histogram=(),
            drafter="",
            seed=row.request.sampling.seed,
            error="planted" if reason is FinishReason.ERROR else None,
        )


def fake_token(seed: int, position: int) -> int:
    """The token of the fake engine at a position of a sequence; printable ASCII bytes."""
    return 40 + (seed * 7 + position * 13) % 50


@dataclass(slots=True)
class FakeRecording:
    """Keeps what it is told, as (request_id, status_code) rows."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    open_requests: dict[str, OpenRequest] = field(default_factory=dict)
    num_steps: int = 0
    is_closed: bool = False
    prices: list[PriceSchedule] = field(default_factory=list)
    breaker_states: list[str] = field(default_factory=list)
    shadows: list[ShadowFinding] = field(default_factory=list)

    def begin(
        self,
        request: GenerationRequest,
        *,
        labels: Mapping[str, str],
        variant: str,
        trace: RequestTrace | None,
    ) -> OpenRequest:
        from datetime import UTC, datetime

        opened = OpenRequest(
            record_id=request.request_id,
            request_id=request.request_id,
            attempt=0,
            started_at=datetime.now(UTC),
            sampling=SamplingSummary(),
            num_prompt_tokens=len(request.prompt_token_ids),
            variant=variant,
            tenant=None,
            labels=labels,
            trace=trace,
        )
        self.open_requests[request.request_id] = opened
        return opened

    def on_step(self, stats: StepStats) -> None:
        self.num_steps += 1

    def on_finished(
        self, open_request: OpenRequest, stats: RequestStats, *, status_code: str
    ) -> FinishedRequest:
        del self.open_requests[open_request.request_id]
        self.rows.append((open_request.request_id, status_code))
        durable: Future[bool] = Future()
        durable.set_result(True)
        return FinishedRequest(
            RequestCost(cost_nano_usd=stats.num_output_tokens), LatencySummary(0.0), durable
        )

    def on_lost(self, open_request: OpenRequest, *, status_code: str, error: str) -> None:
        del self.open_requests[open_request.request_id]
        self.rows.append((open_request.request_id, status_code))

    def on_refused(
        self,
        request_id: str,
        *,
        status_code: str,
        reason: str,
        error: str,
        tenant: str = "",
        labels: Mapping[str, str] | None = None,
        num_prompt_tokens: int = 0,
        trace_id: str | None = None,
    ) -> None:
        self.rows.append((request_id, status_code))

    def on_audit(self, finding: AuditFinding) -> None:
        raise AssertionError("no auditor here")

    def on_shadow(self, finding: ShadowFinding) -> None:
        self.shadows.append(finding)

    def on_breaker(self, state: str) -> None:
        self.breaker_states.append(state)

    def reprice(self, prices: PriceSchedule) -> None:
        self.prices.append(prices)

    def close(self) -> None:
        self.is_closed = True
