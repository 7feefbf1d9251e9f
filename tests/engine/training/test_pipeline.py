"""Stages end to end on a tiny target: they resume bitwise, keep out what they must, and a head
that has learned one conversation by heart drafts it in the engine."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.training import whole_run
from engine.training.capture import Capturer
from engine.training.conversations import read_conversations
from engine.training.data_stage import make_data
from engine.training.errors import TrainingError
from engine.training.feature_cache import FeatureCache
from engine.training.feature_stage import make_features
from engine.training.material import make_material
from engine.training.recipe import DistillRecipe, HeadRecipe, load_recipe
from engine.training.run import Run
from engine.training.stages import distill, train, variational
from engine.training.trainer import TrainSettings
from tests.engine.driver import request, run
from tests.engine.head.heads import deep_tiny_llama
from tests.engine.training.tiny_run import prepared_run, tiny_recipe

pytestmark = pytest.mark.thorough

SETTINGS = TrainSettings(
    num_steps=10, batch_tokens=256, num_draft_steps=3, num_drafts_served=3, evaluate_every=5
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "master.safetensors")


@pytest.mark.slow
def test_all_stages_run_and_the_last_head_can_be_served(tmp_path: Path) -> None:
    run_ = prepared_run(tmp_path)
    best = variational(run_, distill(run_))
    card = json.loads((best / "drafter_card.json").read_text())
    assert card["target_fingerprint"] == run_.target.fingerprint
    engine = Engine.from_config(
        EngineConfig(
            target=run_.recipe.target,
            dtype="float32",
            kv_cache_memory=5e8,
            speculation=SpeculationConfig(drafters=("head",), head=str(best)),
        )
    )
    outcome = run(engine, [request("a", [5, 9, 17], max_tokens=8)])
    assert outcome.stats["a"].num_draft_tokens > 0


@pytest.mark.slow
def test_a_run_that_goes_on_gives_the_controls_the_time_that_the_variational_stage_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ = prepared_run(tmp_path)
    best = variational(run_, distill(run_))
    spent = json.loads((run_.folder / "variational/provenance.json").read_text())["seconds"]
    given: list[float] = []

    def control(run: Run, start: Path, objective: str, steps: int, minutes: float) -> Path:
        given.append(minutes)
        return best

    monkeypatch.setattr(whole_run, "control", control)
    whole_run.train_whole(run_, None)  # nothing is left to do but the controls
    assert given == [max(spent, 1.0) / 60] * len(run_.recipe.variational.control_objectives)


def test_captured_features_equal_a_plain_forward_whatever_their_neighbours() -> None:
    target = deep_tiny_llama()
    texts = [[5, 9, 17, 30], [40, 41, 42, 43, 44, 45, 46], [7, 8]]
    capturer = Capturer(target, (1, 3, 5))
    together = capturer.capture([(text, 1) for text in texts])
    for text, features in zip(texts, together, strict=True):
        with torch.inference_mode():
            plain = target(input_ids=torch.tensor([text]), output_hidden_states=True)
        captured = torch.cat([plain.hidden_states[layer][0] for layer in (1, 3, 5)], dim=-1)
        assert torch.allclose(features.captured, captured, atol=1e-3)
        assert torch.equal(features.best_token_ids, plain.logits[0].argmax(-1))
        assert torch.allclose(features.log_normalizer, plain.logits[0].logsumexp(-1), atol=1e-4)
    capturer.close()


@pytest.mark.slow
def test_data_that_was_interrupted_is_made_as_if_it_had_not_been(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    make_data(tmp_path / "whole", recipe)
    make_data(tmp_path / "cut", recipe)
    (tmp_path / "cut" / "shard-000000.jsonl").unlink()
    make_data(tmp_path / "cut", recipe)
    whole = list(read_conversations(tmp_path / "whole"))
    assert len(whole) == 24
    assert list(read_conversations(tmp_path / "cut")) == whole


def test_data_begun_with_other_settings_is_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    make_data(tmp_path / "data", recipe)
    other = replace(recipe, data=replace(recipe.data, max_output_tokens=12))
    with pytest.raises(TrainingError, match="max_output_tokens"):
        make_data(tmp_path / "data", other)


def test_features_of_another_target_are_refused(tmp_path: Path) -> None:
    run_ = prepared_run(tmp_path)
    with pytest.raises(TrainingError, match="target_fingerprint"):
        FeatureCache(run_.folder / "features", {"target_fingerprint": "another"})


def test_the_feature_cache_keeps_to_its_budget(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    run_ = prepared_run(tmp_path, features=replace(recipe.features, max_gigabytes=1e-9))
    assert len(list((run_.folder / "features").glob("shard-*"))) == 1


def _train_and_die(folder: Path, stop_after: int) -> None:
    run_ = prepared_run(folder)
    material = make_material(run_)
    status = folder / "run" / "killed" / "events.jsonl"

    def watch() -> None:
        while True:
            if status.exists() and status.read_text().count("evaluation") >= stop_after:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)

    import threading

    threading.Thread(target=watch, daemon=True).start()
    train(material, "killed", SETTINGS)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run_ = prepared_run(tmp_path)
    train(make_material(run_), "whole", SETTINGS)
    process = multiprocessing.get_context("spawn").Process(
        target=_train_and_die, args=(tmp_path, 2)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    train(make_material(run_), "killed", SETTINGS)
    whole = weights(run_.folder / "whole" / "step-000010")
    resumed = weights(run_.folder / "killed" / "step-000010")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path) -> None:
    run_ = prepared_run(tmp_path)
    train(make_material(run_), "stage", SETTINGS)
    with pytest.raises(TrainingError, match="learning_rate"):
        train(make_material(run_), "stage", replace(SETTINGS, learning_rate=0.5e-3))


def test_a_stage_whose_time_is_spent_takes_no_further_step(tmp_path: Path) -> None:
    run_ = prepared_run(tmp_path)
    for _ in range(2):
        train(make_material(run_), "short", SETTINGS, max_minutes=1e-9)
    assert (run_.folder / "short" / "latest").read_text() == "step-000001"


@pytest.mark.slow
def test_a_head_that_knows_a_conversation_by_heart_drafts_it_in_the_engine(
    tmp_path: Path,
) -> None:
    recipe = tiny_recipe(tmp_path)
    data = replace(recipe.data, max_conversations=2, sampled_share=0.0, held_out_share=0.5)
    run_ = prepared_run(
        tmp_path,
        data=data,
        head=HeadRecipe(draft_vocab_size=320, num_draft_tokens=3),
        distill=DistillRecipe(
            num_steps=250, finish_share=0, batch_tokens=256, evaluate_every=250, learning_rate=5e-3
        ),
    )
    rows = list(read_conversations(run_.folder / "data"))
    # Both parts of the split may be the same here: what is asked is whether it can be learned.
    material = make_material(run_)
    material.__dict__["rows"] = (material.cache.rows, material.cache.rows)
    settings = replace(
        SETTINGS, num_steps=250, evaluate_every=250, learning_rate=5e-3, warmup_steps=10
    )
    best = train(material, "by-heart", settings)
    engine = Engine.from_config(
        EngineConfig(
            target=run_.recipe.target,
            dtype="float32",
            kv_cache_memory=5e8,
            speculation=SpeculationConfig(drafters=("head",), head=str(best), max_draft_tokens=3),
        )
    )
    asked = [
        request(
            row.key, row.prompt_token_ids, max_tokens=len(row.output_token_ids), ignore_eos=True
        )
        for row in rows
    ]
    outcome = run(engine, asked)
    accepted = sum(stats.num_accepted_tokens for stats in outcome.stats.values())
    rounds = sum(stats.num_verify_steps for stats in outcome.stats.values())
    assert 1 + accepted / rounds > 0.9 * 4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("target = 't'\nspeed = 1", "speed"),
        ("target = 't'\n[data]\nprompts = ['p']\ntemprature = 1.0", "data.temprature"),
        ("target = 't'\n[data]\nprompts = 'p'", "data.prompts"),
        ("target = 't'\n[data]\nprompts = ['p']\n[distill]\nobjective = 'best'", "objective"),
        ("target = 't'", "data.prompts"),
    ],
)
def test_a_recipes_mistakes_are_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(TrainingError, match=named):
        load_recipe(path)


def test_make_features_twice_captures_nothing_anew(tmp_path: Path) -> None:
    run_ = prepared_run(tmp_path)
    shard = run_.folder / "features" / "shard-000000.safetensors"
    before = shard.stat().st_mtime_ns
    make_features(run_)
    assert shard.stat().st_mtime_ns == before
