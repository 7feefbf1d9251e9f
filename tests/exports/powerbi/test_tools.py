"""The Power BI project under the parsers of others (`make test-powerbi` fetches them).

Validated by parsers, not opened in Power BI Desktop: that needs Windows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exports.powerbi.measures import MEASURES
from exports.powerbi.model import model_tables
from exports.powerbi.project import write_project
from exports.powerbi.queries import (
    EXPORT_MANIFEST,
    READ_TABLE,
    Source,
    export_files,
    parameter,
    range_parameter,
    table_query,
    view_query,
)

pytestmark = pytest.mark.slow

TOOLS = Path(os.environ.get("TANDEM_POWERBI_TOOLS", "build/powerbi-tools")).resolve()
HERE = Path(__file__).parent


ROOTS = {
    Source.FOLDER: r"C:\data\tandem-export",
    Source.ADLS: "https://account.dfs.core.windows.net/box/export",
    Source.POSTGRESQL: "postgresql://replica:5432/ledger",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path, ROOTS[Source.FOLDER])
    return tmp_path


def tom_check(definition: Path) -> subprocess.CompletedProcess[str]:
    program = TOOLS / "tom" / "tom_check.exe"
    if not program.exists():
        pytest.skip("Microsoft's TMDL parser is not there: make test-powerbi")
    return subprocess.run(["mono", str(program), str(definition)], capture_output=True, text=True)


@pytest.mark.parametrize("source", Source)
def test_microsofts_serializer_reads_the_model(source: Source, tmp_path: Path) -> None:
    write_project(tmp_path, ROOTS[source], source)
    result = tom_check(tmp_path / "Tandem.SemanticModel" / "definition")
    assert result.returncode == 0, result.stdout
    assert f"tables={len(model_tables())} measures={len(MEASURES)} " in result.stdout


def test_microsofts_serializer_refuses_a_wrong_type(project: Path) -> None:
    path = project / "Tandem.SemanticModel" / "definition" / "tables" / "Date.tmdl"
    path.write_text(path.read_text().replace("dataType: int64", "dataType: integer", 1))
    result = tom_check(project / "Tandem.SemanticModel" / "definition")
    assert result.returncode == 1
    assert "integer" in result.stdout


def queries() -> Iterator[tuple[str, str]]:
    yield "ParquetRoot", parameter(r"C:\data #(lf) " "quoted" "").split(" meta ")[0]
    yield "RangeStart", range_parameter(2026).split(" meta ")[0]
    yield "ExportManifest", EXPORT_MANIFEST
    yield "fnReadTable", READ_TABLE
    for source in (Source.FOLDER, Source.ADLS):
        yield f"ExportFiles {source}", export_files(source)
    for table in model_tables():
        yield table.name, table_query(table)
        yield f"{table.name} in PostgreSQL", view_query(table, "tandem_bi")


def parse_m(texts: list[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    if not (TOOLS / "node_modules" / "@microsoft" / "powerquery-parser").is_dir():
        pytest.skip("Microsoft's M parser is not there: make test-powerbi")
    return subprocess.run(
        ["node", str(HERE / "parse_m.js"), str(TOOLS)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
    )


def test_microsofts_parser_reads_every_query() -> None:
    result = parse_m(list(queries()))
    assert result.returncode == 0, result.stdout + result.stderr


def test_microsofts_parser_refuses_a_wrong_query() -> None:
    assert parse_m([("wrong", "let a = 1 == 2 in a")]).returncode == 1


def test_every_measure_is_dax(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (TOOLS / "python" / "pbi_parsers").is_dir():
        pytest.skip("the DAX parser is not there: make test-powerbi")
    monkeypatch.syspath_prepend(str(TOOLS / "python"))
    from pbi_parsers.dax import to_ast

    for measure in MEASURES:
        assert to_ast(measure.dax) is not None, measure.name
    with pytest.raises(ValueError, match="Unexpected token"):
        to_ast("DIVIDE(SUM(Requests[Cost]), ")


def test_the_report_keeps_the_rules(project: Path) -> None:
    if not (TOOLS / "python" / "pbir_utils").is_dir():
        pytest.skip("the PBIR rules are not there: make test-powerbi")
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from pbir_utils.cli import main; sys.exit(main())",
            *("validate", "--strict", "--format", "json", str(project / "Tandem.Report")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOLS / "python")},
    )
    assert result.returncode == 0, result.stdout + result.stderr
