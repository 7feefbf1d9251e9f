"""The file of an experiment: what is wrong is refused with the name of its field."""

from pathlib import Path

import pytest

from service.experiments.specification import Experiment, ExperimentError, read_experiment

GOOD = """
name = "chat-v4"
started_at = 2026-11-30T09:00:00+01:00
unit = "tenant"
slot_seconds = 300
[[variant]]
name = "control"
drafters = ["prompt_lookup"]
weight = 0.9
[[variant]]
name = "candidate"
drafters = ["prompt_lookup", "head:chat-v4"]
weight = 0.1
max_draft_tokens = 5
[guard_rails]
max_acceptance_loss = 0.02
"""


def _read(tmp_path: Path, text: str) -> Experiment:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return read_experiment(path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    found = _read(tmp_path, GOOD)
    assert found.started_at.isoformat() == "2026-11-30T08:00:00+00:00"
    assert found.control.name == "control"
    assert found.candidates[0].drafters == ("prompt_lookup", "head:chat-v4")
    assert found.candidates[0].max_draft_tokens == 5
    assert found.guard_rails.max_acceptance_loss == 0.02
    assert found.slots is not None
    assert found.hash_key == b"chat-v4"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('name = "chat-v4"', 'name = "a/b"', "name"),
        ('name = "chat-v4"', "", "name: is missing"),
        ("started_at = 2026-11-30T09:00:00+01:00", "", "started_at: is missing"),
        ("+01:00", "", "started_at"),
        ('unit = "tenant"', 'unit = "user"', "unit"),
        ("weight = 0.9", "weight = -1", "variant control.weight"),
        ("weight = 0.9", 'weight = "all"', "variant control.weight"),
        ("weight = 0.9", "", r"variant\[0\].weight: is missing"),
        ('drafters = ["prompt_lookup"]', 'drafters = "prompt_lookup"', r"variant\[0\].drafters"),
        ('name = "candidate"', 'name = "control"', "variant.name"),
        ("max_draft_tokens = 5", "max_draft_tokens = 0", "max_draft_tokens"),
        ("slot_seconds = 300", "slot_seconds = 10", "washout_seconds"),
        ("slot_seconds = 300", 'slot_seconds = "5m"', "slot_seconds"),
        ("max_acceptance_loss", "max_acceptance", "guard_rails.max_acceptance: is not known"),
        ("max_acceptance_loss = 0.02", "alpha = 2", "guard_rails.alpha"),
        ("[guard_rails]", "typo = 1\n[guard_rails]", "typo: is not known"),
        ("name =", "name ==", "experiment.toml"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert old in GOOD
    with pytest.raises(ExperimentError, match=field):
        _read(tmp_path, GOOD.replace(old, new, 1))


def test_a_control_alone_is_no_experiment(tmp_path: Path) -> None:
    alone = GOOD[: GOOD.rindex("[[variant]]")]
    with pytest.raises(ExperimentError, match="variant: needs a control and a candidate"):
        _read(tmp_path, alone)


def test_slots_compare_one_candidate(tmp_path: Path) -> None:
    third = '[[variant]]\nname = "other"\ndrafters = []\nweight = 0.1\n'
    with pytest.raises(ExperimentError, match="slot_seconds"):
        _read(tmp_path, GOOD + third)


def test_a_candidate_that_is_taken_out_gives_its_share_to_the_control(tmp_path: Path) -> None:
    without = _read(tmp_path, GOOD).without(frozenset({"candidate"}))
    assert without.weights == {"control": 1.0, "candidate": 0.0}
