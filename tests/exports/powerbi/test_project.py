"""The Power BI project is current, fits Microsoft's schemas and names only what exists."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exports.errors import TargetError
from exports.powerbi import project
from exports.powerbi.measures import MEASURES
from exports.powerbi.model import model_tables, relationships
from exports.powerbi.project import project_files, write_project
from exports.powerbi.queries import Source
from exports.powerbi.report_pages import PAGES

FOLDER = Path(project.__file__).parent
SCHEMAS = Path(os.environ.get("TANDEM_POWERBI_SCHEMAS", "../shared/powerbi/schemas"))
BASE = "https://developer.microsoft.com/json-schemas/"


def test_the_project_in_the_repository_is_current() -> None:
    parts = ("Tandem.Report", "Tandem.SemanticModel", "Tandem.pbip")
    files = {
        str(path.relative_to(FOLDER)): path.read_text("utf-8")
        for part in parts
        for path in [FOLDER / part, *(FOLDER / part).rglob("*")]
        if path.is_file()
    }
    assert files == project_files(), "run python -m exports.powerbi.project"


def json_files() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, content in project_files().items():
        is_json = path.endswith((".json", ".pbip", ".pbir", ".pbism", ".platform"))
        if is_json and "StaticResources" not in path:
            yield path, json.loads(content)


def test_every_file_fits_the_official_schema_that_it_names() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    if not SCHEMAS.is_dir():
        pytest.skip(f"no schemas in {SCHEMAS}: set TANDEM_POWERBI_SCHEMAS")

    def retrieve(uri: str) -> Any:
        path = SCHEMAS / uri.split("#")[0].removeprefix(BASE)
        return referencing.Resource.from_contents(json.loads(path.read_text("utf-8-sig")))

    registry = referencing.Registry(retrieve=retrieve)
    num_files = 0
    for path, document in json_files():
        schema = retrieve(document["$schema"]).contents
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft7Validator)
        errors = [e.message for e in kind(schema, registry=registry).iter_errors(document)]
        assert not errors, (path, errors)
        num_files += 1
    assert num_files > 100


def model_names() -> tuple[set[tuple[str, str]], dict[str, str]]:
    columns = {(table.name, column.name) for table in model_tables() for column in table.columns}
    return columns, {measure.name: measure.table for measure in MEASURES}


def test_every_field_that_a_visual_names_exists() -> None:
    columns, measures = model_names()
    num_fields = 0
    for path, document in json_files():
        if not path.endswith("visual.json") or "query" not in document["visual"]:
            continue
        for role in document["visual"]["query"]["queryState"].values():
            for projection in role["projections"]:
                [(kind, field)] = projection["field"].items()
                table = field["Expression"]["SourceRef"]["Entity"]
                if kind == "Measure":
                    assert measures[field["Property"]] == table, path
                else:
                    assert (table, field["Property"]) in columns, path
                num_fields += 1
    assert num_fields > 100


def test_every_name_in_a_measure_exists() -> None:
    columns, measures = model_names()
    tables = {table for table, _ in columns}
    for measure in MEASURES:
        qualified = re.findall(r"(?:'([^']+)'|\b([A-Za-z]+))\[([^\]]+)\]", measure.dax)
        for quoted, plain, column in qualified:
            assert (quoted or plain, column) in columns, (measure.name, quoted or plain, column)
        rest = re.sub(r"(?:'[^']+'|\b[A-Za-z]+)\[[^\]]+\]", "", measure.dax)
        for name in re.findall(r"\[([^\]]+)\]", rest):
            assert name in measures or name == "N", (measure.name, name)
        assert measure.table in tables


def test_names_are_unique_as_power_bi_wants_them() -> None:
    columns, measures = model_names()
    assert len(measures) == len(MEASURES)
    assert not {(table, name) for name, table in measures.items()} & columns
    for table in model_tables():
        names = [column.name.lower() for column in table.columns]
        assert len(set(names)) == len(names), table.name


def test_every_measure_has_a_format_a_folder_and_a_description() -> None:
    for measure in MEASURES:
        assert measure.format, measure.name
        assert measure.folder, measure.name
        assert measure.description, measure.name


def test_keys_are_hidden_and_every_fact_has_a_date() -> None:
    for table in model_tables():
        for column in table.columns:
            if column.source.endswith("_key"):
                assert column.is_hidden, (table.name, column.name)
        if table.source.startswith("fact_"):
            assert any(r.fact == table.name and r.dimension == "Date" for r in relationships())


def test_visuals_lie_on_the_page_and_not_on_each_other() -> None:
    boxes: dict[str, list[tuple[str, int, int, int, int]]] = {}
    for path, document in json_files():
        if path.endswith("visual.json"):
            place = document["position"]
            box = (
                place["x"],
                place["y"],
                place["x"] + place["width"],
                place["y"] + place["height"],
            )
            assert box[0] >= 0, path
            assert box[2] <= 1280, path
            assert box[3] <= 720, path
            page = path.split("/pages/")[1].split("/")[0]
            for other, *b in boxes.setdefault(page, []):
                apart = box[2] <= b[0] or b[2] <= box[0] or box[3] <= b[1] or b[3] <= box[1]
                assert apart, (path, other)
            boxes[page].append((path, *box))
    assert len(boxes) == len(PAGES) == 9


def test_every_page_has_the_slicers_and_the_report_its_theme() -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    for path, document in json_files():
        if path.endswith("visual.json") and document["visual"]["visualType"] == "slicer":
            [projection] = document["visual"]["query"]["queryState"]["Values"]["projections"]
            column = projection["field"]["Column"]
            place = (column["Expression"]["SourceRef"]["Entity"], column["Property"])
            found.setdefault(path.split("/pages/")[1].split("/")[0], set()).add(place)
    tables = {"Date", "Model", "Tenant", "Variant"}
    assert set(found) == {page.name for page in PAGES}
    assert all({table for table, _ in places} == tables for places in found.values())
    report = project_files()["Tandem.Report/definition/report.json"]
    theme = json.loads(report)["themeCollection"]["customTheme"]["name"]
    assert any(path.endswith(f"RegisteredResources/{theme}") for path in project_files())


def test_growing_tables_are_refreshed_by_day_and_an_empty_period_keeps_its_columns() -> None:
    definition = "Tandem.SemanticModel/definition"
    files = project_files()
    refreshed = set()
    for table in model_tables():
        text = files[f"{definition}/tables/{table.name}.tmdl"]
        if "refreshPolicy" not in text:
            continue
        refreshed.add(table.source)
        # In the policy and in the partition: Power BI cuts partitions by this very filter.
        [instant] = set(re.findall(r"each \[(\w+)\] >= RangeStart", text))
        condition = f"each [{instant}] >= RangeStart and [{instant}] < RangeEnd"
        assert text.count(condition) == 2, table.name
        assert re.search(rf"dataType: dateTime\n(?:\t\t.*\n)*\t\tsourceColumn: {instant}\n", text)
    facts = {table.source for table in model_tables() if table.source.startswith("fact_")}
    assert {"fact_request", "fact_acceptance", "fact_latency_histogram"} <= refreshed <= facts
    assert "{#table(tableType, {})} &" in files[f"{definition}/expressions.tmdl"]
    [date] = [table for table in model_tables() if table.is_date_table]
    text = files[f"{definition}/tables/{date.name}.tmdl"]
    assert "dataCategory: Time" in text
    assert "isKey" in text


def test_a_copy_is_bound_to_its_folder_and_never_overwrites(tmp_path: Path) -> None:
    write_project(tmp_path, r"D:\exports\tandem")
    expressions = tmp_path / "Tandem.SemanticModel" / "definition" / "expressions.tmdl"
    assert r'"D:\exports\tandem" meta [IsParameterQuery=true' in expressions.read_text()
    with pytest.raises(TargetError, match="exists already"):
        write_project(tmp_path, "elsewhere")


def test_a_copy_for_adls_opens_adls_and_nothing_else(tmp_path: Path) -> None:
    write_project(tmp_path, "https://account.dfs.core.windows.net/box/export", Source.ADLS)
    text = (tmp_path / "Tandem.SemanticModel" / "definition" / "expressions.tmdl").read_text()
    assert "AzureStorage.DataLake(ParquetRoot)" in text
    assert "Folder.Files" not in text


def test_a_copy_for_postgresql_asks_the_views_and_keeps_no_rows_of_facts(tmp_path: Path) -> None:
    write_project(tmp_path, "postgresql://replica:5433/ledger", Source.POSTGRESQL)
    definition = tmp_path / "Tandem.SemanticModel" / "definition"
    expressions = (definition / "expressions.tmdl").read_text()
    assert 'expression PostgresServer = "replica:5433" meta' in expressions
    assert 'expression PostgresDatabase = "ledger" meta' in expressions
    for table in model_tables():
        text = (definition / "tables" / f"{table.name}.tmdl").read_text()
        mode = "dual" if table.source.startswith("dim_") else "directQuery"
        assert f"mode: {mode}" in text
        assert f'[Schema = "tandem_bi", Item = "{table.source}"]' in text
        assert "refreshPolicy" not in text  # there is nothing to refresh
        assert "day_at" not in text
    assert "ParquetRoot" not in "".join(path.read_text() for path in definition.rglob("*.tmdl"))


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("postgresql://replica", "want postgresql://HOST"),
        ("replica/ledger", "want postgresql://HOST"),
        ("postgresql://me:secret@replica/ledger", "no user or password"),
    ],
)
def test_an_address_that_cannot_be_written_down_is_refused(
    root: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match=reason):
        write_project(tmp_path, root, Source.POSTGRESQL)
