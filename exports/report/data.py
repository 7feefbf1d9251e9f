"""The numbers of a visual: its measures, for every value of its category and series."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exports.columns import TableKind
from exports.powerbi.measures import BY_NAME
from exports.powerbi.model import TABLE_NAMES, column_name
from exports.powerbi.pages import Field
from exports.schemas import FACTS, TABLES

_FACT = re.compile(r"\bFROM (fact_\w+)")


@dataclass(frozen=True, slots=True)
class Grouping:
    """A column to group by: where it is, and the key that leads facts to it."""

    table: str
    column: str
    key: str | None  # None: the column is the fact's own

    @classmethod
    def of(cls, field: Field) -> "Grouping":
        """The grouping of a column of the semantic model."""
        [name] = [source for source, name in TABLE_NAMES.items() if name == field.table]
        table = TABLES[name]
        [column] = [c.name for c in table.columns if column_name(c.name) == field.name]
        is_dimension = table.kind is TableKind.DIMENSION
        return cls(name, column, table.columns[0].name if is_dimension else None)


def measure_value(connection: Any, name: str) -> Any:
    """A measure over the whole export; None where it is blank."""
    [[value]] = connection.execute(BY_NAME[name].sql).fetchall()
    return value


def measure_rows(
    connection: Any, groupings: Sequence[Grouping], measures: Sequence[str]
) -> list[tuple[Any, ...]]:
    """One row per combination of values that has data: the values, then the measures.

    A fact that has no way to a grouping is not filtered by it, as in Power BI.
    """
    domains = ", ".join(
        f"({_domain(grouping)}) d{index}" for index, grouping in enumerate(groupings)
    )
    labels = ", ".join(f"d{index}.label" for index in range(len(groupings)))
    values = ", ".join(f"({_filtered(BY_NAME[m].sql, groupings)})" for m in measures)
    orders = ", ".join(f"d{index}.place" for index in range(len(groupings)))
    sql = f"SELECT {labels}, {values} FROM {domains} ORDER BY {orders}"  # noqa: S608 - own names
    rows = connection.execute(sql).fetchall()
    # Along one axis a zero is news; of all combinations most simply do not occur.
    is_shown = _has_value if len(groupings) == 1 else any
    return [row for row in rows if is_shown(row[len(groupings) :])]


def _has_value(values: tuple[Any, ...]) -> bool:
    return any(value is not None for value in values)


def _domain(grouping: Grouping) -> str:
    if grouping.key is None:
        return (
            f"SELECT DISTINCT {grouping.column} AS label, {grouping.column} AS place "  # noqa: S608
            f"FROM {grouping.table}"
        )
    used = " UNION ".join(
        f"SELECT {grouping.key} FROM {fact.name}"  # noqa: S608
        for fact in FACTS
        if grouping.key in {column.name for column in fact.columns}
    )
    return (
        f"SELECT {grouping.column} AS label, min({grouping.key}) AS place "  # noqa: S608
        f"FROM {grouping.table} WHERE {grouping.key} IN ({used}) GROUP BY label"
    )


def _filtered(sql: str, groupings: Sequence[Grouping]) -> str:
    def narrowed(match: re.Match[str]) -> str:
        fact = match.group(1)
        columns = {column.name for column in TABLES[fact].columns}
        conditions = []
        for index, grouping in enumerate(groupings):
            label = f"d{index}.label"
            if grouping.key is not None and grouping.key in columns:
                members = f"SELECT {grouping.key} FROM {grouping.table}"  # noqa: S608
                conditions.append(
                    f"{fact}.{grouping.key} IN ({members} WHERE {grouping.column} = {label})"
                )
            elif grouping.key is None and grouping.table == fact:
                conditions.append(f"{fact}.{grouping.column} = {label}")
        if not conditions:
            return match.group()
        return f"FROM (SELECT * FROM {fact} WHERE {' AND '.join(conditions)}) AS {fact}"  # noqa: S608

    return _FACT.sub(narrowed, sql)
