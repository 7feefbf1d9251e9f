"""The semantic model: which exported columns Power BI sees, under which names."""

from dataclasses import dataclass

import pyarrow as pa

from exports.columns import Table, TableKind
from exports.facts import FACT_ACCEPTANCE, FACT_LATENCY_HISTOGRAM, FACT_REQUEST
from exports.powerbi.measure import (
    ACCEPTANCE,
    CAPACITY,
    EQUIVALENCE,
    LATENCY,
    RECONCILIATION,
    REQUESTS,
)
from exports.schemas import TABLES

TABLE_NAMES = {
    "dim_date": "Date",
    "dim_time_band": "Time Band",
    "dim_model": "Model",
    "dim_drafter": "Drafter",
    "dim_variant": "Variant",
    "dim_tenant": "Tenant",
    "dim_outcome": "Outcome",
    "dim_price": "Price",
    "fact_request": REQUESTS,
    "fact_acceptance": ACCEPTANCE,
    "fact_latency_histogram": LATENCY,
    "fact_capacity": CAPACITY,
    "fact_equivalence": EQUIVALENCE,
    "fact_reconciliation": RECONCILIATION,
}
"""Exported table -> its name in Power BI, dimensions first."""

INCREMENTAL = (FACT_REQUEST.name, FACT_ACCEPTANCE.name, FACT_LATENCY_HISTOGRAM.name)
"""Tables that grow with the traffic: refreshed by day, not whole."""

_LEFT_OUT = {  # text that is different in every row costs more memory than all the rest
    "fact_request": ("ledger_id", "request_id", "trace_id", "attempt", "revision", "started_at"),
    "fact_capacity": ("capacity_id",),
}
_VISIBLE_FACT_COLUMNS = (
    "position",
    "metric",
    "verdict",
    "guarantee",
    "speculation_mode",
    "acceptance_rule",
    "energy_source",
    "instance_id",
)
_SORTED_BY = {
    ("dim_date", "month_name"): "month",
    ("dim_date", "weekday_name"): "weekday",
    ("dim_time_band", "band"): "band_order",
    ("dim_time_band", "hour"): "hour_key",
}
_HIDDEN_DIMENSION_COLUMNS = ("fingerprint", "key_id", "band_order")
_WORDS = {"usd": "USD", "iso": "ISO", "id": "ID"}
_COUNTED = ("tokens", "steps", "requests")


@dataclass(frozen=True, slots=True)
class ModelColumn:
    """A column of the model. `source` is its name in the file; `sort_by` a column of the model."""

    name: str
    source: str
    type: pa.DataType
    is_hidden: bool
    is_key: bool
    description: str
    sort_by: str | None = None


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A table of the model."""

    name: str
    source: str
    columns: tuple[ModelColumn, ...]
    is_date_table: bool
    description: str

    @property
    def is_incremental(self) -> bool:
        return self.source in INCREMENTAL


@dataclass(frozen=True, slots=True)
class Relationship:
    """Many rows of a fact to one row of a dimension, filtering from the dimension only."""

    fact: str
    dimension: str
    column: str


def column_name(source: str) -> str:
    """`num_output_tokens` -> `Output Tokens Count`, so that a measure can be `Output Tokens`."""
    words = [word for word in source.split("_") if word != "num"]
    text = " ".join(_WORDS.get(word, word.capitalize()) for word in words)
    is_count = source == "num_requests" or (source.startswith("num_") and words[-1] in _COUNTED[:2])
    return f"{text} Count" if is_count else text


def model_tables() -> tuple[ModelTable, ...]:
    """All tables of the model, dimensions first."""
    return tuple(_model_table(TABLES[source]) for source in TABLE_NAMES)


def relationships() -> tuple[Relationship, ...]:
    """Every key of a fact to its dimension."""
    keys = {
        table.columns[0].name: TABLE_NAMES[table.name]
        for table in TABLES.values()
        if table.kind is TableKind.DIMENSION
    }
    return tuple(
        Relationship(TABLE_NAMES[source], keys[column.name], column_name(column.name))
        for source in TABLE_NAMES
        if TABLES[source].kind is TableKind.FACT
        for column in TABLES[source].columns
        if column.name in keys
    )


def _model_table(table: Table) -> ModelTable:
    is_fact = table.kind is TableKind.FACT
    columns = tuple(
        ModelColumn(
            name=column_name(column.name),
            source=column.name,
            type=column.type,
            is_hidden=_is_hidden(column.name, is_fact),
            is_key=not is_fact and index == 0,
            description=column.meaning,
            sort_by=(
                column_name(_SORTED_BY[table.name, column.name])
                if (table.name, column.name) in _SORTED_BY
                else None
            ),
        )
        for index, column in enumerate(table.columns)
        if column.name not in _LEFT_OUT.get(table.name, ())
    )
    return ModelTable(
        TABLE_NAMES[table.name], table.name, columns, table.name == "dim_date", table.grain
    )


def _is_hidden(source: str, is_fact: bool) -> bool:
    if is_fact:
        return source not in _VISIBLE_FACT_COLUMNS
    return source.endswith("_key") or source in _HIDDEN_DIMENSION_COLUMNS
