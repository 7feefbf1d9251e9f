"""What the page on experiments shows is a file that a server would take."""

import re
import tomllib
from pathlib import Path

from typer.main import get_command

from service.cli_drafter import app as drafter
from service.cli_experiment import app as experiment
from service.experiments.guard_rails import GuardRails
from service.experiments.specification import read_experiment

README = (Path(__file__).parents[3] / "service" / "experiments" / "README.md").read_text()


def test_the_example_is_an_experiment(tmp_path: Path) -> None:
    example, shadow = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    example += shadow
    (tmp_path / "experiment.toml").write_text(example)
    found = read_experiment(tmp_path / "experiment.toml")
    assert set(tomllib.loads(example)) >= {"name", "started_at", "unit", "key", "slot_seconds"}
    assert [variant.name for variant in found.variants] == ["control", "candidate"]
    assert found.guard_rails == GuardRails()


def test_named_rails_exist() -> None:
    rows = re.findall(r"^\| .* \| .* \| .*?`(m[a-z0-9_]+)` \|$", README, re.MULTILINE)
    assert len(rows) == 4
    assert all(hasattr(GuardRails(), name) for name in rows)


def test_the_commands_and_their_options_exist() -> None:
    groups = {"drafter": get_command(drafter), "experiment": get_command(experiment)}
    lines = re.findall(r"^tandem (drafter|experiment) (\w+)(.*?)(?: {3,}#.*| #.*)?$", README, re.M)
    assert len(lines) == 9
    for group, verb, rest in lines:
        command = groups[group].commands[verb]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, (verb, rest)
