"""The ledger: requests, their acceptance, capacity, audits and dimensions

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from telemetry.ledger.models import UtcInstant

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LABELS = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
PARTITIONED_TABLES = ("requests", "request_acceptance")

TABLES = (
    "drafters",
    "models",
    "prices",
    "tenants",
    "variants",
    "instances",
    "export_watermarks",
    "audit_results",
    "capacity_intervals",
    "request_starts",
    "requests",
    "request_acceptance",
)


def upgrade() -> None:
    _create_dimensions_and_events()
    # PostgreSQL wants the partition key in every unique constraint of a partitioned table.
    partitioned = op.get_bind().dialect.name == "postgresql"
    day = ("finished_on",) if partitioned else ()
    op.create_table(
        "requests",
        sa.Column("ledger_id", KEY, autoincrement=True, nullable=False),
        sa.Column("record_id", sa.String(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=160), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("supersedes_ledger_id", KEY, nullable=True),
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("recorded_at", UtcInstant(), nullable=False),
        sa.Column("started_at", UtcInstant(), nullable=False),
        sa.Column("finished_at", UtcInstant(), nullable=False),
        sa.Column("finished_on", sa.Date(), nullable=False),
        sa.Column("model_key", KEY, nullable=True),
        sa.Column("drafter_key", KEY, nullable=True),
        sa.Column("variant_key", KEY, nullable=True),
        sa.Column("tenant_key", KEY, nullable=True),
        sa.Column("price_key", KEY, nullable=True),
        sa.Column("labels", LABELS, nullable=False),
        sa.Column("trace_id", sa.String(length=32), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("status_code", sa.String(length=32), nullable=False),
        sa.Column("error", sa.String(length=512), nullable=True),
        sa.Column("guarantee", sa.String(length=32), nullable=True),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("top_k", sa.BigInteger(), nullable=True),
        sa.Column("top_p", sa.Double(), nullable=True),
        sa.Column("acceptance_rule", sa.String(length=32), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("speculation_mode", sa.String(length=32), nullable=True),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("queue_seconds", sa.Double(), nullable=True),
        sa.Column("ttft_seconds", sa.Double(), nullable=True),
        sa.Column("tpot_seconds", sa.Double(), nullable=True),
        sa.Column("e2e_seconds", sa.Double(), nullable=False),
        sa.Column("mean_step_latency_seconds", sa.Double(), nullable=True),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cached_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_recomputed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_prefill_positions", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("num_plain_steps", sa.BigInteger(), nullable=False),
        sa.Column("num_verify_steps", sa.BigInteger(), nullable=False),
        sa.Column("num_draft_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_emitted_accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cut_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_drafter_positions", sa.BigInteger(), nullable=False),
        sa.Column("num_preemptions", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_prefill_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_decode_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_draft_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_rejected_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_drafter_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("busy_nanoseconds", sa.BigInteger(), nullable=False),
        sa.Column("estimated_cost_without_speculation_nano_usd", sa.BigInteger(), nullable=True),
        sa.Column("allocation_method", sa.String(length=64), nullable=False),
        sa.Column("energy_microjoules", sa.BigInteger(), nullable=True),
        sa.Column("energy_source", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["drafter_key"],
            ["drafters.drafter_key"],
        ),
        sa.ForeignKeyConstraint(
            ["model_key"],
            ["models.model_key"],
        ),
        sa.ForeignKeyConstraint(
            ["price_key"],
            ["prices.price_key"],
        ),
        sa.ForeignKeyConstraint(
            ["tenant_key"],
            ["tenants.tenant_key"],
        ),
        sa.ForeignKeyConstraint(
            ["variant_key"],
            ["variants.variant_key"],
        ),
        sa.PrimaryKeyConstraint("ledger_id", *day),
        sa.UniqueConstraint("record_id", "revision", *day, name="uq_requests_record"),
        sa.UniqueConstraint("request_id", "attempt", "revision", *day, name="uq_requests_attempt"),
        sqlite_autoincrement=True,
        postgresql_partition_by="RANGE (finished_on)" if partitioned else None,
    )
    op.create_index("ix_requests_finished_on", "requests", ["finished_on"], unique=False)
    op.create_index("ix_requests_recorded_at", "requests", ["recorded_at"], unique=False)
    op.create_index(
        "ix_requests_supersedes_ledger_id", "requests", ["supersedes_ledger_id"], unique=False
    )
    op.create_table(
        "request_acceptance",
        sa.Column("request_ledger_id", KEY, autoincrement=False, nullable=False),
        sa.Column("position", KEY, autoincrement=False, nullable=False),
        sa.Column("finished_on", sa.Date(), nullable=False),
        sa.Column("num_drafted", sa.BigInteger(), nullable=False),
        sa.Column("num_accepted", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("request_ledger_id", "position", *day),
        sqlite_with_rowid=False,
        postgresql_partition_by="RANGE (finished_on)" if partitioned else None,
    )
    if partitioned:
        # Takes the rows of days that have no partition of their own (yet).
        for table in PARTITIONED_TABLES:
            op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")
    op.execute(
        "CREATE VIEW current_requests AS SELECT r.* FROM requests r WHERE NOT EXISTS "
        "(SELECT 1 FROM requests c WHERE c.supersedes_ledger_id = r.ledger_id)"
    )


def downgrade() -> None:
    op.execute("DROP VIEW current_requests")
    for table in reversed(TABLES):
        op.drop_table(table)


def _create_dimensions_and_events() -> None:
    op.create_table(
        "drafters",
        sa.Column("drafter_key", KEY, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("fingerprint", sa.String(length=128), nullable=False),
        sa.Column("first_seen_at", UtcInstant(), nullable=False),
        sa.PrimaryKeyConstraint("drafter_key"),
        sa.UniqueConstraint("name", "fingerprint"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "export_watermarks",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("ledger_id", sa.BigInteger(), nullable=False),
        sa.Column("exported_at", UtcInstant(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "instances",
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("hostname", sa.String(length=256), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("started_at", UtcInstant(), nullable=False),
        sa.Column("last_seen_at", UtcInstant(), nullable=False),
        sa.Column("stopped_at", UtcInstant(), nullable=True),
        sa.PrimaryKeyConstraint("instance_id"),
    )
    op.create_index("ix_instances_node", "instances", ["node"], unique=False)
    op.create_table(
        "models",
        sa.Column("model_key", KEY, nullable=False),
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("fingerprint", sa.String(length=128), nullable=False),
        sa.Column("dtype", sa.String(length=32), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("num_parameters", sa.BigInteger(), nullable=False),
        sa.Column("layout", sa.String(length=32), nullable=False),
        sa.Column("numerics", sa.String(length=32), nullable=False),
        sa.Column("guarantee", sa.String(length=32), nullable=False),
        sa.Column("first_seen_at", UtcInstant(), nullable=False),
        sa.PrimaryKeyConstraint("model_key"),
        sa.UniqueConstraint("fingerprint", "dtype", "device", "layout", "guarantee"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "prices",
        sa.Column("price_key", KEY, nullable=False),
        sa.Column("book_version", sa.String(length=64), nullable=False),
        sa.Column("machine_type", sa.String(length=128), nullable=False),
        sa.Column("purchase", sa.String(length=32), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("nano_usd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("embodied_nano_usd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("valid_from", UtcInstant(), nullable=False),
        sa.Column("valid_to", UtcInstant(), nullable=True),
        sa.PrimaryKeyConstraint("price_key"),
        sa.UniqueConstraint("book_version", "machine_type", "purchase", "valid_from"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tenants",
        sa.Column("tenant_key", KEY, nullable=False),
        sa.Column("pseudonym", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("first_seen_at", UtcInstant(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_key"),
        sa.UniqueConstraint("pseudonym", "key_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "variants",
        sa.Column("variant_key", KEY, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("first_seen_at", UtcInstant(), nullable=False),
        sa.PrimaryKeyConstraint("variant_key"),
        sa.UniqueConstraint("name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "audit_results",
        sa.Column("audit_id", KEY, nullable=False),
        sa.Column("audit_uid", sa.String(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=160), nullable=False),
        sa.Column("record_id", sa.String(length=32), nullable=True),
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("recorded_at", UtcInstant(), nullable=False),
        sa.Column("audited_at", UtcInstant(), nullable=False),
        sa.Column("model_key", KEY, nullable=True),
        sa.Column("drafter_key", KEY, nullable=True),
        sa.Column("variant_key", KEY, nullable=True),
        sa.Column("verdict", sa.String(length=32), nullable=False),
        sa.Column("guarantee", sa.String(length=32), nullable=True),
        sa.Column("num_checked_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_mismatched_tokens", sa.BigInteger(), nullable=False),
        sa.Column("first_mismatch_index", sa.BigInteger(), nullable=True),
        sa.Column("smallest_margin", sa.Double(), nullable=True),
        sa.Column("epsilon", sa.Double(), nullable=True),
        sa.Column("audit_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["drafter_key"],
            ["drafters.drafter_key"],
        ),
        sa.ForeignKeyConstraint(
            ["model_key"],
            ["models.model_key"],
        ),
        sa.ForeignKeyConstraint(
            ["variant_key"],
            ["variants.variant_key"],
        ),
        sa.PrimaryKeyConstraint("audit_id"),
        sa.UniqueConstraint("audit_uid"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_results_audited_at", "audit_results", ["audited_at"], unique=False)
    op.create_table(
        "capacity_intervals",
        sa.Column("capacity_id", KEY, nullable=False),
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("interval_index", sa.BigInteger(), nullable=False),
        sa.Column("recorded_at", UtcInstant(), nullable=False),
        sa.Column("started_at", UtcInstant(), nullable=False),
        sa.Column("finished_at", UtcInstant(), nullable=False),
        sa.Column("model_key", KEY, nullable=True),
        sa.Column("price_key", KEY, nullable=True),
        sa.Column("wall_nanoseconds", sa.BigInteger(), nullable=False),
        sa.Column("busy_nanoseconds", sa.BigInteger(), nullable=False),
        sa.Column("idle_nanoseconds", sa.BigInteger(), nullable=False),
        sa.Column("lost_nanoseconds", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("num_prefill_positions", sa.BigInteger(), nullable=False),
        sa.Column("num_decode_positions", sa.BigInteger(), nullable=False),
        sa.Column("num_draft_positions", sa.BigInteger(), nullable=False),
        sa.Column("num_emitted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_num_running", sa.BigInteger(), nullable=False),
        sa.Column("max_num_waiting", sa.BigInteger(), nullable=False),
        sa.Column("cost_busy_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_idle_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("cost_lost_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("energy_busy_microjoules", sa.BigInteger(), nullable=True),
        sa.Column("energy_idle_microjoules", sa.BigInteger(), nullable=True),
        sa.Column("energy_source", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_key"],
            ["models.model_key"],
        ),
        sa.ForeignKeyConstraint(
            ["price_key"],
            ["prices.price_key"],
        ),
        sa.PrimaryKeyConstraint("capacity_id"),
        sa.UniqueConstraint("instance_id", "interval_index"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_capacity_intervals_started_at", "capacity_intervals", ["started_at"], unique=False
    )
    op.create_table(
        "request_starts",
        sa.Column("record_id", sa.String(length=32), nullable=False),
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=160), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("started_at", UtcInstant(), nullable=False),
        sa.Column("model_key", KEY, nullable=True),
        sa.Column("variant_key", KEY, nullable=True),
        sa.Column("tenant_key", KEY, nullable=True),
        sa.Column("price_key", KEY, nullable=True),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("labels", LABELS, nullable=False),
        sa.Column("trace_id", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_key"],
            ["models.model_key"],
        ),
        sa.ForeignKeyConstraint(
            ["price_key"],
            ["prices.price_key"],
        ),
        sa.ForeignKeyConstraint(
            ["tenant_key"],
            ["tenants.tenant_key"],
        ),
        sa.ForeignKeyConstraint(
            ["variant_key"],
            ["variants.variant_key"],
        ),
        sa.PrimaryKeyConstraint("record_id"),
    )
    op.create_index(
        "ix_request_starts_instance_id", "request_starts", ["instance_id"], unique=False
    )
