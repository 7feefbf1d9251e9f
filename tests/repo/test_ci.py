"""The script of the continuous integration: readable by its shell, and without a prompt."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ROOT / ".ci" / "run"


def test_the_script_is_executable_and_parses() -> None:
    assert os.access(RUN, os.X_OK)
    assert subprocess.run(["bash", "-n", RUN]).returncode == 0


def test_it_runs_the_tests_with_and_without_the_model() -> None:
    calls = re.findall(r"make --no-print-directory ([a-z -]+)", RUN.read_text())
    called = {target for call in calls for target in call.split()}
    assert {"test", "test-model"} <= called
    known = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called <= known


def test_a_python_that_is_too_old_or_has_no_venv_is_named(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    result = subprocess.run(
        ["make", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}", "setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "Python 3.11" in result.stdout
    fake.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n')
    result = subprocess.run(
        ["make", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}", "setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "apt-get install python3-venv" in result.stdout
