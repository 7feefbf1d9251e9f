"""`tandem train` from end to end on a tiny model: every command, what is refused, what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from service.cli_train import app
from tests.tiny import save_tiny_model

RECIPE = """
target = "{target}"
dtype = "float32"
[data]
prompts = ["prompts.jsonl"]
max_output_tokens = 20
num_rows = 8
held_out_share = 0.2
[head]
draft_vocab_size = 256
num_draft_tokens = 3
[distill]
num_steps = 8
batch_tokens = 256
evaluate_every = 4
[variational]
num_rounds = 1
steps_per_round = 2
contexts_per_batch = 8
num_paths = 3
control_objectives = ["kl"]
"""


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(*arguments: str | Path) -> Any:
    """What a command that goes well prints, read as JSON or as it is."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    text = result.stdout.strip()
    return json.loads(text) if text.startswith("{") else text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, prompts and a recipe."""
    path = tmp_path_factory.mktemp("train")
    save_tiny_model(path / "target", num_layers=6)
    words = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "a", "person", "sees")
    lines = [{"prompt": f"{words[i % 11]} {words[(5 * i + 1) % 11]}"} for i in range(20)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "recipe.toml").write_text(RECIPE.format(target=path / "target"))
    return path


def test_mistakes_in_a_recipe_are_one_line_with_the_key(folder: Path) -> None:
    recipe = ("--recipe", folder / "recipe.toml", "--out", folder / "mistaken")
    for change, named in (
        ("distill.learning_speed=1", "distill.learning_speed: is no key"),
        ("variational.num_paths='many'", "variational.num_paths"),
        ("variational.utility='best'", "variational.utility"),
        ("speed", "speed: is no section.key=value"),
    ):
        result = invoke("distill", *recipe, change)
        assert result.exit_code == 2
        assert named in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    result = invoke("plan", *recipe, "--budget", "soon")
    assert result.exit_code == 2
    assert "budget: 'soon'" in result.stderr
    assert not (folder / "mistaken").exists()


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    """What the commands say, one after another."""
    common = ("--recipe", folder / "recipe.toml", "--out", folder / "run", "--threads", "1")
    told: dict[str, Any] = {"data": said("data", *common), "cache": said("cache", *common)}
    told["distill"] = said("distill", *common)
    told["variational"] = said("variational", "--start", told["distill"], *common)
    told["control"] = said(
        "control", "--start", told["distill"], "--objective", "kl", "--steps", "2", *common
    )
    return told


@pytest.mark.thorough
def test_every_stage_leaves_a_head_and_says_how_it_was_made(
    folder: Path, trained: dict[str, Any]
) -> None:
    for stage, place in (
        ("distill", "distill-finish"),
        ("variational", "variational"),
        ("control", "control-kl"),
    ):
        head = Path(trained[stage])
        assert head.parent == folder / "run" / place
        assert (head / "model.safetensors").is_file()
        told = json.loads((head.parent / "provenance.json").read_text())
        assert {"command", "versions", "git_commit", "seconds"} <= told.keys()


@pytest.mark.thorough
def test_a_command_goes_on_where_it_stopped(folder: Path, trained: dict[str, Any]) -> None:
    common = ("--recipe", folder / "recipe.toml", "--out", folder / "run")
    before = {p: p.stat().st_mtime_ns for p in (folder / "run").rglob("*.safetensors")}
    assert said("distill", *common) == trained["distill"]
    assert {p: p.stat().st_mtime_ns for p in before} == before


@pytest.mark.thorough
def test_heads_are_compared_at_both_temperatures(folder: Path, trained: dict[str, Any]) -> None:
    heads = (trained["distill"], trained["control"])
    options = ("--target", folder / "target", "--prompts", folder / "prompts.jsonl")
    sizes = ("--draft-tokens", "3", "--max-output-tokens", "16", "--dtype", "float32")
    found = said("compare", *heads, *options, *sizes, "--out", folder / "evaluation")
    assert set(found["heads"]) == {"distill-finish", "control-kl"}
    for figures in found["heads"].values():
        assert figures["ci"][0] <= figures["acceptance_length"] <= figures["ci"][1]
        assert figures["acceptance_length_coupled"] >= 1
        assert len(figures["fingerprint"]) >= 16
    entry = found["comparisons"]["control-kl - distill-finish"]
    assert set(entry) == {"greedy", "sampled"}
    assert json.loads((folder / "evaluation/evaluation.json").read_text()) == found
    assert (folder / "evaluation/evaluation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_what_was_made_for_another_target_is_refused(folder: Path, trained: dict[str, Any]) -> None:
    save_tiny_model(folder / "other", seed=1, num_layers=6)
    common = ("--recipe", folder / "recipe.toml", "--target", folder / "other", "--out")
    for stage in ("data", "cache"):
        result = invoke(stage, *common, folder / "run")
        assert result.exit_code == 2
        assert "target_fingerprint" in result.stderr
    result = invoke("control", "--start", trained["distill"], *common, folder / "run")
    assert result.exit_code == 2
    assert "target_fingerprint" in result.stderr
    prompts = ("--prompts", folder / "prompts.jsonl", "--max-output-tokens", "8")
    result = invoke(
        "evaluate",
        trained["distill"],
        "--target",
        folder / "other",
        "--dtype",
        "float32",
        *prompts,
        "--out",
        folder / "other-evaluation",
    )
    assert result.exit_code == 2
    assert "target_fingerprint" in result.stderr


@pytest.mark.thorough
def test_a_plan_says_what_a_budget_buys(folder: Path) -> None:
    recipe = ("--recipe", folder / "recipe.toml", "--out", folder / "planned")
    found = said("plan", *recipe, "--budget", "10m")
    assert found["budget_seconds"] == 600
    assert sum(found["seconds"].values()) == pytest.approx(600, abs=3)
    assert found["answer_tokens_per_second"] > 0
    assert set(found["break_even_acceptance_length"]) == {"1", "8", "32"}


@pytest.mark.thorough
def test_one_command_does_it_all(folder: Path) -> None:
    recipe = ("--recipe", folder / "recipe.toml", "--out", folder / "whole")
    found = said("run", *recipe)
    assert set(found["heads"]) == {"distilled", "variational", "control-kl"}
    head = folder / "whole" / "head"
    assert found["best"] in found["heads"]
    assert json.loads((head / "drafter_card.json").read_text())["calibration"]["confidence"]
