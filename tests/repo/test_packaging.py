"""What is installed: names that are ours alone, and versions that were tested together."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["engine", "exports", "service", "telemetry"])
def test_a_package_name_belongs_to_tandem_alone(name: str) -> None:
    assert set(packages_distributions()[name]) == {"tandem"}


def test_every_dependency_is_a_range_that_is_pinned_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    required = [*project["project"]["dependencies"], *(r for extra in extras for r in extra)]
    assert not [requirement for requirement in required if "==" in requirement]
    required += [r for group in project["dependency-groups"].values() for r in group]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    pinned = [_name(pin) for pin in pins]
    assert len(pinned) == len(set(pinned))
    assert {_name(requirement) for requirement in required} - set(pinned) == set()


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
