"""Rounds of the variational stage: kept, undone, ended, and resumed to the same bits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from engine.training.errors import TrainingError
from engine.training.evaluation import ConversationScore
from engine.training.material import Material, make_material
from engine.training.run import Run
from engine.training.stages import train, variational
from engine.training.status import StatusLog
from engine.training.trainer import TrainSettings
from tests.engine.training.tiny_run import prepared_run, tiny_recipe

pytestmark = pytest.mark.thorough

Weights = dict[str, torch.Tensor]


class _KilledError(Exception):
    """The process ends here: what was not saved is lost."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with data and features, and a head to start from."""
    folder = tmp_path_factory.mktemp("variational")
    run = prepared_run(folder)
    settings = TrainSettings(num_steps=1, batch_tokens=256, num_draft_steps=3, num_drafts_served=3)
    return folder, train(make_material(run), "start", settings)


def script(
    monkeypatch: pytest.MonkeyPatch, lengths: Sequence[float | tuple[float, float] | None]
) -> list[Weights]:
    """Held-out acceptance lengths, one per evaluation, or a pair at T = 0 and T = 1, or None for
    a kill; the weights judged."""
    left, seen = list(lengths), []

    def evaluate(material: Material) -> list[ConversationScore]:
        seen.append({n: p.detach().clone() for n, p in material.head.named_parameters()})
        length = left.pop(0)
        if length is None:
            raise _KilledError
        greedy, sampled = length if isinstance(length, tuple) else (length, length)
        accepted = (0, 0, round(1000 * (greedy - 1)))
        figures = ((1, 1, 1000), (0, 0, 0), (0.0, 0.0, sampled - 1), (), ())
        return [ConversationScore("a", "words", 9, 9, accepted, *figures)]

    monkeypatch.setattr(Material, "evaluate", evaluate)
    return seen


def run_in(folder: Path, name: str, num_rounds: int) -> Run:
    """A run of its own stages over the same data and features."""
    recipe = tiny_recipe(folder)
    recipe = replace(recipe, variational=replace(recipe.variational, num_rounds=num_rounds))
    run = prepared_run(folder)
    made = Run(folder / name, recipe, run.accelerator, run.target)
    made.folder.mkdir()
    for part in ("data", "features"):
        (made.folder / part).symlink_to(run.folder / part)
    return made


def saved(run: Run, which: str) -> tuple[Weights, dict[str, object]]:
    folder = run.folder / "variational"
    place = folder / (folder / which).read_text()
    return load_file(place / "master.safetensors"), json.loads((place / "state.json").read_text())


def same(weights: Weights, others: Weights) -> bool:
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_a_round_is_kept_only_if_the_held_out_length_rises(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, start = begun
    run = run_in(folder, "kept", num_rounds=6)
    seen = script(monkeypatch, [2.0, 2.2, 2.2, 2.3, 2.1, 9.9])
    variational(run, start)
    weights, state = saved(run, "latest")
    # Start, kept, undone, kept, undone: two were undone, so there is no further round.
    assert len(seen) == 5
    assert state["num_failures"] == 2
    assert state["best_acceptance_length"] == pytest.approx(2.3)
    assert not same(weights, seen[4]), "the last round is undone"
    assert same(weights, seen[3])
    assert same(saved(run, "best")[0], seen[3])
    events = (run.folder / "variational/events.jsonl").read_text().splitlines()
    told = [event for line in events if (event := json.loads(line))["event"] == "evaluation"]
    assert [event["is_kept"] for event in told] == [True, True, False, True, False]


def test_a_round_is_judged_at_the_served_mixture_of_temperatures(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, start = begun
    run = run_in(folder, "mixture", num_rounds=2)
    assert run.recipe.data.sampled_share == 0.5
    script(monkeypatch, [(2.0, 2.0), (1.9, 2.2), (2.1, 1.9)])
    variational(run, start)
    _, state = saved(run, "latest")
    assert (state["best_step"], state["num_failures"]) == (3, 1)
    assert state["best_acceptance_length"] == pytest.approx(2.05)


def test_a_killed_stage_resumes_to_the_same_bits(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, start = begun
    lengths = [2.0, 2.2, 2.1, 2.4]
    whole, cut = run_in(folder, "whole", 3), run_in(folder, "cut", 3)
    script(monkeypatch, lengths)
    variational(whole, start)
    for part in ([2.0, 2.2, None], [2.1, None]):
        script(monkeypatch, part)
        with pytest.raises(_KilledError):
            variational(cut, start)
    script(monkeypatch, lengths[3:])
    variational(cut, start)
    weights, state = saved(whole, "latest")
    resumed, resumed_state = saved(cut, "latest")
    assert same(weights, resumed)
    assert {**state, "seconds": 0} == {**resumed_state, "seconds": 0}


def test_sampled_paths_in_several_processes_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    accelerator = SimpleNamespace(num_processes=2)
    run = Run(tmp_path / "run", tiny_recipe(tmp_path), accelerator)
    with pytest.raises(TrainingError, match=r"variational\.level.*one process, not 2"):
        variational(run, tmp_path)
    assert not run.folder.exists()


def test_the_status_line_is_about_the_acceptance_length(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(StatusLog, "line", lambda _, text, **options: shown.append(text))
    folder, start = begun
    run = run_in(folder, "status", num_rounds=2)
    script(monkeypatch, [2.5, 2.6, 2.7])
    variational(run, start)
    events = (run.folder / "variational/events.jsonl").read_text().splitlines()
    step = next(event for line in events if (event := json.loads(line))["event"] == "step")
    assert 1 < step["acceptance_length"] < 4
    tau = f"{step['acceptance_length']:.2f}"
    of_steps = [text for text in shown if text.startswith("variational")]
    assert of_steps[0].startswith(f"variational 17% | tau(batch) {tau} | best tau 2.500 | ")


def test_a_stage_is_not_resumed_with_other_settings(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, start = begun
    run = run_in(folder, "other", num_rounds=1)
    script(monkeypatch, [2.0, 2.2])
    variational(run, start)
    changed = replace(run.recipe.variational, num_paths=2)
    run.recipe = replace(run.recipe, variational=changed)
    with pytest.raises(TrainingError, match="num_paths"):
        variational(run, start)
