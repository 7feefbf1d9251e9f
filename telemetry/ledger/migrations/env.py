"""Runs migrations on the connection that `telemetry.ledger.session.migrate` hands over."""

from alembic import context
from sqlalchemy import Connection

from telemetry.ledger.models import Base


def _run() -> None:
    connection: Connection | None = context.config.attributes.get("connection")
    if connection is None:
        raise RuntimeError("migrations run through telemetry.ledger.session.migrate")
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=False,
    )
    context.run_migrations()


_run()
