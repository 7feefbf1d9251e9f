"""The command line shows what the guard rails of the servers see."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.cli_experiment import app
from service.experiments.records import RollbackRecord, RollbackStore
from tests.service.experiments.test_watch import FILE, Rig


def _run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app,
        list(arguments),
        env={"TANDEM_HOME": str(tmp_path), "COLUMNS": "200"},
    )


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr("service.experiments.ledger_reader.LAG", timedelta(seconds=-1))
    return Rig(tmp_path)


def test_the_report_has_both_arms_every_rail_and_the_rule(tmp_path: Path, rig: Rig) -> None:
    rig.write(rig.requests(300, {"control": 15, "candidate": 4}))
    result = _run(tmp_path, "report", str(tmp_path / "experiment.toml"))
    assert result.exit_code == 0, result.output
    page = result.output
    assert page.startswith("# Experiment trial\n")
    assert "## candidate: roll back" in page
    assert "Rule: acceptance length: changed by -" in page
    for rail in ("| divergence |", "| failures |", "| acceptance length |"):
        assert rail in page
    assert "| control | old | 0.5 |" in page
    assert re.search(r"\| 2\.(4|5)\d \(from 2\.\d\d to 2\.\d\d\) \|", page)
    out = tmp_path / "report.md"
    assert _run(tmp_path, "report", str(tmp_path / "experiment.toml"), "--out", str(out)).output
    assert out.read_text().startswith("# Experiment trial\n")


def test_the_status_is_there_for_programs(tmp_path: Path, rig: Rig) -> None:
    rig.write(rig.requests(60, {"control": 15, "candidate": 15}))
    result = _run(tmp_path, "status", str(tmp_path / "experiment.toml"), "--json")
    found = json.loads(result.output)
    assert found["decisions"]["candidate"]["action"] == "continue"
    counted = sum(arm["num_requests"] for arm in found["variants"].values())
    assert counted == 60
    assert found["rollbacks"] == []


def test_rollbacks_of_this_start_are_shown(tmp_path: Path, rig: Rig) -> None:
    store = RollbackStore(tmp_path / "experiments")
    for started_at, rule in (("2026-03-01T00:00:00+00:00", "this"), ("2025", "another")):
        store.add(RollbackRecord("trial", started_at, "candidate", f"{rule} rule", "then"))
    result = _run(tmp_path, "status", str(tmp_path / "experiment.toml"))
    assert "candidate: rolled back at then - this rule" in result.output
    assert "another rule" not in result.output
    page = _run(tmp_path, "report", str(tmp_path / "experiment.toml")).output
    assert "- then: candidate was rolled back, because of this rule" in page


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(FILE.replace('name = "trial"', ""))
    result = _run(tmp_path, "status", str(path))
    assert result.exit_code == 1
    assert "name: is missing" in result.output
    path.write_text(FILE)
    result = _run(tmp_path, "status", str(path))
    assert result.exit_code in (1, 3)
    assert "error" in result.output
