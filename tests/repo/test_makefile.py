"""The Makefile's targets are commands, never files, and CI runs every test among them."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
NOT_IN_CI = {
    "test-audit": "twice ten thousand requests",
    "test-node": "needs Node and a package of its own",
    "test-speculators": "fetches the package speculators and what it needs",
}


def test_every_target_is_phony_and_every_phony_name_has_a_recipe() -> None:
    joined = MAKEFILE.replace("\\\n", " ")
    phony = re.findall(r"^\.PHONY:(.*)$", joined, re.MULTILINE)
    names = [name for line in phony for name in line.split()]
    assert len(names) == len(set(names))
    assert set(names) == TARGETS


def test_ci_runs_every_test_target_but_those_that_are_named_here() -> None:
    calls = re.findall(r"make --no-print-directory ([a-z0-9 -]+)", (ROOT / ".ci/run").read_text())
    called = {target for call in calls for target in call.split()}
    tests = {name for name in TARGETS if re.match(r"test(-|$)", name)}
    assert tests - called == NOT_IN_CI.keys()


def test_make_test_leaves_no_folder_out() -> None:
    """The manifests' checks among them: what `make k8s-check` runs is no more than is quick."""
    planned = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (line,) = [line for line in planned.splitlines() if "-m pytest" in line]
    words = shlex.split(line.partition("-m pytest")[2])
    assert [word for word in words if word.startswith(("tests", "--ignore", "--deselect"))] == []
    checks = re.findall(r"^k8s-check:.*\n\t.*-m pytest (.*)$", MAKEFILE, re.MULTILINE)
    assert [shlex.split(found)[-1] for found in checks] == ["tests/k8s"]


@pytest.mark.parametrize("target", ["setup", "demo", "test"])
def test_what_is_installed_is_installed_anew_only_when_the_constraints_change(
    target: str, tmp_path: Path
) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE, encoding="utf-8")
    stamp = tmp_path / ".venv" / ".installed"
    stamp.parent.mkdir()
    for age, path in enumerate([stamp, tmp_path / "pyproject.toml", tmp_path / "constraints.txt"]):
        path.write_text((ROOT / path.name).read_text() if path != stamp else "")
        os.utime(path, (1e9 - age, 1e9 - age))

    def installs() -> bool:
        planned = subprocess.run(
            ["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return "pip install" in planned.stdout

    assert not installs()
    os.utime(tmp_path / "constraints.txt", (1e9 + 1, 1e9 + 1))
    assert installs()
    stamp.unlink()
    assert installs()
