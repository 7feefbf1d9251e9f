"""How records become rows: the columns of each table in order, and the values in that order."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from operator import attrgetter
from typing import Any

from telemetry.ledger.records import (
    AuditRecord,
    CapacityRecord,
    RequestRecord,
    ShadowRecord,
    StartRecord,
)

MAX_ERROR_CHARACTERS = 512
MAX_REQUEST_ID_CHARACTERS = 160
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

InstantValue = Callable[[datetime], Any]

REQUEST_PLAIN_COLUMNS = (
    "record_id", "request_id", "instance_id", "outcome", "finish_reason", "status_code",
    "trace_id", "estimated_cost_without_speculation_nano_usd", "allocation_method",
)  # fmt: skip
LATENCY_COLUMNS = (
    "queue_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds", "mean_step_latency_seconds",
)  # fmt: skip
SAMPLING_COLUMNS = (
    "temperature", "top_k", "top_p", "acceptance_rule", "seed", "speculation_mode", "max_tokens",
)  # fmt: skip
COUNT_COLUMNS = (
    "num_prompt_tokens", "num_cached_prompt_tokens", "num_recomputed_tokens", "num_output_tokens",
    "num_prefill_positions", "num_steps", "num_plain_steps", "num_verify_steps",
    "num_draft_tokens", "num_accepted_tokens", "num_emitted_accepted_tokens", "num_cut_tokens",
    "num_drafter_positions", "num_preemptions",
)  # fmt: skip
COST_COLUMNS = (
    "cost_nano_usd", "cost_prefill_nano_usd", "cost_decode_nano_usd", "cost_draft_nano_usd",
    "cost_rejected_nano_usd", "cost_drafter_nano_usd", "busy_nanoseconds", "energy_microjoules",
    "energy_source",
)  # fmt: skip
REQUEST_COLUMNS = (
    "ledger_id", "attempt", "revision", "supersedes_ledger_id", "recorded_at", "started_at",
    "finished_at", "finished_on", "model_key", "drafter_key", "variant_key", "tenant_key",
    "price_key", "labels", "error", "guarantee",
    *REQUEST_PLAIN_COLUMNS, *LATENCY_COLUMNS, *SAMPLING_COLUMNS, *COUNT_COLUMNS, *COST_COLUMNS,
)  # fmt: skip
ACCEPTANCE_COLUMNS = (
    "request_ledger_id", "position", "finished_on", "num_drafted", "num_accepted",
    "num_accepted_of_length",
)  # fmt: skip
START_COLUMNS = (
    "record_id", "instance_id", "request_id", "attempt", "started_at", "model_key",
    "variant_key", "tenant_key", "price_key", "num_prompt_tokens", "labels", "trace_id",
)  # fmt: skip
CAPACITY_PLAIN_COLUMNS = (
    "instance_id", "interval_index", "wall_nanoseconds", "busy_nanoseconds", "idle_nanoseconds",
    "lost_nanoseconds", "num_steps", "num_prefill_positions", "num_decode_positions",
    "num_draft_positions", "num_emitted_tokens", "max_num_running", "max_num_waiting",
    "cost_busy_nano_usd", "cost_idle_nano_usd", "cost_lost_nano_usd", "energy_busy_microjoules",
    "energy_idle_microjoules", "energy_source", "started_at", "finished_at",
)  # fmt: skip
AUDIT_PLAIN_COLUMNS = (
    "audit_uid", "request_id", "record_id", "instance_id", "verdict", "num_checked_tokens",
    "num_mismatched_tokens", "first_mismatch_index", "smallest_margin", "epsilon",
    "audit_seconds", "audited_at",
)  # fmt: skip
SHADOW_PLAIN_COLUMNS = (
    "shadow_uid", "request_id", "instance_id", "measured_at", "num_rounds", "num_draft_tokens",
    "num_accepted_tokens", "num_given_up", "replay_seconds",
)  # fmt: skip

_request_values = attrgetter(
    *REQUEST_PLAIN_COLUMNS,
    *(f"latency.{name}" for name in LATENCY_COLUMNS),
    *(f"sampling.{name}" for name in SAMPLING_COLUMNS),
    *(f"counts.{name}" for name in COUNT_COLUMNS),
    *(f"cost.{name}" for name in COST_COLUMNS),
)
_capacity_values = attrgetter(*CAPACITY_PLAIN_COLUMNS)
_audit_values = attrgetter(*AUDIT_PLAIN_COLUMNS)
_shadow_values = attrgetter(*SHADOW_PLAIN_COLUMNS)


def sqlite_instant(instant: datetime) -> int:
    """Microseconds since 1970, as models.UtcInstant stores them in SQLite."""
    return (instant - _EPOCH) // _MICROSECOND


def postgresql_instant(instant: datetime) -> datetime:
    """What the driver takes as it is."""
    return instant


def labels_json(labels: dict[str, str]) -> str:
    """Labels as the JSON columns of both databases take them."""
    return json.dumps(labels, ensure_ascii=False) if labels else "{}"


def request_row(
    record: RequestRecord,
    ledger_id: int,
    recorded_at: Any,
    keys: Sequence[int | None],
    instant: InstantValue,
) -> tuple[Any, ...]:
    """Values in the order of REQUEST_COLUMNS; keys: model, drafter, variant, tenant, price."""
    error = record.error
    return (
        ledger_id,
        record.attempt,
        record.revision,
        record.supersedes_ledger_id,
        recorded_at,
        instant(record.started_at),
        instant(record.finished_at),
        finished_on(record).isoformat(),
        *keys,
        labels_json(record.labels),
        error if error is None else error[:MAX_ERROR_CHARACTERS],
        record.model.guarantee if record.model else None,
        *_request_values(record),
    )


def acceptance_rows(record: RequestRecord, ledger_id: int) -> list[tuple[Any, ...]]:
    """Values in the order of ACCEPTANCE_COLUMNS, one row for each position ever drafted."""
    day = finished_on(record).isoformat()
    drafted, accepted = record.drafted_per_position, record.accepted_per_position
    of_length = record.accepted_per_length
    counts = zip(drafted, accepted, of_length or [None] * len(drafted), strict=True)
    return [(ledger_id, position, day, *values) for position, values in enumerate(counts)]


def start_row(
    record: StartRecord, keys: Sequence[int | None], instant: InstantValue
) -> tuple[Any, ...]:
    """Values in the order of START_COLUMNS; keys: model, variant, tenant, price."""
    return (
        record.record_id,
        record.instance_id,
        record.request_id,
        record.attempt,
        instant(record.started_at),
        *keys,
        record.num_prompt_tokens,
        labels_json(record.labels),
        record.trace_id,
    )


def capacity_values(record: CapacityRecord) -> dict[str, Any]:
    """Column values, without keys and recorded_at."""
    return dict(zip(CAPACITY_PLAIN_COLUMNS, _capacity_values(record), strict=True))


def audit_values(record: AuditRecord) -> dict[str, Any]:
    """Column values, without keys and recorded_at."""
    guarantee = record.model.guarantee if record.model else None
    values = zip(AUDIT_PLAIN_COLUMNS, _audit_values(record), strict=True)
    return {**dict(values), "guarantee": guarantee}


def shadow_values(record: ShadowRecord) -> dict[str, Any]:
    """Column values, without keys and recorded_at."""
    return dict(zip(SHADOW_PLAIN_COLUMNS, _shadow_values(record), strict=True))


def finished_on(record: RequestRecord) -> date:
    """The UTC day by which PostgreSQL partitions the request and its acceptance."""
    return record.finished_at.astimezone(UTC).date()
