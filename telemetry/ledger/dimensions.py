"""Keys of the dimension rows: found, or created, once per value and process."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, select
from sqlalchemy.dialects import postgresql, sqlite

from telemetry.ledger import models
from telemetry.ledger.records import DrafterRecord, ModelRecord, PriceRecord, TenantRecord

DimensionValue = ModelRecord | DrafterRecord | TenantRecord | PriceRecord | str


class Dimensions:
    """Cache of keys. What a transaction created counts only after `keep`."""

    def __init__(self) -> None:
        self._kept: dict[DimensionValue, int] = {}
        self._pending: dict[DimensionValue, int] = {}

    def key_of(
        self, connection: Connection, value: DimensionValue | None, now: datetime
    ) -> int | None:
        """The key of a value within the running transaction; a plain text is a variant."""
        if value is None:
            return None
        found = self._kept.get(value)
        if found is None:
            found = self._pending.get(value)
        if found is None:
            found = self._pending[value] = _find_or_create(connection, value, now)
        return found

    def keep(self) -> None:
        """The transaction committed."""
        self._kept.update(self._pending)
        self._pending.clear()

    def discard(self) -> None:
        """The transaction was rolled back: its keys may not exist."""
        self._pending.clear()


def insert_ignoring(connection: Connection, table: Table) -> Any:
    """An INSERT that leaves existing rows as they are."""
    make: Callable[[Table], Any] = (
        postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    )
    return make(table).on_conflict_do_nothing()


def table_of(entity: type[models.Base]) -> Table:
    """The table behind a mapped class."""
    table = entity.__table__
    if not isinstance(table, Table):
        raise TypeError(f"{entity.__name__} is not mapped to a table")
    return table


def _find_or_create(connection: Connection, value: DimensionValue, now: datetime) -> int:
    table, identity, values = _described(value, now)
    key = next(iter(table.primary_key.columns))
    query = select(key).where(*(table.c[name] == values[name] for name in identity))
    found = connection.execute(query).scalar()
    if found is None:
        connection.execute(insert_ignoring(connection, table).values(values))
        found = connection.execute(query).scalar_one()
    return int(found)


def _described(
    value: DimensionValue, now: datetime
) -> tuple[Table, tuple[str, ...], dict[str, Any]]:
    """(table, columns that identify a row, all values)."""
    if isinstance(value, str):
        return table_of(models.Variant), ("name",), {"name": value, "first_seen_at": now}
    if isinstance(value, PriceRecord):
        identity = ("book_version", "machine_type", "purchase", "valid_from")
        return table_of(models.Price), identity, asdict(value)
    values = {**asdict(value), "first_seen_at": now}
    if isinstance(value, ModelRecord):
        identity_of_model = ("fingerprint", "dtype", "device", "layout", "guarantee")
        return table_of(models.Model), identity_of_model, values
    if isinstance(value, DrafterRecord):
        return table_of(models.Drafter), ("name", "fingerprint"), values
    return table_of(models.Tenant), ("pseudonym", "key_id"), values
