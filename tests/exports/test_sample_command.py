"""`tandem export --sample azure` is an export that a person can look at, the same each time."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from exports.manifest import read_manifest
from exports.sample.traffic import BEGIN
from exports.storage import Target
from service.cli import app
from tests.exports.test_sample import traces

__all__ = ["traces"]

NUM_DAYS = 2


def tandem(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="tandem", env={"COLUMNS": "200"})


def sample(out: Path, traces: Path, *more: str) -> Result:
    source = ("--sample", "azure", "--trace-folder", str(traces))
    return tandem("export", "--out", str(out), *source, "--sample-days", str(NUM_DAYS), *more)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.thorough
def test_a_sample_is_the_same_to_the_byte_and_opens_in_report_and_power_bi(
    traces: Path, tmp_path: Path
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    for folder in (out, again):
        result = sample(folder, traces)
        assert result.exit_code == 0, result.stderr
    assert content(out) == content(again)
    manifest = read_manifest(Target(out))
    assert {day.toordinal() - BEGIN.toordinal() for day in manifest.dates("fact_request")} >= {0, 1}
    assert manifest.num_rows("fact_request") > 100 * NUM_DAYS

    report = tandem("report", str(out))
    assert report.exit_code == 0, report.stderr
    page = (out / "report.html").read_text("utf-8")
    assert f">{manifest.num_rows('fact_request'):,}</b><span>Requests</span>" in page
    project = tandem("powerbi", "init", "--root", str(out), "--out", str(tmp_path / "bi"))
    assert project.exit_code == 0, project.stderr
    model = tmp_path / "bi" / "Tandem.SemanticModel" / "definition" / "expressions.tmdl"
    assert str(out) in model.read_text("utf-8")

    # A place that holds an export is not overwritten by invented traffic.
    taken = sample(out, traces)
    assert taken.exit_code == 5
    assert "holds an export already" in taken.stderr
    assert read_manifest(Target(out)) == manifest


def test_days_of_a_sample_without_a_sample_are_refused(tmp_path: Path) -> None:
    result = tandem("export", "--out", str(tmp_path / "out"), "--sample-days", "3")
    assert result.exit_code == 2
    assert "needs --sample" in result.stderr
    assert not (tmp_path / "out").exists()
