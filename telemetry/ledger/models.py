"""The ledger's tables. Append-only: a row is never changed, a correction is a further row.

Money is int64 nano-USD (billionths of a US dollar), energy int64 microjoules and NULL when it
was not measured, durations `..._seconds` doubles or `..._nanoseconds` integers, instants UTC
with microseconds. No prompt and no output text has a column here, and a tenant is known by the
keyed hash of its name alone.
"""

from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Date,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator, TypeEngine

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class UtcInstant(TypeDecorator[datetime]):
    """A UTC instant to the microsecond; Python sees timezone-aware datetimes only.

    PostgreSQL stores `timestamptz`. SQLite has no such type and stores int64 microseconds since
    1970, which sort and compare without parsing. A naive datetime is refused with ValueError.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(BigInteger())
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"an instant needs a time zone, got {value!r}")
        if dialect.name == "sqlite":
            return (value - _EPOCH) // _MICROSECOND
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name == "sqlite":
            return _EPOCH + timedelta(microseconds=int(value))
        instant: datetime = value
        return instant.astimezone(UTC)


# SQLite numbers rows by itself only where the key is spelled INTEGER.
RowKey = BigInteger().with_variant(Integer(), "sqlite")
JsonObject = JSON().with_variant(JSONB(), "postgresql")


class Base(DeclarativeBase):
    """Root of the ledger's tables."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        datetime: UtcInstant(),
        date: Date(),
        int: BigInteger(),
        float: Double(),
        dict[str, str]: JsonObject,
    }


class Model(Base):
    """A target model as loaded. `fingerprint` hashes its configuration and weights' headers."""

    __tablename__ = "models"
    __table_args__ = (
        UniqueConstraint("fingerprint", "dtype", "device", "layout", "guarantee"),
        {"sqlite_autoincrement": True},
    )

    model_key: Mapped[int] = mapped_column(RowKey, primary_key=True)
    name: Mapped[str] = mapped_column(String(512))
    fingerprint: Mapped[str] = mapped_column(String(128))
    dtype: Mapped[str] = mapped_column(String(32))
    device: Mapped[str] = mapped_column(String(128))
    num_parameters: Mapped[int]
    layout: Mapped[str] = mapped_column(String(32))
    numerics: Mapped[str] = mapped_column(String(32))
    guarantee: Mapped[str] = mapped_column(String(32))
    first_seen_at: Mapped[datetime]


class Drafter(Base):
    """What proposes draft tokens. `fingerprint` is empty where there are no weights."""

    __tablename__ = "drafters"
    __table_args__ = (UniqueConstraint("name", "fingerprint"), {"sqlite_autoincrement": True})

    drafter_key: Mapped[int] = mapped_column(RowKey, primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    fingerprint: Mapped[str] = mapped_column(String(128))
    first_seen_at: Mapped[datetime]


class Variant(Base):
    """An arm of an experiment; `default` where none runs."""

    __tablename__ = "variants"
    __table_args__ = ({"sqlite_autoincrement": True},)

    variant_key: Mapped[int] = mapped_column(RowKey, primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    first_seen_at: Mapped[datetime]


class Tenant(Base):
    """A tenant, known only by the keyed hash of its name. `key_id` names the key, not its value."""

    __tablename__ = "tenants"
    __table_args__ = (UniqueConstraint("pseudonym", "key_id"), {"sqlite_autoincrement": True})

    tenant_key: Mapped[int] = mapped_column(RowKey, primary_key=True)
    pseudonym: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(32))
    first_seen_at: Mapped[datetime]


class Price(Base):
    """What an hour of the machine costs, embodied share included, within its validity."""

    __tablename__ = "prices"
    __table_args__ = (
        UniqueConstraint("book_version", "machine_type", "purchase", "valid_from"),
        {"sqlite_autoincrement": True},
    )

    price_key: Mapped[int] = mapped_column(RowKey, primary_key=True)
    book_version: Mapped[str] = mapped_column(String(64))
    machine_type: Mapped[str] = mapped_column(String(128))
    purchase: Mapped[str] = mapped_column(String(32))  # on_demand, spot, reserved, owned
    currency: Mapped[str] = mapped_column(String(3))
    nano_usd_per_hour: Mapped[int]
    embodied_nano_usd_per_hour: Mapped[int]  # the part of nano_usd_per_hour for manufacture
    valid_from: Mapped[datetime]
    valid_to: Mapped[datetime | None]


class Instance(Base):
    """One start of one server. `node` survives a restart, `instance_id` does not."""

    __tablename__ = "instances"

    instance_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    node: Mapped[str] = mapped_column(String(64), index=True)
    hostname: Mapped[str] = mapped_column(String(256))
    version: Mapped[str] = mapped_column(String(64))
    started_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    stopped_at: Mapped[datetime | None]


class RequestStart(Base):
    """An open request. The transaction that writes its ledger row removes this one.

    What is still here after its server ended is an orphan: the next start closes it with a row
    whose outcome is `orphaned`.
    """

    __tablename__ = "request_starts"

    record_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    instance_id: Mapped[str] = mapped_column(String(64), index=True)
    request_id: Mapped[str] = mapped_column(String(160))
    attempt: Mapped[int]
    started_at: Mapped[datetime]
    model_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("models.model_key"))
    variant_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("variants.variant_key"))
    tenant_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("tenants.tenant_key"))
    price_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("prices.price_key"))
    num_prompt_tokens: Mapped[int]
    labels: Mapped[dict[str, str]]
    trace_id: Mapped[str | None] = mapped_column(String(32))


