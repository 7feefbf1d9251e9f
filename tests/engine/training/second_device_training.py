"""Trains a tiny head on the processor and on a second device: one JSON object of both."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engine.second_device import DEVICE  # first: it changes how torch is set up

# isort: split
from accelerate import Accelerator

from engine.training.data_stage import answer_prompts
from engine.training.evaluation_stage import EvaluationSet
from engine.training.feature_stage import make_features
from engine.training.run import Run
from engine.training.stages import distill, variational
from tests.engine.training.tiny_run import tiny_recipe


class _Placed(Accelerator):  # type: ignore[misc] # accelerate is untyped
    """An accelerator that found the device."""

    place = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self.place


def _of(event: dict[str, Any], *names: str) -> list[float]:
    return [event[name] for name in names if name in event]


def run_on(folder: Path, device: torch.device) -> dict[str, Any]:
    """Held-out lengths of every stage, the variational steps' losses, an evaluation."""
    accelerator = _Placed(cpu=True)
    accelerator.place = device
    recipe = tiny_recipe(folder)
    recipe = replace(
        recipe,
        data=replace(recipe.data, max_conversations=12, max_output_tokens=16),
        distill=replace(recipe.distill, num_steps=6, evaluate_every=2),
        variational=replace(recipe.variational, num_rounds=1, steps_per_round=2),
    )
    run = Run(folder / device.type, recipe, accelerator)
    answer_prompts(run)
    make_features(run)
    start = distill(run)
    best = variational(run, start)
    evaluation = EvaluationSet(run.folder / "evaluation", recipe, recipe.data.prompts, accelerator)
    evaluation.make()
    scores = evaluation.score(best, 3)
    events = {
        stage: [
            json.loads(line)
            for line in (run.folder / stage / "events.jsonl").read_text().splitlines()
        ]
        for stage in ("distill", "distill-finish", "variational")
    }
    return {
        "device": str(run.target.model.device),
        "held_out": {
            stage: [_of(e, "acceptance_length", "acceptance_length_sampled") for e in told]
            for stage, told in events.items()
        },
        "path_steps": [_of(e, "loss", "utility", "effective_share") for e in events["variational"]],
        "evaluation": [[list(s.accepted), list(s.expected)] for part in scores for s in part],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    found = {d.type: run_on(folder, d) for d in (torch.device("cpu"), DEVICE)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
