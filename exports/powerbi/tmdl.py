"""The semantic model as TMDL files: tabs, quoted names, `///` descriptions, no BOM."""

import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import pyarrow as pa

from exports.columns import INSTANT
from exports.powerbi.measure import Measure
from exports.powerbi.measures import MEASURES
from exports.powerbi.model import ModelColumn, ModelTable, model_tables, relationships
from exports.powerbi.queries import (
    EXPORT_MANIFEST,
    READ_TABLE,
    Source,
    export_files,
    has_day_column,
    parameter,
    range_parameter,
    table_query,
    view_query,
)
from exports.powerbi.views import SCHEMA as VIEW_SCHEMA

COMPATIBILITY_LEVEL = 1604
_NAMESPACE = uuid.UUID("6f0b3b0e-6c0b-4f0e-9f55-1d9b9a3c5a10")
_TMDL_TYPES = {
    pa.int64(): "int64",
    pa.float64(): "double",
    pa.string(): "string",
    pa.bool_(): "boolean",
    pa.date32(): "dateTime",
    INSTANT: "dateTime",
}
_FORMATS = {pa.date32(): "yyyy-mm-dd", INSTANT: "yyyy-mm-dd hh:nn:ss"}


def model_files(root: str, source: Source) -> dict[str, str]:
    """Path below `definition/` -> content."""
    tables = model_tables()
    files = {
        "database.tmdl": f"database\n\tcompatibilityLevel: {COMPATIBILITY_LEVEL}\n",
        "model.tmdl": _model(tables, source),
        "expressions.tmdl": (
            _view_expressions(root) if source is Source.POSTGRESQL else _expressions(root, source)
        ),
        "relationships.tmdl": _relationships(),
    }
    for table in tables:
        measures = [measure for measure in MEASURES if measure.table == table.name]
        files[f"tables/{table.name}.tmdl"] = _table(table, measures, source)
    return files


def quoted(name: str) -> str:
    """A name as TMDL writes it."""
    if name.replace("_", "").isalnum():
        return name
    return "'" + name.replace("'", "''") + "'"


def _model(tables: tuple[ModelTable, ...], source: Source) -> str:
    queries = ["ParquetRoot", "RangeStart", "RangeEnd", "ExportFiles", "ExportManifest"]
    queries += ["fnReadTable"]
    if source is Source.POSTGRESQL:
        queries = ["PostgresServer", "PostgresDatabase"]
    queries += [table.name for table in tables]
    order = ",".join(f'"{query}"' for query in queries)
    lines = [
        "model Model",
        "\tculture: en-US",
        "\tdefaultPowerBIDataSourceVersion: powerBI_V3",
        "\tdiscourageImplicitMeasures",
        "\tsourceQueryCulture: en-US",
        "\tdataAccessOptions",
        "\t\tlegacyRedirects",
        "\t\treturnErrorValuesAsNull",
        "",
        f"annotation PBI_QueryOrder = [{order}]",
        "",
        "annotation __PBI_TimeIntelligenceEnabled = 0",
        "",
        *(f"ref table {quoted(table.name)}" for table in tables),
    ]
    return "\n".join(lines) + "\n"


def _expressions(root: str, source: Source) -> str:
    singles = (
        ("ParquetRoot", "Root of the export: a folder, or its ADLS address", parameter(root)),
        ("RangeStart", "Begin of a refresh: keep this name and type", range_parameter(2025)),
        ("RangeEnd", "End of a refresh, exclusive", range_parameter(2030)),
    )
    blocks = (
        ("ExportFiles", "The only query that opens a data source", export_files(source)),
        ("ExportManifest", "The files that are the tables now", EXPORT_MANIFEST),
        ("fnReadTable", "Typed rows of one table; of none where no file is", READ_TABLE),
    )
    parts = [f"/// {text}\nexpression {name} = {value}\n" for name, text, value in singles]
    for name, text, value in blocks:
        parts.append(f"/// {text}\nexpression {name} = ```\n{_indented(value, 2)}\n\t\t```\n")
    return "\n".join(parts)


