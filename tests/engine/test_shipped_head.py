"""The head that Tandem ships, beside the model that it was trained for."""

import hashlib
import json
from pathlib import Path

import pytest

from engine.config import SHIPPED_HEAD, EngineConfig, SpeculationConfig
from engine.drafter.head import assembly
from engine.drafter.head.file_names import CARD, WEIGHTS
from engine.drafter.head.files import read_config
from engine.engine import Engine
from engine.loader import describe_model
from tests.benchmarks.workloads import chat_token_ids, greedy_request, model_folder, run_all
from tests.tiny import tiny_llama, tiny_tokenizer

FOLDER = Path(assembly._PRETRAINED)
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell in all?",
    "Write a short story about a lighthouse keeper.",
)


def test_it_is_small_and_says_how_it_was_made() -> None:
    assert (FOLDER / WEIGHTS).stat().st_size <= 20 * 2**20
    card = json.loads((FOLDER / CARD).read_text())
    assert card["target_fingerprint"]
    assert card["calibration"]["confidence"]
    assert read_config(FOLDER).captured_layers == (2, 15, 27)
    results = json.loads((FOLDER / "results.json").read_text())
    for name in ("distilled", "variational", "control"):
        assert (
            results[name]["ci"][0] <= results[name]["acceptance_length"] <= results[name]["ci"][1]
        )


def test_every_figure_says_how_it_was_made() -> None:
    results = json.loads((FOLDER / "results.json").read_text())
    card = json.loads((FOLDER / CARD).read_text())
    digest = hashlib.sha256((FOLDER / WEIGHTS).read_bytes()).hexdigest()
    assert results[results["shipped"]]["model_sha256"] == digest
    assert card["history"] == results["history"]
    assert results["data"]["target_fingerprint"] == card["target_fingerprint"]
    assert len(results["data"]["sha256_of_shards"]) == 64
    for stage in results["history"]:
        assert "script" in stage, stage["stage"]
        assert stage.get("command") or stage.get("note") or "attempt" in stage["stage"]
        if stage["stage"] not in ("data", "cache"):
            assert {"seed", "learning_rate"} <= stage.keys(), stage["stage"]
    page = (FOLDER / "README.md").read_text()
    for name in ("distilled", "control"):
        for key in ("acceptance_length", "acceptance_length_sampled", "expected_calibration_error"):
            assert f"{results[name][key]:.3f}" in page, (name, key)


def test_a_target_that_it_was_not_made_for_is_served_without_it() -> None:
    config = EngineConfig(
        target="tiny",
        kv_cache_memory=5e8,
        speculation=SpeculationConfig(drafters=("prompt_lookup", "head"), head=SHIPPED_HEAD),
    )
    engine = Engine.from_models(config, describe_model("tiny", tiny_llama(), tiny_tokenizer()))
    assert engine.info.drafters == ("prompt_lookup",)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_drafts_well_and_changes_no_token(dtype: str) -> None:
    config = EngineConfig(
        target=model_folder(),
        dtype=dtype,  # type: ignore[arg-type]
        max_num_rows=4,
        max_model_tokens=512,
        speculation=SpeculationConfig(drafters=("head",), head=SHIPPED_HEAD),
    )
    engine = Engine.from_config(config)
    outputs = {}
    for mode in ("on", "off"):
        asked = [
            greedy_request(f"{mode}{i}", chat_token_ids(engine, p), 64, mode, ignore_eos=False)
            for i, p in enumerate(PROMPTS)
        ]
        found, stats, _, _ = run_all(engine, asked)
        outputs[mode] = list(found.values())
        if mode == "on":
            accepted = sum(s.num_accepted_tokens for s in stats.values())
            rounds = sum(s.num_verify_steps for s in stats.values())
    assert outputs["on"] == outputs["off"]
    assert 1 + accepted / rounds > 1.4
