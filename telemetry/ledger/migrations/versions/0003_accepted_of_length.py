"""What drafts of each length got accepted

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "request_acceptance", sa.Column("num_accepted_of_length", sa.BigInteger(), nullable=True)
    )


def downgrade() -> None:
    op.drop_column("request_acceptance", "num_accepted_of_length")
