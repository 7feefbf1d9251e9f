"""Records the metrics of telemetry.names. Bounded attributes; never an id, a tenant or content."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.metrics import Meter

from engine.stats import RequestStats, RowStepStats, StepStats
from telemetry import names
from telemetry.cardinality import OTHER, BoundedSeries, BoundedValues
from telemetry.drift import AcceptanceDrift
from telemetry.instruments import create_instrument
from telemetry.ledger.records import LatencySummary, Outcome, RequestCost, Verdict
from telemetry.ledger.writer_status import WriterStatus
from telemetry.names import MetricSpec

SAMPLED_ROWS = 2  # per step, of the histograms that have a value for each row
NANO_USD_PER_USD = 1e9


class Metrics:
    """All instruments of the process. Thread-safe."""

    def __init__(self, meter: Meter) -> None:
        self._instruments: dict[str, Any] = {
            spec.name: create_instrument(meter, spec) for spec in names.METRICS
        }
        self._series = {spec.name: BoundedSeries(spec.max_series) for spec in names.METRICS}
        self._bounded: dict[str, BoundedValues] = {}
        self._drift = AcceptanceDrift()
        self._set(names.BREAKER_OPEN, 0)
        for verdict in Verdict:  # a counter that begins with its first divergence shows no increase
            self._add(names.AUDITS, 0, self._of_verdict(verdict))
        self._ledger_totals = (0, 0, 0, 0)
        self._step_totals = (0, 0)  # of the engine, so far
        self._add(names.AUDITS_DROPPED, 0)

    def on_step(self, stats: StepStats) -> None:
        """One engine step. One thread, steps in order."""
        self._record(names.STEP_DURATION, stats.duration_nanoseconds / 1e9)
        for phase, nanoseconds in (
            ("propose", stats.propose_nanoseconds),
            ("verify", stats.verify_nanoseconds),
            ("align", stats.align_nanoseconds),
            ("sample", stats.sample_nanoseconds),
        ):
            if nanoseconds:
                self._add(names.STEP_PHASE_TIME, nanoseconds / 1e9, {names.ATTR_PHASE: phase})
        self._on_decisions(stats)
        for event in stats.drafter_events:
            drafter = self._bound(names.ATTR_DRAFTER, event.drafter)
            kind = {names.ATTR_DRAFTER: drafter, names.ATTR_DRAFTER_EVENT: str(event.kind)}
            self._add(names.DRAFTER_EVENTS, 1, kind)
        for row in _sampled(stats):
            self._record(names.DRAFT_LENGTH, row.num_draft_positions)
            if row.num_emitted_tokens:
                self._record(names.TOKENS_PER_STEP, row.num_emitted_tokens)
        totals = (stats.num_preemptions, stats.num_audits_dropped)
        before, self._step_totals = self._step_totals, totals
        for spec, total, earlier in zip(
            (names.PREEMPTIONS, names.AUDITS_DROPPED), totals, before, strict=True
        ):
            if total > earlier:
                self._add(spec, total - earlier)

    def _on_decisions(self, stats: StepStats) -> None:
        num_drafting = sum(row.num_draft_positions > 0 for row in stats.rows)
        num_decoding = sum(row.num_decode_positions > 0 for row in stats.rows)
        for decision, count in (("draft", num_drafting), ("plain", num_decoding - num_drafting)):
            if count:
                self._add(names.DECISIONS, count, {names.ATTR_DECISION: decision})

    def on_load(self, stats: StepStats) -> None:
        """The readings of the newest step, for gauges."""
        self._set(names.ROWS, stats.num_running)
        self._set(names.QUEUE_DEPTH, stats.num_waiting)
        used = stats.num_total_blocks - stats.num_free_blocks
        self._set(names.BLOCKS, stats.num_free_blocks, {names.ATTR_STATE: "free"})
        self._set(names.BLOCKS, used, {names.ATTR_STATE: "used"})

    def on_idle(self) -> None:
        """Nothing is open."""
        self._set(names.ROWS, 0)
        self._set(names.QUEUE_DEPTH, 0)

    def on_finished(
        self,
        stats: RequestStats,
        latency: LatencySummary,
        outcome: Outcome,
        variant: str,
        context: Context | None,
    ) -> None:
        """A finished request. `context` carries its span, for exemplars."""
        of_variant = {names.ATTR_VARIANT: self._bound(names.ATTR_VARIANT, variant)}
        with_outcome = {**of_variant, names.ATTR_OUTCOME: str(outcome)}
        self._add(names.REQUESTS, 1, with_outcome)
        self._record(names.REQUEST_DURATION, latency.e2e_seconds, with_outcome, context)
        for spec, value in (
            (names.QUEUE_TIME, latency.queue_seconds),
            (names.TTFT, latency.ttft_seconds),
            (names.TPOT, latency.tpot_seconds),
            (names.STEP_LATENCY, latency.mean_step_latency_seconds),
        ):
            if value is not None:
                self._record(spec, value, of_variant, context)
        for kind, count in (
            ("input", stats.num_prompt_tokens),
            ("cached_input", stats.num_cached_prompt_tokens),
            ("output", stats.num_output_tokens),
            ("recomputed", stats.num_recomputed_tokens),
        ):
            if count:
                self._add(names.TOKENS, count, {**of_variant, names.ATTR_GEN_AI_TOKEN_TYPE: kind})
        if stats.first_scheduled_at is not None:
            result = "hit" if stats.num_cached_prompt_tokens else "miss"
            self._add(names.PREFIX_LOOKUPS, 1, {names.ATTR_CACHE_RESULT: result})
        self._on_speculation(stats, of_variant)

    def on_refused(self, reason: str) -> None:
        """A request that never reached the engine."""
        self._add(names.REJECTS, 1, {names.ATTR_REASON: self._bound(names.ATTR_REASON, reason)})

    def on_audit(self, verdict: str) -> None:
        """A verdict of the equivalence auditor."""
        self._add(names.AUDITS, 1, self._of_verdict(verdict))

    def on_breaker(self, state: str) -> None:
        """The breaker that switches speculation off has changed: closed, open, half_open."""
        self._add(names.BREAKER_CHANGES, 1, {names.ATTR_BREAKER_STATE: state})
        self._set(names.BREAKER_OPEN, 1 if state == "open" else 0)

    def on_cost(self, cost: RequestCost) -> None:
        """The cost of a finished request."""
        for part, nano_usd in (
            ("prefill", cost.cost_prefill_nano_usd),
            ("decode", cost.cost_decode_nano_usd),
            ("draft", cost.cost_draft_nano_usd),
            ("drafter", cost.cost_drafter_nano_usd),
        ):
            if nano_usd:
                self._add(names.COST, nano_usd / NANO_USD_PER_USD, {names.ATTR_PART: part})

    def on_interval(
        self, idle_nano_usd: int, num_emitted_tokens: int, busy_nanoseconds: int
    ) -> None:
        """A capacity interval that ended."""
        self._add(names.COST, idle_nano_usd / NANO_USD_PER_USD, {names.ATTR_PART: "idle"})
        if busy_nanoseconds:
            self._set(names.GOODPUT, num_emitted_tokens / busy_nanoseconds * 1e9)

    def on_energy(self, source: str, measured_microjoules: int | None, is_answering: bool) -> None:
        """A window of the energy counter; None when it measured nothing."""
        attributes = {names.ATTR_ENERGY_SOURCE: source}
        self._set(names.ENERGY_SOURCE_UP, 1 if is_answering else 0, attributes)
        if measured_microjoules is not None:
            self._add(names.ENERGY, measured_microjoules / 1e6, attributes)

    def on_ledger(self, status: WriterStatus) -> None:
        """A reading of the ledger's writer; its totals become counters. One thread."""
        self._set(names.LEDGER_QUEUE, status.num_queued)
        self._set(names.LEDGER_LAG, status.lag_seconds)
        self._set(names.LEDGER_JOURNAL_BYTES, status.journal_bytes)
        others = status.num_written - status.num_requests_written
        totals = (status.num_requests_written, others, status.num_spilled, status.num_lost)
        before, self._ledger_totals = self._ledger_totals, totals
        requests, other, spilled, lost = (n - b for n, b in zip(totals, before, strict=True))
        self._add(names.LEDGER_RECORDS, requests, {names.ATTR_KIND: "request"})
        self._add(names.LEDGER_RECORDS, other, {names.ATTR_KIND: OTHER})
        self._add(names.LEDGER_SPILLED, spilled)
        self._add(names.LEDGER_LOST, lost)

    def _on_speculation(self, stats: RequestStats, of_variant: Mapping[str, str]) -> None:
        if not stats.num_verify_steps:
            return
        drafter = self._bound(names.ATTR_DRAFTER, stats.drafter or "none")
        attributes = {**of_variant, names.ATTR_DRAFTER: drafter}
        drop = self._drift.observe(
            drafter, stats.num_accepted_tokens, stats.num_verify_steps, stats.finished_at
        )
        self._set(names.ACCEPTANCE_DROP, drop, {names.ATTR_DRAFTER: drafter})
        self._add(names.DRAFTS, stats.num_verify_steps, attributes)
        self._add(names.DRAFTED, stats.num_draft_tokens, attributes)
        self._add(names.ACCEPTED, stats.num_accepted_tokens, attributes)
        self._add(names.EMITTED_ACCEPTED, stats.num_emitted_accepted_tokens, attributes)
        positions = zip(stats.drafted_per_position, stats.accepted_per_position, strict=True)
        for position, (drafted, accepted) in enumerate(positions):
            at_position: dict[str, str | int] = {**attributes, names.ATTR_POSITION: position}
            self._add(names.DRAFTED_BY_POSITION, drafted, at_position)
            self._add(names.ACCEPTED_BY_POSITION, accepted, at_position)

    def _of_verdict(self, verdict: str) -> dict[str, str]:
        return {names.ATTR_VERDICT: self._bound(names.ATTR_VERDICT, str(verdict))}

    def _bound(self, attribute: str, value: str) -> str:
        bounded = self._bounded.get(attribute)
        if bounded is None:
            bounded = self._bounded.setdefault(attribute, BoundedValues())
        return bounded(value)

    def _add(
        self, spec: MetricSpec, amount: float, attributes: Mapping[str, str | int] | None = None
    ) -> None:
        self._instruments[spec.name].add(amount, self._admitted(spec, attributes))

    def _set(
        self, spec: MetricSpec, value: float, attributes: Mapping[str, str] | None = None
    ) -> None:
        self._instruments[spec.name].set(value, self._admitted(spec, attributes))

    def _record(
        self,
        spec: MetricSpec,
        value: float,
        attributes: Mapping[str, str] | None = None,
        context: Context | None = None,
    ) -> None:
        admitted = self._admitted(spec, attributes)
        self._instruments[spec.name].record(value, admitted, context=context)

    def _admitted(
        self, spec: MetricSpec, attributes: Mapping[str, str | int] | None
    ) -> Mapping[str, str | int] | None:
        return self._series[spec.name](attributes) if attributes else None


def _sampled(stats: StepStats) -> list[RowStepStats]:
    """A few decoding rows of a step, others in the next: a histogram costs microseconds a row,
    which a large batch would pay thousands of times a second."""
    decoding = [row for row in stats.rows if row.num_decode_positions]
    if len(decoding) <= SAMPLED_ROWS:
        return decoding
    first = stats.step_index * SAMPLED_ROWS
    return [decoding[(first + offset) % len(decoding)] for offset in range(SAMPLED_ROWS)]
