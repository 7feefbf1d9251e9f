"""Records the service's work: metrics, spans, cost, energy and the ledger behind one interface."""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import fields, replace

from opentelemetry import trace

from engine.request import GenerationRequest
from engine.stats import RequestStats, StepStats
from telemetry import names
from telemetry.accounting import Accounting
from telemetry.clock import AnchoredClock
from telemetry.latency import summarise_latency
from telemetry.ledger.records import (
    AuditRecord,
    CapacityRecord,
    DrafterRecord,
    InstanceRecord,
    LatencySummary,
    ModelRecord,
    Outcome,
    RequestCost,
    RequestRecord,
    ShadowRecord,
    StartRecord,
    TokenCounts,
    new_record_id,
)
from telemetry.ledger.rows import MAX_ERROR_CHARACTERS, MAX_REQUEST_ID_CHARACTERS
from telemetry.ledger.writer import LedgerWriter
from telemetry.live_accounts import LiveAccounts, never_failing
from telemetry.metrics import Metrics
from telemetry.prices import PriceSchedule
from telemetry.pseudonym import TenantKey
from telemetry.recording import AuditFinding, FinishedRequest, OpenRequest, ShadowFinding
from telemetry.summaries import (
    bounded_labels,
    bounded_text,
    sampling_summary,
    span_attributes,
)
from telemetry.tracing import RequestTrace

_log = logging.getLogger(__name__)
_HEARTBEAT_SECONDS = 60.0
_MAX_REMEMBERED_IDS = 100_000
_OUTCOMES = {
    "OK": Outcome.COMPLETED,
    "CANCELLED": Outcome.CANCELLED,
    "DEADLINE_EXCEEDED": Outcome.DEADLINE_EXCEEDED,
}
_COUNT_NAMES = tuple(spec.name for spec in fields(TokenCounts))


