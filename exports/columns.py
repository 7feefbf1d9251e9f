"""What a table of the star schema is made of: columns with a unit, a meaning and a null rule."""

from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

SCHEMA_VERSION = 1

UNKNOWN_KEY = -1
"""The dimension row that a fact points to when it has no partner."""

INSTANT = pa.timestamp("us", tz="UTC")


class TableKind(StrEnum):
    """fact tables have one file per UTC date; a dimension is one file."""

    FACT = "fact"
    DIMENSION = "dimension"


@dataclass(frozen=True, slots=True)
class Column:
    """One exported column. `null_when` is "" for a column that never holds NULL."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    null_when: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One exported table. `grain` says what a row is."""

    name: str
    kind: TableKind
    grain: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema that every file of the table has, metadata included."""
        return pa.schema(
            [pa.field(c.name, c.type, nullable=bool(c.null_when)) for c in self.columns],
            metadata={b"tandem.schema_version": str(SCHEMA_VERSION).encode()},
        )


def with_added_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows of a file that may be older than the schema: columns added since are NULL."""
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.cast(schema)


def key_column(name: str, dimension: str) -> Column:
    return Column(name, pa.int64(), "key", f"Row of {dimension}; {UNKNOWN_KEY} is unknown.")


def count_column(name: str, meaning: str, unit: str = "tokens") -> Column:
    return Column(name, pa.int64(), unit, meaning)


def seconds_column(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, pa.float64(), "s", meaning, null_when)


def money_column(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, pa.int64(), "nano-USD", meaning, null_when)


def nanoseconds_column(name: str, meaning: str) -> Column:
    return Column(name, pa.int64(), "ns", meaning)


def energy_column(name: str, meaning: str) -> Column:
    return Column(name, pa.int64(), "microjoule", meaning, "it was not measured (never 0)")


def text_column(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, pa.string(), "text", meaning, null_when)


def number_column(name: str, meaning: str) -> Column:
    return Column(name, pa.int64(), "number", meaning)


def flag_column(name: str, meaning: str) -> Column:
    return Column(name, pa.bool_(), "flag", meaning)


def instant_column(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, INSTANT, "UTC instant", meaning, null_when)
