"""The M queries: one parameter names the export, one function reads a table by its manifest."""

from enum import StrEnum

import pyarrow as pa

from exports.columns import INSTANT, TableKind
from exports.powerbi.model import ModelTable
from exports.schemas import TABLES


class Source(StrEnum):
    """Where Power BI finds the export."""

    FOLDER = "folder"
    ADLS = "adls"
    POSTGRESQL = "postgresql"


# One function per kind of source: a query that could open either is not refreshed by the
# service, which wants to know its data sources beforehand.
_LISTINGS = {Source.FOLDER: "Folder.Files", Source.ADLS: "AzureStorage.DataLake"}

_M_TYPES = {
    pa.int64(): "Int64.Type",
    pa.float64(): "number",
    pa.string(): "text",
    pa.bool_(): "logical",
    pa.date32(): "date",
    INSTANT: "datetime",
}

READ_TABLE = """(
    tableName as text,
    tableType as type,
    optional fromDate as nullable date,
    optional toDate as nullable date
) as table =>
let
    FileType = type table [path = text, min_date = text, max_date = text],
    Entry = Record.Field(ExportManifest[tables], tableName),
    Files = Table.FromRecords(Entry[files], FileType, MissingField.UseNull),
    EndsInTime = (file) =>
        fromDate = null or file[max_date] = null or Date.FromText(file[max_date]) >= fromDate,
    BeginsInTime = (file) =>
        toDate = null or file[min_date] = null or Date.FromText(file[min_date]) <= toDate,
    InRange = Table.SelectRows(Files, each EndsInTime(_) and BeginsInTime(_)),
    Wanted = Table.FromList(InRange[path], Splitter.SplitByNothing(), {"Wanted Path"}),
    Located = Table.NestedJoin(
        Wanted, {"Wanted Path"}, ExportFiles, {"Export Path"}, "Found", JoinKind.Inner
    ),
    Contents = List.Transform(Located[Found], each _{0}[Content]),
    Names = Record.FieldNames(Type.RecordFields(Type.TableRow(tableType))),
    Instants = List.Select(Names, each Text.EndsWith(_, "_at") or Text.StartsWith(_, "valid_")),
    WithoutZone = (value) =>
        if value is datetimezone then DateTimeZone.RemoveZone(DateTimeZone.ToUtc(value)) else value,
    Changes = List.Transform(Instants, (name) => {name, WithoutZone, type nullable datetime}),
    ReadOne = (content) =>
        let
            Whole = Parquet.Document(content),
            Chosen = Table.SelectColumns(Whole, Names, MissingField.UseNull)
        in
            Table.TransformColumns(Chosen, Changes),
    Result = Table.Combine({#table(tableType, {})} & List.Transform(Contents, ReadOne), tableType)
in
    Result"""


def parameter(value: str) -> str:
    """The value of a parameter that is text, such as ParquetRoot."""
    return f"{m_text(value)} {_parameter_meta('Text')}"


def range_parameter(year: int) -> str:
    """The value of RangeStart or RangeEnd: Power BI wants these names and this type."""
    return f"#datetime({year}, 1, 1, 0, 0, 0) {_parameter_meta('DateTime')}"


def export_files(source: Source) -> str:
    """One listing of the root, with each file's path below it: the only data source."""
    return f"""let
    Listed = {_LISTINGS[source]}(ParquetRoot),
    Forward = (path) => Text.Replace(path, "\\", "/"),
    Root = Text.TrimEnd(Forward(ParquetRoot), "/") & "/",
    Below = (folder, name) => Text.Replace(Forward(folder) & name, Root, ""),
    Placed = Table.AddColumn(
        Listed, "Export Path", each Below([Folder Path], [Name]), type text
    )
in
    Table.SelectColumns(Placed, {{"Content", "Name", "Export Path"}})"""


EXPORT_MANIFEST = """let
    Document = Json.Document(ExportFiles{[#"Export Path" = "manifest.json"]}[Content])
in
    Document"""


def view_query(table: ModelTable, schema: str) -> str:
    """The query of one table over its view in PostgreSQL, all of which folds into SQL."""
    columns = ", ".join(m_text(column.source) for column in table.columns)
    return f"""let
    Source = PostgreSQL.Database(PostgresServer, PostgresDatabase),
    View = Source{{[Schema = {m_text(schema)}, Item = {m_text(table.source)}]}}[Data],
    Rows = Table.SelectColumns(View, {{{columns}}})
in
    Rows"""


def table_query(table: ModelTable) -> str:
    """The query of one table; of a table that is refreshed by day, the rows of the range."""
    kinds = ", ".join(f"{column.source} = {_M_TYPES[column.type]}" for column in table.columns)
    if not table.is_incremental:
        return f"""let
    Rows = fnReadTable("{table.source}", type table [{kinds}])
in
    Rows"""
    source = (
        f'fnReadTable("{table.source}", type table [{kinds}], '
        "DateTime.Date(RangeStart), DateTime.Date(RangeEnd))"
    )
    if "finished_at" in {column.source for column in table.columns}:
        return f"""let
    Source = {source},
    Rows = Table.SelectRows(Source, each [finished_at] >= RangeStart and [finished_at] < RangeEnd)
in
    Rows"""
    return f"""let
    Source = {source},
    Year = (key) => Number.IntegerDivide(key, 10000),
    Month = (key) => Number.Mod(Number.IntegerDivide(key, 100), 100),
    Midnight = (key) => #datetime(Year(key), Month(key), Number.Mod(key, 100), 0, 0, 0),
    Dated = Table.AddColumn(Source, "day_at", each Midnight([date_key]), type datetime),
    Rows = Table.SelectRows(Dated, each [day_at] >= RangeStart and [day_at] < RangeEnd)
in
    Rows"""


def has_day_column(table: ModelTable) -> bool:
    """Whether the query adds `day_at`, the datetime that incremental refresh filters by."""
    is_fact = TABLES[table.source].kind is TableKind.FACT
    named = {column.source for column in table.columns}
    return is_fact and table.is_incremental and "finished_at" not in named


def m_text(value: str) -> str:
    """A text literal of M."""
    return '"' + value.replace('"', '""').replace("#(", "#(#)(") + '"'


def _parameter_meta(kind: str) -> str:
    return f'meta [IsParameterQuery=true, Type="{kind}", IsParameterQueryRequired=true]'
