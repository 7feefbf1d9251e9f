"""What is written to the ledger, before the database gives it keys: frozen data.

Units and null rules are those of the columns of the same names in telemetry.ledger.models.
Every record can be made into one line of JSON and back without loss, for the local journal.
"""

import json
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any
from uuid import uuid4

NANOSECONDS_PER_HOUR = 3_600_000_000_000
ALLOCATION_METHOD = "step-positions-v1"


class Outcome(StrEnum):
    """How an attempt ended, for the ledger."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"  # by the caller, or by the loss of the connection
    DEADLINE_EXCEEDED = "deadline_exceeded"
    REFUSED = "refused"  # never reached the engine
    FAILED = "failed"
    ORPHANED = "orphaned"  # its server was killed while it ran


class Verdict(StrEnum):
    """What an audit found: equal tokens, a tie within rounding, or a real difference."""

    EXACT = "exact"
    NUMERIC_TIE = "numeric_tie"
    DIVERGENCE = "divergence"


def new_record_id() -> str:
    """Identifies one attempt: 32 hex digits, random."""
    return uuid4().hex


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A loaded target model."""

    name: str
    fingerprint: str
    dtype: str
    device: str
    num_parameters: int
    layout: str
    numerics: str
    guarantee: str


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """A drafter; fingerprint "" where it has no weights."""

    name: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """The keyed hash of a tenant's name, and the id of the key."""

    pseudonym: str
    key_id: str


