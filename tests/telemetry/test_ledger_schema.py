"""The schema: migrations up and down, equal to the models, on both databases."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import Session

from telemetry.ledger import models
from telemetry.ledger.partitions import PARTITIONED_TABLES
from telemetry.ledger.rows import (
    ACCEPTANCE_COLUMNS,
    AUDIT_PLAIN_COLUMNS,
    CAPACITY_PLAIN_COLUMNS,
    REQUEST_COLUMNS,
    SHADOW_PLAIN_COLUMNS,
    START_COLUMNS,
)
from telemetry.ledger.session import (
    LedgerSchemaError,
    head_revision,
    migrate,
    open_ledger,
    require_current_schema,
    schema_revision,
)


def test_migrations_lead_to_the_models_and_back_to_nothing(empty_url: str) -> None:
    engine = open_ledger(empty_url)
    with pytest.raises(LedgerSchemaError, match="tandem ledger migrate"):
        require_current_schema(engine)
    migrate(empty_url)
    assert schema_revision(engine) == head_revision()
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        differences = [
            difference
            for difference in compare_metadata(context, models.Base.metadata)
            if not _is_due_to_partitions(difference)
        ]
    assert differences == []
    migrate(empty_url, "base")
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    assert inspect(engine).get_view_names() == []
    migrate(empty_url)
    migrate(empty_url)
    require_current_schema(engine)
    engine.dispose()


def _is_due_to_partitions(difference: object) -> bool:
    """Partitions are tables of their own, and unique constraints hold the partition's key."""
    assert isinstance(difference, tuple)
    kind, subject = difference[0], difference[1]
    if kind in ("remove_table", "remove_index"):
        table = subject.name if kind == "remove_table" else subject.table.name
        return table.startswith(tuple(f"{name}_default" for name in PARTITIONED_TABLES))
    return kind in ("add_constraint", "remove_constraint") and subject.table.name == "requests"


def test_instants_are_utc_to_the_microsecond_and_never_naive(ledger_url: str) -> None:
    engine = open_ledger(ledger_url)
    madrid = timezone(timedelta(hours=2))
    instant = datetime(2026, 6, 1, 1, 30, 0, 987654, tzinfo=madrid)
    with Session(engine) as session:
        session.add(models.Variant(name="a", first_seen_at=instant))
        session.commit()
    with Session(engine) as session:
        found = session.query(models.Variant).one().first_seen_at
        assert found == instant
        assert found.utcoffset() == timedelta(0)
        session.add(models.Variant(name="b", first_seen_at=datetime(2026, 6, 1)))  # noqa: DTZ001
        with pytest.raises(StatementError, match="needs a time zone"):
            session.commit()
    engine.dispose()


def test_a_read_only_engine_cannot_write(ledger_url: str) -> None:
    engine = open_ledger(ledger_url, read_only=True)
    with Session(engine) as session:
        session.add(models.Variant(name="a", first_seen_at=datetime.now(UTC)))
        with pytest.raises(DBAPIError):
            session.commit()
    engine.dispose()


def test_other_databases_are_refused() -> None:
    with pytest.raises(ValueError, match="SQLite or PostgreSQL"):
        open_ledger("mysql://localhost/x")


@pytest.mark.parametrize(
    ("entity", "columns", "filled_elsewhere"),
    [
        (models.Request, REQUEST_COLUMNS, ()),
        (models.RequestAcceptance, ACCEPTANCE_COLUMNS, ()),
        (models.RequestStart, START_COLUMNS, ()),
        (
            models.CapacityInterval,
            CAPACITY_PLAIN_COLUMNS,
            ("capacity_id", "recorded_at", "model_key", "price_key"),
        ),
        (
            models.AuditResult,
            AUDIT_PLAIN_COLUMNS,
            ("audit_id", "recorded_at", "model_key", "drafter_key", "variant_key", "guarantee"),
        ),
        (
            models.ShadowResult,
            SHADOW_PLAIN_COLUMNS,
            ("shadow_id", "recorded_at", "model_key", "drafter_key", "variant_key"),
        ),
    ],
)
def test_every_column_is_written(
    entity: type[models.Base], columns: tuple[str, ...], filled_elsewhere: tuple[str, ...]
) -> None:
    assert {*columns, *filled_elsewhere} == set(entity.__table__.columns.keys())


def test_no_column_can_hold_a_prompt_or_an_output() -> None:
    """Texts are short identifiers or names; the one sentence is an error without content."""
    for table in models.Base.metadata.tables.values():
        for column in table.columns:
            length = getattr(column.type, "length", None)
            assert length is None or length <= 512, f"{table.name}.{column.name}"
            assert not {"prompt", "output", "text", "content"} & set(column.name.split("_")) or (
                column.name.startswith("num_")
            ), f"{table.name}.{column.name}"