def _view_expressions(root: str) -> str:
    address = urlsplit(root)
    server = f"{address.hostname}:{address.port}" if address.port else str(address.hostname)
    values = (
        ("PostgresServer", "Server of the ledger, better a replica of it", server),
        ("PostgresDatabase", "Database whose schema tandem_bi holds the views", address.path[1:]),
    )
    return "\n".join(
        f"/// {text}\nexpression {name} = {parameter(value)}\n" for name, text, value in values
    )


def _relationships() -> str:
    parts = []
    for relation in relationships():
        names = f"{relation.fact}.{relation.column}"
        parts.append(
            f"relationship {uuid.uuid5(_NAMESPACE, names)}\n"
            f"\tfromColumn: {quoted(relation.fact)}.{quoted(relation.column)}\n"
            f"\ttoColumn: {quoted(relation.dimension)}.{quoted(relation.column)}\n"
        )
    return "\n".join(parts)


def _table(table: ModelTable, measures: list[Measure], source: Source) -> str:
    lines = [f"/// {table.description}", f"table {quoted(table.name)}"]
    if table.is_date_table:
        lines.append("\tdataCategory: Time")
    lines.append("")
    for measure in measures:
        lines += [*_measure(measure), ""]
    for column in table.columns:
        lines += [*_column(column, table), ""]
    is_live = source is Source.POSTGRESQL
    if has_day_column(table) and not is_live:
        lines += ["\tcolumn 'Day At'", "\t\tdataType: dateTime", "\t\tisHidden"]
        lines += ["\t\tsummarizeBy: none", "\t\tsourceColumn: day_at", ""]
    query = view_query(table, VIEW_SCHEMA) if is_live else table_query(table)
    if table.is_incremental and not is_live:
        lines += [*_refresh_policy(query), ""]
    lines += [
        f"\tpartition {quoted(table.name)} = m",
        f"\t\tmode: {_mode(table, source)}",
        "\t\tsource = ```",
        _indented(query, 4),
        "\t\t\t\t```",
    ]
    return "\n".join(lines) + "\n"


def _mode(table: ModelTable, source: Source) -> str:
    if source is not Source.POSTGRESQL:
        return "import"
    # Small and slow to change, so kept in memory too: a slicer then asks no database.
    return "dual" if table.source.startswith("dim_") else "directQuery"


def _measure(measure: Measure) -> Iterator[str]:
    yield f"\t/// {measure.description}"
    if "\n" in measure.dax:
        yield f"\tmeasure {quoted(measure.name)} = ```"
        yield _indented(measure.dax, 3)
        yield "\t\t\t```"
    else:
        yield f"\tmeasure {quoted(measure.name)} = {measure.dax}"
    yield f"\t\tformatString: {measure.format}"
    yield f"\t\tdisplayFolder: {measure.folder}"


def _column(column: ModelColumn, table: ModelTable) -> Iterator[str]:
    yield f"\t/// {column.description}"
    yield f"\tcolumn {quoted(column.name)}"
    yield f"\t\tdataType: {_TMDL_TYPES[column.type]}"
    # A marked date table is keyed by its date; the relationships use the integer key.
    is_date = table.is_date_table and column.type == pa.date32()
    if column.is_hidden:
        yield "\t\tisHidden"
    if is_date or (column.is_key and not table.is_date_table):
        yield "\t\tisKey"
    if column.type in _FORMATS:
        yield f"\t\tformatString: {_FORMATS[column.type]}"
    yield "\t\tsummarizeBy: none"
    yield f"\t\tsourceColumn: {column.source}"
    if column.sort_by is not None:
        yield f"\t\tsortByColumn: {quoted(column.sort_by)}"


def _refresh_policy(query: str) -> Iterator[str]:
    yield "\trefreshPolicy"
    yield "\t\tpolicyType: basic"
    yield "\t\trollingWindowGranularity: year"
    yield "\t\trollingWindowPeriods: 3"
    yield "\t\tincrementalGranularity: day"
    yield "\t\tincrementalPeriods: 7"
    yield "\t\tsourceExpression = ```"
    yield _indented(query, 4)
    yield "\t\t\t\t```"


def _indented(text: str, depth: int) -> str:
    return "\n".join("\t" * depth + line for line in text.split("\n"))