class Recorder:
    """The implementation of `telemetry.recording.Recording`.

    `on_step` only queues: steps are accounted for on a thread of its own, or by the `on_finished`
    that needs them, so that the engine thread never pays for telemetry.
    """

    def __init__(
        self,
        *,
        model: ModelRecord,
        instance: InstanceRecord,
        writer: LedgerWriter,
        accounting: Accounting,
        metrics: Metrics,
        clock: AnchoredClock,
        tenant_key: TenantKey,
        drafter_fingerprints: Mapping[str, str] | None = None,
        step_span_every: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._instance = instance
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._tenant_key = tenant_key
        self._drafter_fingerprints = dict(drafter_fingerprints or {})
        self._on_close = on_close
        self._lock = threading.Lock()  # guards the attempts
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._is_closed = False
        # Before any request: what a killed server leaves open is found by its instance.
        writer.post(instance)
        self._heartbeat_at = time.monotonic() + _HEARTBEAT_SECONDS
        self._live = LiveAccounts(
            accounting, metrics, clock, step_span_every=step_span_every, on_tick=self._on_tick
        )
        self._live.start()

    def begin(
        self,
        request: GenerationRequest,
        *,
        labels: Mapping[str, str],
        variant: str,
        trace: RequestTrace | None,
    ) -> OpenRequest:
        """See Recording."""
        with self._lock:
            attempt = self._next_attempt(request.request_id)
        open_request = OpenRequest(
            record_id=new_record_id(),
            request_id=request.request_id,
            attempt=attempt,
            started_at=self._clock.utc_of(request.arrived_at or time.monotonic()),
            sampling=sampling_summary(request),
            num_prompt_tokens=len(request.prompt_token_ids),
            variant=variant,
            tenant=self._tenant_key.pseudonym(request.tenant),
            labels=bounded_labels(labels),
            trace=trace,
        )
        self._live.open(open_request)
        self._writer.post(
            StartRecord(
                record_id=open_request.record_id,
                instance_id=self._instance.instance_id,
                request_id=open_request.request_id,
                attempt=attempt,
                started_at=open_request.started_at,
                model=self._model,
                variant=variant or None,
                tenant=open_request.tenant,
                price=self._live.price,
                num_prompt_tokens=open_request.num_prompt_tokens,
                labels=dict(open_request.labels),
                trace_id=trace.trace_id if trace else None,
            )
        )
        return open_request

    def on_step(self, stats: StepStats) -> None:
        """See Recording."""
        self._live.on_step(stats)

    def on_finished(
        self, open_request: OpenRequest, stats: RequestStats, *, status_code: str
    ) -> FinishedRequest:
        """See Recording."""
        cost, without_speculation = self._live.settle(open_request)
        latency = summarise_latency(stats)
        outcome = _OUTCOMES.get(status_code, Outcome.FAILED)
        record = replace(
            self._record(open_request, outcome, status_code, latency, cost),
            finished_at=self._clock.utc_of(stats.finished_at),
            counts=TokenCounts(**{name: getattr(stats, name) for name in _COUNT_NAMES}),
            drafted_per_position=tuple(stats.drafted_per_position),
            accepted_per_position=tuple(stats.accepted_per_position),
            accepted_per_length=tuple(stats.accepted_per_length),
            drafter=self._drafter(stats.drafter),
            finish_reason=str(stats.finish_reason),
            error=None if stats.error is None else bounded_text(stats.error, MAX_ERROR_CHARACTERS),
            estimated_cost_without_speculation_nano_usd=without_speculation,
        )
        durable = self._writer.submit(record)
        with never_failing("metrics of a finished request"):
            span = open_request.trace
            context = trace.set_span_in_context(span.span, span.context) if span else None
            self._metrics.on_finished(stats, latency, outcome, open_request.variant, context)
            self._metrics.on_cost(cost)
            if span is not None:
                span.finish(stats, status_code, span_attributes(stats, cost))
        return FinishedRequest(cost, latency, durable)

    def on_lost(self, open_request: OpenRequest, *, status_code: str, error: str) -> None:
        """See Recording."""
        cost, _ = self._live.settle(open_request)
        now = self._clock.utc(self._clock.now_nanoseconds())
        latency = LatencySummary(
            e2e_seconds=max(0.0, (now - open_request.started_at).total_seconds())
        )
        outcome = _OUTCOMES.get(status_code, Outcome.FAILED)
        if outcome is Outcome.COMPLETED:
            raise ValueError("a request that was lost cannot have the status OK")
        record = replace(
            self._record(open_request, outcome, status_code, latency, cost),
            error=bounded_text(error, MAX_ERROR_CHARACTERS),
        )
        self._writer.post(record)
        with never_failing("metrics of a lost request"):
            self._metrics.on_cost(cost)
            if open_request.trace is not None:
                open_request.trace.finish_without_stats(status_code)

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
        """See Recording."""
        record_id = new_record_id()
        request_id = bounded_text(request_id, MAX_REQUEST_ID_CHARACTERS)
        now = self._clock.utc(self._clock.now_nanoseconds())
        with self._lock:
            attempt = self._next_attempt(request_id) if request_id else 1
        self._writer.post(
            RequestRecord(
                record_id=record_id,
                instance_id=self._instance.instance_id,
                request_id=request_id or record_id,
                attempt=attempt,
                started_at=now,
                finished_at=now,
                outcome=Outcome.REFUSED,
                status_code=status_code,
                latency=LatencySummary(e2e_seconds=0.0),
                counts=TokenCounts(num_prompt_tokens=num_prompt_tokens),
                model=self._model,
                tenant=self._tenant_key.pseudonym(tenant),
                labels=bounded_labels(labels or {}),
                trace_id=trace_id,
                error=bounded_text(error, MAX_ERROR_CHARACTERS),
            )
        )
        with never_failing("metrics of a refused request"):
            self._metrics.on_refused(reason)

    def on_audit(self, finding: AuditFinding) -> None:
        """See Recording."""
        self._writer.post(
            AuditRecord(
                audit_uid=new_record_id(),
                request_id=finding.request_id,
                record_id=finding.record_id,
                instance_id=self._instance.instance_id,
                audited_at=self._clock.utc(self._clock.now_nanoseconds()),
                model=self._model,
                drafter=self._drafter(finding.drafter),
                variant=finding.variant or None,
                verdict=str(finding.verdict),
                num_checked_tokens=finding.num_checked_tokens,
                num_mismatched_tokens=finding.num_mismatched_tokens,
                first_mismatch_index=finding.first_mismatch_index,
                smallest_margin=finding.smallest_margin,
                epsilon=finding.epsilon,
                audit_seconds=finding.audit_seconds,
            )
        )
        with never_failing("metrics of an audit"):
            self._metrics.on_audit(str(finding.verdict))

    def on_shadow(self, finding: ShadowFinding) -> None:
        """See Recording."""
        self._writer.post(
            ShadowRecord(
                shadow_uid=new_record_id(),
                request_id=finding.request_id,
                instance_id=self._instance.instance_id,
                measured_at=self._clock.utc(self._clock.now_nanoseconds()),
                model=self._model,
                drafter=self._drafter(finding.drafter),
                variant=finding.variant or None,
                num_rounds=finding.num_rounds,
                num_draft_tokens=finding.num_draft_tokens,
                num_accepted_tokens=finding.num_accepted_tokens,
                num_given_up=finding.num_given_up,
                replay_seconds=finding.replay_seconds,
            )
        )

    def on_breaker(self, state: str) -> None:
        """See Recording."""
        _log.warning("the breaker of speculation is now %s", state)
        with never_failing("a change of the breaker"):
            self._metrics.on_breaker(state)
            self._live.add_event(names.EVENT_BREAKER, {names.ATTR_BREAKER_STATE: state})

    def reprice(self, prices: PriceSchedule) -> None:
        """See Recording."""
        self._live.reprice(prices)

    def close(self) -> None:
        """See Recording."""
        if self._is_closed:
            return
        self._is_closed = True
        now, intervals = self._live.close()
        self._file(intervals)
        ended_at = self._clock.utc(now)
        last: Future[bool] = self._writer.submit(
            replace(self._instance, last_seen_at=ended_at, stopped_at=ended_at)
        )
        with contextlib.suppress(TimeoutError):
            last.result(timeout=10.0)
        with never_failing("the last reading of the ledger"):
            self._metrics.on_ledger(self._writer.status())
        self._writer.close()
        if self._on_close is not None:
            self._on_close()

    def _record(
        self,
        open_request: OpenRequest,
        outcome: Outcome,
        status_code: str,
        latency: LatencySummary,
        cost: RequestCost,
    ) -> RequestRecord:
        return RequestRecord(
            record_id=open_request.record_id,
            instance_id=self._instance.instance_id,
            request_id=open_request.request_id,
            attempt=open_request.attempt,
            started_at=open_request.started_at,
            finished_at=self._clock.utc(self._clock.now_nanoseconds()),
            outcome=outcome,
            status_code=status_code,
            latency=latency,
            counts=TokenCounts(num_prompt_tokens=open_request.num_prompt_tokens),
            cost=cost,
            sampling=open_request.sampling,
            model=self._model,
            variant=open_request.variant or None,
            tenant=open_request.tenant,
            price=self._live.price,
            labels=dict(open_request.labels),
            trace_id=open_request.trace.trace_id if open_request.trace else None,
        )

    def _drafter(self, name: str) -> DrafterRecord | None:
        return DrafterRecord(name, self._drafter_fingerprints.get(name, "")) if name else None

    def _next_attempt(self, request_id: str) -> int:
        """Counts the uses of an id that this process remembers; the ledger knows the rest."""
        attempt = self._attempts.pop(request_id, 0) + 1
        self._attempts[request_id] = attempt
        if len(self._attempts) > _MAX_REMEMBERED_IDS:
            self._attempts.popitem(last=False)
        return attempt

    def _file(self, intervals: list[CapacityRecord]) -> None:
        for interval in intervals:
            self._writer.post(interval)
            with never_failing("metrics of an interval"):
                self._metrics.on_interval(
                    interval.cost_idle_nano_usd,
                    interval.num_emitted_tokens,
                    interval.busy_nanoseconds,
                )

    def _on_tick(self, now_nanoseconds: int, intervals: list[CapacityRecord]) -> None:
        self._file(intervals)
        self._metrics.on_ledger(self._writer.status())
        if now_nanoseconds / 1e9 >= self._heartbeat_at:
            self._heartbeat_at = now_nanoseconds / 1e9 + _HEARTBEAT_SECONDS
            seen_at = self._clock.utc(now_nanoseconds)
            self._writer.post(replace(self._instance, last_seen_at=seen_at))
