"""What heads that draft for nobody would have got accepted

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

from telemetry.ledger.models import UtcInstant

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "shadow_results",
        sa.Column("shadow_id", KEY, nullable=False),
        sa.Column("shadow_uid", sa.String(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=160), nullable=False),
        sa.Column("instance_id", sa.String(length=64), nullable=False),
        sa.Column("recorded_at", UtcInstant(), nullable=False),
        sa.Column("measured_at", UtcInstant(), nullable=False),
        sa.Column("model_key", KEY, nullable=True),
        sa.Column("drafter_key", KEY, nullable=True),
        sa.Column("variant_key", KEY, nullable=True),
        sa.Column("num_rounds", sa.BigInteger(), nullable=False),
        sa.Column("num_draft_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_given_up", sa.BigInteger(), nullable=False),
        sa.Column("replay_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["drafter_key"], ["drafters.drafter_key"]),
        sa.ForeignKeyConstraint(["model_key"], ["models.model_key"]),
        sa.ForeignKeyConstraint(["variant_key"], ["variants.variant_key"]),
        sa.PrimaryKeyConstraint("shadow_id"),
        sa.UniqueConstraint("shadow_uid"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_shadow_results_measured_at", "shadow_results", ["measured_at"])


def downgrade() -> None:
    op.drop_index("ix_shadow_results_measured_at", "shadow_results")
    op.drop_table("shadow_results")