class Request(Base):
    """One attempt of one request, whatever its outcome.

    `ledger_id` only grows and is the column for watermarks; a reader that follows it leaves a
    lag on `recorded_at`, because PostgreSQL hands out numbers before transactions commit.
    `record_id` identifies the attempt and makes writing it twice harmless. `revision` 0 is the
    original; a correction is a row with the next revision that names the row it supersedes, and
    the highest revision is the one that counts (view `current_requests`).
    `cost_prefill + cost_decode + cost_draft + cost_drafter` is `cost`; `cost_rejected` is the
    part of `cost_draft` that verified tokens which were not accepted.
    """

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("record_id", "revision", name="uq_requests_record"),
        UniqueConstraint("request_id", "attempt", "revision", name="uq_requests_attempt"),
        Index("ix_requests_recorded_at", "recorded_at"),
        Index("ix_requests_finished_on", "finished_on"),
        {"sqlite_autoincrement": True},
    )

    ledger_id: Mapped[int] = mapped_column(RowKey, primary_key=True)
    record_id: Mapped[str] = mapped_column(String(32))
    request_id: Mapped[str] = mapped_column(String(160))
    attempt: Mapped[int]
    revision: Mapped[int]
    supersedes_ledger_id: Mapped[int | None] = mapped_column(RowKey, index=True)
    instance_id: Mapped[str] = mapped_column(String(64))
    recorded_at: Mapped[datetime]  # when the row was written to this database
    started_at: Mapped[datetime]  # arrival
    finished_at: Mapped[datetime]
    finished_on: Mapped[date]  # the UTC day of finished_at; PostgreSQL partitions by it

    model_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("models.model_key"))
    drafter_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("drafters.drafter_key"))
    variant_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("variants.variant_key"))
    tenant_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("tenants.tenant_key"))
    price_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("prices.price_key"))
    labels: Mapped[dict[str, str]]
    trace_id: Mapped[str | None] = mapped_column(String(32))

    outcome: Mapped[str] = mapped_column(String(32))
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    status_code: Mapped[str] = mapped_column(String(32))
    error: Mapped[str | None] = mapped_column(String(512))
    guarantee: Mapped[str | None] = mapped_column(String(32))

    temperature: Mapped[float | None]
    top_k: Mapped[int | None]
    top_p: Mapped[float | None]
    acceptance_rule: Mapped[str | None] = mapped_column(String(32))
    seed: Mapped[int | None]
    speculation_mode: Mapped[str | None] = mapped_column(String(32))
    max_tokens: Mapped[int | None]

    queue_seconds: Mapped[float | None]
    ttft_seconds: Mapped[float | None]
    tpot_seconds: Mapped[float | None]
    e2e_seconds: Mapped[float]
    mean_step_latency_seconds: Mapped[float | None]

    num_prompt_tokens: Mapped[int]
    num_cached_prompt_tokens: Mapped[int]
    num_recomputed_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    num_prefill_positions: Mapped[int]
    num_steps: Mapped[int]
    num_plain_steps: Mapped[int]
    num_verify_steps: Mapped[int]
    num_draft_tokens: Mapped[int]
    num_accepted_tokens: Mapped[int]
    num_emitted_accepted_tokens: Mapped[int]
    num_cut_tokens: Mapped[int]
    num_drafter_positions: Mapped[int]
    num_preemptions: Mapped[int]

    cost_nano_usd: Mapped[int]
    cost_prefill_nano_usd: Mapped[int]
    cost_decode_nano_usd: Mapped[int]
    cost_draft_nano_usd: Mapped[int]
    cost_rejected_nano_usd: Mapped[int]
    cost_drafter_nano_usd: Mapped[int]
    busy_nanoseconds: Mapped[int]  # its share of the steps it took part in
    estimated_cost_without_speculation_nano_usd: Mapped[int | None]  # an estimate, never a measure
    allocation_method: Mapped[str] = mapped_column(String(64))
    energy_microjoules: Mapped[int | None]
    energy_source: Mapped[str] = mapped_column(String(32))


