"""What a training stage works on: a head, its teacher, the conversations on both sides."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.drafter.head.files import load_head
from engine.drafter.head.model import Eagle3Head
from engine.loader import output_weight
from engine.training.conversations import is_held_out, stable_fraction
from engine.training.errors import TrainingError
from engine.training.evaluation import ConversationScore, score_conversations
from engine.training.feature_cache import CachedRow, FeatureCache
from engine.training.initialize import HeadShape, fresh_head, head_config
from engine.training.precision import mixed_precision
from engine.training.run import Run
from engine.training.scores import Teacher
from engine.training.vocabulary_stage import choose_vocabulary

_MAX_HELD_OUT_ROWS = 160


def held_out(
    rows: Sequence[CachedRow], share: float, max_source_share: float = 1.0
) -> tuple[list[CachedRow], list[CachedRow]]:
    """(trained on, held out), by key alone; of a source that is too common, the first rows.

    Of few conversations, where the share would hold out none, the one nearest to it is.
    """
    limit = share
    if rows and not any(is_held_out(row.key, share) for row in rows):
        limit = math.nextafter(min(stable_fraction(row.key, "held-out") for row in rows), 1.0)
    out = [row for row in rows if is_held_out(row.key, limit)]
    kept = [row for row in rows if not is_held_out(row.key, limit)]
    most = int(max_source_share * len(kept))
    seen: Counter[str] = Counter()
    balanced = []
    for row in kept:
        seen[row.source] += 1
        if seen[row.source] <= most:
            balanced.append(row)
    return balanced, out[:_MAX_HELD_OUT_ROWS]


def make_teacher(run: Run, head: Eagle3Head) -> Teacher:
    """On the target's device, where the head has to be."""
    rows, token_ids = output_weight(run.target.model), head.draft_token_ids
    return Teacher(rows[token_ids].contiguous(), token_ids)


@dataclass(frozen=True)
class Material:
    """What training stages read."""

    run: Run
    head: Eagle3Head
    card: dict[str, Any]

    @cached_property
    def cache(self) -> FeatureCache:
        return FeatureCache(self.run.folder / "features", self.run.identity)

    @cached_property
    def rows(self) -> tuple[list[CachedRow], list[CachedRow]]:
        data = self.run.recipe.data
        kept, out = held_out(self.cache.rows, data.held_out_share, data.max_source_share)
        if not kept or not out:
            raise TrainingError("data: too few conversations to train on some and hold out others")
        return kept, out

    @cached_property
    def teacher(self) -> Teacher:
        return make_teacher(self.run, self.head)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """bfloat16 where the target has it; a head in float32 beside a float32 target."""
        dtype = self.run.target.model.dtype
        return None if dtype == torch.float32 else dtype

    def evaluate(self) -> list[ConversationScore]:
        """Of the held-out conversations that were answered greedily: what T = 0 serving meets."""
        greedy = [row for row in self.rows[1] if row.temperature == 0]
        num_drafts = self.run.recipe.head.num_draft_tokens
        with mixed_precision(self.head.device, self.autocast_dtype):
            return score_conversations(
                self.head, self.teacher, self.cache, greedy or self.rows[1], num_drafts
            )


def make_material(run: Run, start: Path | None = None) -> Material:
    """A fresh head, or that of a folder, on the target's device, and the data to train it on."""
    vocabulary = choose_vocabulary(run)
    target, recipe = run.target, run.recipe
    name = relocatable(target.name)
    told = replace(
        recipe,
        target=name,
        data=replace(recipe.data, prompts=tuple(relocatable(p) for p in recipe.data.prompts)),
    )
    card = {
        "target": name,
        "target_fingerprint": target.fingerprint,
        "window": recipe.head.window,
        "recipe": json.loads(json.dumps(told, default=plain)),
    }
    if start is None:
        shape = HeadShape(len(vocabulary), run.captured_layers, None, recipe.head.num_draft_tokens)
        config = head_config(target.model, name, shape)
        head = fresh_head(config, target.model, vocabulary, recipe.distill.seed)
    else:
        head = load_head(start, target.model, target_fingerprint=target.fingerprint)
        head.to(target.model.device).train()
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name not in ("embed_tokens.weight", "lm_head.weight"))
        card["started_from"] = f"{start.parent.name}/{start.name}"
    return Material(run, head, card)


def relocatable(name: str) -> str:
    """What is told of a model or a file: a hub id as it is, of a path its last part alone."""
    return Path(name).name if Path(name).exists() else name


def plain(value: Any) -> Any:
    """A frozen settings object as JSON knows it; for json's `default`."""
    return {name: getattr(value, name) for name in type(value).__slots__}
