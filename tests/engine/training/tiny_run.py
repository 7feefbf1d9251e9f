"""A whole training run on a tiny target, small enough for a test."""

import json
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

from engine.training.data_stage import make_data
from engine.training.feature_stage import make_features
from engine.training.recipe import (
    DataRecipe,
    DistillRecipe,
    HeadRecipe,
    Recipe,
    VariationalRecipe,
)
from engine.training.run import Run
from tests.tiny import save_tiny_model

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "a",
    "person",
    "sees",
    "it",
)


def tiny_recipe(folder: Path, **changes: object) -> Recipe:
    """A recipe over a saved tiny model and a file of prompts in `folder`."""
    target = folder / "target"
    if not target.exists():
        save_tiny_model(target, num_layers=6)
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        lines = [
            json.dumps({"prompt": f"{WORDS[i % 12]} {WORDS[(5 * i + 1) % 12]}", "source": "words"})
            for i in range(24)
        ]
        prompts.write_text("\n".join(lines) + "\n")
    recipe = Recipe(
        target=str(target),
        dtype="float32",
        data=DataRecipe(
            prompts=(str(prompts),), max_output_tokens=24, num_rows=8, held_out_share=0.2
        ),
        head=HeadRecipe(draft_vocab_size=256, num_draft_tokens=3),
        distill=DistillRecipe(num_steps=12, batch_tokens=256, evaluate_every=4, finish_share=0.25),
        variational=VariationalRecipe(
            num_rounds=2, steps_per_round=3, contexts_per_batch=8, num_paths=3
        ),
    )
    return replace(recipe, **changes)  # type: ignore[arg-type]


def prepared_run(folder: Path, **changes: object) -> Run:
    """Data and features are made."""
    run = Run(folder / "run", tiny_recipe(folder, **changes), Accelerator(cpu=True))
    make_data(run.folder / "data", run.recipe)
    make_features(run)
    return run
