"""The committed stubs are those of the proto, and the contract stays compatible."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copytree(ROOT / "service" / "pb", tmp_path / "service" / "pb")
    return tmp_path


def _check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", root / "protos" / "check.sh"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(root)},
        capture_output=True,
        text=True,
    )


def _edit(root: Path, old: str, new: str) -> None:
    proto = root / "protos" / "tandem" / "v1" / "generation.proto"
    text = proto.read_text(encoding="utf-8")
    assert old in text
    proto.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_stubs_are_fresh_and_the_contract_is_clean() -> None:
    result = _check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_proto_that_was_not_regenerated_is_noticed(copy: Path) -> None:
    _edit(copy, "message TokenIds {", "message TokenIds {\n  // More.\n  string more = 99;")
    result = _check(copy)
    assert result.returncode != 0
    assert "make protos" in result.stderr


def test_a_breaking_change_is_noticed(copy: Path) -> None:
    _edit(copy, "string request_id = 2;", "string request_name = 2;")
    result = _check(copy)
    assert result.returncode != 0
    assert "request_name" in result.stdout + result.stderr