class RequestAcceptance(Base):
    """Drafts of one request that had a token at a position (0-based), and those accepted there.

    Acceptance is a prefix, so the rest follows: rounds that drafted exactly n tokens are
    num_drafted[n-1] - num_drafted[n], rounds that accepted exactly n are
    num_accepted[n-1] - num_accepted[n] (for n = 0: num_verify_steps - num_accepted[0]).
    What does not follow is num_accepted_of_length: the tokens accepted in the rounds that
    drafted exactly position + 1 tokens. NULL in rows from before it was counted.
    """

    __tablename__ = "request_acceptance"
    __table_args__ = ({"sqlite_with_rowid": False},)

    request_ledger_id: Mapped[int] = mapped_column(RowKey, primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(RowKey, primary_key=True, autoincrement=False)
    finished_on: Mapped[date]  # that of the request
    num_drafted: Mapped[int]
    num_accepted: Mapped[int]
    num_accepted_of_length: Mapped[int | None]


class CapacityInterval(Base):
    """What the machine did and cost in an interval of one instance.

    wall = busy + idle + lost. `cost_busy` is what the steps of the interval charged to requests;
    `cost_lost` is what cannot be charged any more because the server was killed, so that over an
    instance: requests + idle + lost = price x wall time, to the nano-dollar.
    Energy is NULL when the machine has no counter.
    """

    __tablename__ = "capacity_intervals"
    __table_args__ = (
        UniqueConstraint("instance_id", "interval_index"),
        Index("ix_capacity_intervals_started_at", "started_at"),
        {"sqlite_autoincrement": True},
    )

    capacity_id: Mapped[int] = mapped_column(RowKey, primary_key=True)
    instance_id: Mapped[str] = mapped_column(String(64))
    interval_index: Mapped[int]
    recorded_at: Mapped[datetime]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    model_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("models.model_key"))
    price_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("prices.price_key"))
    wall_nanoseconds: Mapped[int]
    busy_nanoseconds: Mapped[int]
    idle_nanoseconds: Mapped[int]
    lost_nanoseconds: Mapped[int]
    num_steps: Mapped[int]
    num_prefill_positions: Mapped[int]
    num_decode_positions: Mapped[int]
    num_draft_positions: Mapped[int]
    num_emitted_tokens: Mapped[int]
    max_num_running: Mapped[int]
    max_num_waiting: Mapped[int]
    cost_busy_nano_usd: Mapped[int]
    cost_idle_nano_usd: Mapped[int]
    cost_lost_nano_usd: Mapped[int]
    energy_busy_microjoules: Mapped[int | None]
    energy_idle_microjoules: Mapped[int | None]
    energy_source: Mapped[str] = mapped_column(String(32))


class AuditResult(Base):
    """What the equivalence auditor found in one finished request."""

    __tablename__ = "audit_results"
    __table_args__ = (
        UniqueConstraint("audit_uid"),
        Index("ix_audit_results_audited_at", "audited_at"),
        {"sqlite_autoincrement": True},
    )

    audit_id: Mapped[int] = mapped_column(RowKey, primary_key=True)
    audit_uid: Mapped[str] = mapped_column(String(32))  # makes writing it twice harmless
    request_id: Mapped[str] = mapped_column(String(160))
    record_id: Mapped[str | None] = mapped_column(String(32))
    instance_id: Mapped[str] = mapped_column(String(64))
    recorded_at: Mapped[datetime]
    audited_at: Mapped[datetime]
    model_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("models.model_key"))
    drafter_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("drafters.drafter_key"))
    variant_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("variants.variant_key"))
    verdict: Mapped[str] = mapped_column(String(32))  # exact, numeric_tie, divergence
    guarantee: Mapped[str | None] = mapped_column(String(32))
    num_checked_tokens: Mapped[int]
    num_mismatched_tokens: Mapped[int]
    first_mismatch_index: Mapped[int | None]
    smallest_margin: Mapped[float | None]
    epsilon: Mapped[float | None]
    audit_seconds: Mapped[float]


class ShadowResult(Base):
    """What a head that drafts for nobody would have got accepted in one finished request."""

    __tablename__ = "shadow_results"
    __table_args__ = (
        UniqueConstraint("shadow_uid"),
        Index("ix_shadow_results_measured_at", "measured_at"),
        {"sqlite_autoincrement": True},
    )

    shadow_id: Mapped[int] = mapped_column(RowKey, primary_key=True)
    shadow_uid: Mapped[str] = mapped_column(String(32))  # makes writing it twice harmless
    request_id: Mapped[str] = mapped_column(String(160))
    instance_id: Mapped[str] = mapped_column(String(64))
    recorded_at: Mapped[datetime]
    measured_at: Mapped[datetime]
    model_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("models.model_key"))
    drafter_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("drafters.drafter_key"))
    variant_key: Mapped[int | None] = mapped_column(RowKey, ForeignKey("variants.variant_key"))
    num_rounds: Mapped[int]
    num_draft_tokens: Mapped[int]
    num_accepted_tokens: Mapped[int]
    num_given_up: Mapped[int]  # requests since the server's row before that were not measured
    replay_seconds: Mapped[float]


class ExportWatermark(Base):
    """How far a named export has read. Retention deletes nothing beyond the lowest of them."""

    __tablename__ = "export_watermarks"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    ledger_id: Mapped[int]
    exported_at: Mapped[datetime]
