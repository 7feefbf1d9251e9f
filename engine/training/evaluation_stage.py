"""Scores heads on prompts: the target answers them once, any number of heads is replayed.

EVAL/greedy, EVAL/sampled    each data and features, as in a run
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from engine.drafter.head.calibration import fit_calibration
from engine.drafter.head.files import load_head
from engine.training.conversations import read_conversations
from engine.training.data_stage import answer_prompts
from engine.training.evaluation import ConversationScore, score_conversations
from engine.training.feature_cache import FeatureCache
from engine.training.feature_stage import make_features
from engine.training.language import language_reader
from engine.training.material import make_teacher
from engine.training.recipe import Recipe
from engine.training.report import compare, summarize
from engine.training.run import Run

_SAMPLED_TEMPERATURE = 1.0


class EvaluationSet:
    """Prompts answered at T = 0 and at T = 1, and the target's states over them."""

    def __init__(
        self, folder: Path, recipe: Recipe, prompts: Sequence[str], accelerator: Accelerator
    ) -> None:
        self._runs = {}
        for name, share in (("greedy", 0.0), ("sampled", 1.0)):
            data = replace(
                recipe.data,
                prompts=tuple(prompts),
                self_prompts=0,
                sampled_share=share,
                temperature=_SAMPLED_TEMPERATURE,
            )
            self._runs[name] = Run(folder / name, replace(recipe, data=data), accelerator)

    def make(self) -> None:
        """Answer and capture what is missing."""
        for run in self._runs.values():
            answer_prompts(run)
            make_features(run)

    def score(
        self, head_folder: Path, num_drafts: int
    ) -> tuple[list[ConversationScore], list[ConversationScore]]:
        """(at T = 0, at T = 1) of one head."""
        found = []
        for run in self._runs.values():
            target = run.target
            head = load_head(head_folder, target.model, target_fingerprint=target.fingerprint)
            head.to(target.model.device, target.model.dtype)
            cache = FeatureCache(run.folder / "features", run.identity)
            with torch.inference_mode():
                teacher = make_teacher(run, head)
                found.append(
                    score_conversations(
                        head,
                        teacher,
                        cache,
                        cache.rows,
                        num_drafts,
                        language_reader(target.tokenizer),
                        {row.key: row.seed for row in read_conversations(run.folder / "data")},
                    )
                )
        return found[0], found[1]


def evaluate_heads(
    evaluation: EvaluationSet, heads: dict[str, Path], num_drafts: int
) -> dict[str, Any]:
    """name -> figures of each head, with the calibration that serving uses, and comparisons."""
    scores = {name: evaluation.score(folder, num_drafts) for name, folder in heads.items()}
    reports = {
        name: summarize(greedy, sampled, num_drafts) for name, (greedy, sampled) in scores.items()
    }
    return {"heads": reports, "comparisons": compare(scores, num_drafts)}


def calibration_of(scores: Sequence[ConversationScore]) -> dict[str, list[float]]:
    """What a card says of how far a head's confidence can be trusted."""
    fitted = fit_calibration([pair for score in scores for pair in score.confidences])
    return {
        "confidence": [round(x, 5) for x in fitted.confidence],
        "acceptance": [round(x, 5) for x in fitted.acceptance],
    }
