"""Files stay small enough to read, and free of the machine they were written on."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 300
LONGER = {  # file -> its own limit
    "engine/request.py": 380,  # every value is checked where it is declared
    "telemetry/ledger/models.py": 420,  # the tables
    "telemetry/ledger/records.py": 360,  # the rows' types
    "telemetry/ledger/writer.py": 340,  # one thread's whole life
    "telemetry/recorder.py": 390,  # one class behind one contract
}
# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile("/" + "work/|/" + "opt/(?:py|wheels)|/" + "root/")


def _tracked() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return _tracked()


def test_our_modules_fit_on_a_few_screens(tracked: list[str]) -> None:
    modules = re.compile(
        r"(engine|exports|service|telemetry)/(?!pb/|ledger/migrations/versions/).*\.py"
    )
    lengths = {
        name: len((ROOT / name).read_text(encoding="utf-8").splitlines())
        for name in tracked
        if modules.fullmatch(name)
    }
    assert lengths
    long = {name: n for name, n in lengths.items() if n > LONGER.get(name, MAX_LINES)}
    assert not long
    not_needed = [name for name in LONGER if lengths.get(name, MAX_LINES + 1) <= MAX_LINES]
    assert not not_needed


def test_no_file_names_a_place_on_one_machine(tracked: list[str]) -> None:
    found = {}
    for name in tracked:
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        if match := MACHINE_PATH.search(text):
            found[name] = match.group()
    assert not found


def test_the_top_level_is_the_agreed_one(tracked: list[str]) -> None:
    agreed = {"protos", "service", "engine", "telemetry", "exports", "k8s", "tests"}
    agreed |= {"pyproject.toml", "README.md", "SECURITY.md", "LICENSE", "Makefile"}
    agreed |= {"constraints.txt"}
    top = {name.split("/")[0] for name in tracked}
    assert {name for name in top - agreed if not name.startswith(".")} == set()