@dataclass(frozen=True, slots=True)
class PriceRecord:
    """An entry of the price book."""

    book_version: str
    machine_type: str
    purchase: str
    currency: str
    nano_usd_per_hour: int
    embodied_nano_usd_per_hour: int
    valid_from: datetime
    valid_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """One start of one server. Written again as it lives on: last_seen_at only grows."""

    instance_id: str
    node: str
    hostname: str
    version: str
    started_at: datetime
    last_seen_at: datetime
    stopped_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A request that was accepted and is now open."""

    record_id: str
    instance_id: str
    request_id: str
    attempt: int
    started_at: datetime
    model: ModelRecord | None
    variant: str | None
    tenant: TenantRecord | None
    price: PriceRecord | None
    num_prompt_tokens: int
    labels: dict[str, str]
    trace_id: str | None


@dataclass(frozen=True, slots=True)
class SamplingSummary:
    """What of the sampling parameters the ledger keeps; all NULL for a refused request."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    acceptance_rule: str | None = None
    seed: int | None = None
    speculation_mode: str | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The counts of engine.stats.RequestStats, under the same names."""

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0
    num_prefill_positions: int = 0
    num_steps: int = 0
    num_plain_steps: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_accepted_tokens: int = 0
    num_cut_tokens: int = 0
    num_drafter_positions: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestCost:
    """A request's share of the machine.

    prefill + decode + draft + drafter = cost; rejected is a part of draft. busy_nanoseconds is
    its share of the time of its steps. energy_microjoules is None when it was not measured.
    """

    cost_nano_usd: int = 0
    cost_prefill_nano_usd: int = 0
    cost_decode_nano_usd: int = 0
    cost_draft_nano_usd: int = 0
    cost_rejected_nano_usd: int = 0
    cost_drafter_nano_usd: int = 0
    busy_nanoseconds: int = 0
    energy_microjoules: int | None = None
    energy_source: str = "none"


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Seconds; None where the thing never happened (telemetry.latency computes them)."""

    e2e_seconds: float
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    mean_step_latency_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished attempt. `revision` > 0 corrects the row `supersedes_ledger_id`.

    accepted_per_length is None in journals from before it was counted.
    """

    record_id: str
    instance_id: str
    request_id: str
    attempt: int
    started_at: datetime
    finished_at: datetime
    outcome: str
    status_code: str
    latency: LatencySummary
    counts: TokenCounts = field(default_factory=TokenCounts)
    cost: RequestCost = field(default_factory=RequestCost)
    sampling: SamplingSummary = field(default_factory=SamplingSummary)
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    accepted_per_length: tuple[int, ...] | None = None
    model: ModelRecord | None = None
    drafter: DrafterRecord | None = None
    variant: str | None = None
    tenant: TenantRecord | None = None
    price: PriceRecord | None = None
    labels: dict[str, str] = field(default_factory=dict)
    trace_id: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    estimated_cost_without_speculation_nano_usd: int | None = None
    allocation_method: str = ALLOCATION_METHOD
    revision: int = 0
    supersedes_ledger_id: int | None = None

    def __post_init__(self) -> None:
        if len(self.drafted_per_position) != len(self.accepted_per_position):
            raise ValueError("drafted and accepted per position differ in length")
        per_position, per_length = self.accepted_per_position, self.accepted_per_length
        sizes = [(len(c), sum(c)) for c in (per_position, per_length) if c is not None]
        if len(set(sizes)) > 1:
            raise ValueError("accepted_per_length does not add up to accepted_per_position")


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """An interval of one instance: wall = busy + idle + lost."""

    instance_id: str
    interval_index: int
    started_at: datetime
    finished_at: datetime
    model: ModelRecord | None
    price: PriceRecord | None
    wall_nanoseconds: int
    busy_nanoseconds: int
    idle_nanoseconds: int
    lost_nanoseconds: int
    num_steps: int
    num_prefill_positions: int
    num_decode_positions: int
    num_draft_positions: int
    num_emitted_tokens: int
    max_num_running: int
    max_num_waiting: int
    cost_busy_nano_usd: int
    cost_idle_nano_usd: int
    cost_lost_nano_usd: int
    energy_busy_microjoules: int | None = None
    energy_idle_microjoules: int | None = None
    energy_source: str = "none"


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """The verdict of the equivalence auditor on one finished request."""

    audit_uid: str
    request_id: str
    record_id: str | None
    instance_id: str
    audited_at: datetime
    model: ModelRecord | None
    drafter: DrafterRecord | None
    variant: str | None
    verdict: str
    num_checked_tokens: int
    num_mismatched_tokens: int
    first_mismatch_index: int | None
    smallest_margin: float | None
    epsilon: float | None
    audit_seconds: float


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """The acceptance that a head would have had in one finished request, by exact replay."""

    shadow_uid: str
    request_id: str
    instance_id: str
    measured_at: datetime
    model: ModelRecord | None
    drafter: DrafterRecord | None
    variant: str | None
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_given_up: int
    replay_seconds: float


Record = InstanceRecord | StartRecord | RequestRecord | CapacityRecord | AuditRecord | ShadowRecord

_KINDS: dict[str, type[Any]] = {
    "instance": InstanceRecord,
    "start": StartRecord,
    "request": RequestRecord,
    "capacity": CapacityRecord,
    "audit": AuditRecord,
    "shadow": ShadowRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_PARTS: dict[str, type[Any]] = {
    "model": ModelRecord,
    "drafter": DrafterRecord,
    "tenant": TenantRecord,
    "price": PriceRecord,
    "latency": LatencySummary,
    "counts": TokenCounts,
    "cost": RequestCost,
    "sampling": SamplingSummary,
}


def encode_record(record: Record) -> bytes:
    """One line of JSON without the line's end."""
    document = {"kind": _NAMES[type(record)], **_plain(record)}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def decode_record(line: bytes) -> Record:
    """The inverse of encode_record. Raises ValueError for anything else.

    A field that this version does not know is refused rather than dropped: a journal written
    by a newer version waits for that version.
    """
    try:
        document = json.loads(line)
        kind = _KINDS[document.pop("kind")]
        record: Record = _built(kind, document)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a ledger record: {error!r}") from error
    return record


def _plain(record: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for spec in fields(record):
        value = getattr(record, spec.name)
        if isinstance(value, datetime):
            value = value.astimezone(UTC).isoformat(timespec="microseconds")
        elif spec.name in _PARTS and value is not None:
            value = _plain(value)
        plain[spec.name] = value
    return plain


def _built(kind: type[Any], document: dict[str, Any]) -> Any:
    values = dict(document)
    for name, value in document.items():
        if value is None:
            continue
        if name in _PARTS:
            values[name] = _built(_PARTS[name], value)
        elif name.endswith("_at") or name in ("valid_from", "valid_to"):
            values[name] = datetime.fromisoformat(value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)
