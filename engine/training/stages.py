"""The stages of a run, in order; each goes on where it stopped and skips what is done.

RUN/data        conversations that the target wrote      (make_data)
RUN/features    its hidden states over them              (make_features)
RUN/vocabulary.json                                      (choose_vocabulary)
RUN/distill     checkpoints, each a head                 (distill)
RUN/variational, RUN/control-NAME                        (engine.training.variational)
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from engine.drafter.head.files import load_head
from engine.drafter.head.model import Eagle3Head
from engine.drafter.head.tap import default_captured_layers
from engine.loader import LoadedModel, load_model
from engine.training import atomic_files
from engine.training.capture import Capturer
from engine.training.conversations import (
    Conversation,
    is_held_out,
    read_conversations,
)
from engine.training.distillation import Distillation
from engine.training.errors import TrainingError
from engine.training.evaluation import ConversationScore, score_conversations
from engine.training.feature_cache import CachedRow, CacheInput, FeatureCache, build_cache
from engine.training.initialize import HeadShape, fresh_head, head_config
from engine.training.objectives import find_objective
from engine.training.provenance import write_provenance
from engine.training.recipe import Recipe
from engine.training.scores import Teacher
from engine.training.status import StatusLog
from engine.training.trainer import Trainer, TrainSettings
from engine.training.variational import VariationalTrainer
from engine.training.vocabulary import (
    choose_size,
    count_tokens,
    coverage,
    select_vocabulary,
)

_MAX_HELD_OUT_ROWS = 160


@dataclass(slots=True)
class Run:
    """A run folder and what its stages share; the target is loaded when it is first needed."""

    folder: Path
    recipe: Recipe
    accelerator: Accelerator
    _target: LoadedModel | None = None

    @property
    def target(self) -> LoadedModel:
        if self._target is None:
            device = str(self.accelerator.device)
            self._target = load_model(self.recipe.target, dtype=self.recipe.dtype, device=device)
            self._target.model.set_attn_implementation("sdpa")
        return self._target

    @property
    def captured_layers(self) -> tuple[int, ...]:
        num_layers = self.target.model.config.get_text_config().num_hidden_layers
        return self.recipe.head.captured_layers or default_captured_layers(num_layers)

    @property
    def identity(self) -> dict[str, Any]:
        """What features must have been made with."""
        return {
            "target_fingerprint": self.target.fingerprint,
            "dtype": str(self.target.model.dtype).removeprefix("torch."),
            "captured_layers": list(self.captured_layers),
        }


def held_out(
    rows: Sequence[CachedRow], share: float, max_source_share: float = 1.0
) -> tuple[list[CachedRow], list[CachedRow]]:
    """(trained on, held out), by key alone; of a source that is too common, the first rows."""
    out = [row for row in rows if is_held_out(row.key, share)]
    kept = [row for row in rows if not is_held_out(row.key, share)]
    most = int(max_source_share * len(kept))
    seen: Counter[str] = Counter()
    balanced = []
    for row in kept:
        seen[row.source] += 1
        if seen[row.source] <= most:
            balanced.append(row)
    return balanced, out[:_MAX_HELD_OUT_ROWS]


def make_features(run: Run) -> None:
    """Capture what the target computes over the conversations."""
    status = StatusLog(run.folder / "features")
    conversations = list(read_conversations(run.folder / "data"))
    inputs = [
        CacheInput(c.key, c.source, c.temperature, c.token_ids, len(c.prompt_token_ids))
        for c in conversations
    ]
    total = sum(len(item.token_ids) for item in inputs)
    done = [0]

    def heard(num_tokens: int) -> None:
        done[0] += num_tokens
        status.line(f"features | {done[0]} new of {total} tokens")

    capturer = Capturer(run.target.model, run.captured_layers)
    try:
        build_cache(
            run.folder / "features",
            inputs,
            capturer.capture,
            identity=run.identity,
            max_bytes=int(run.recipe.features.max_gigabytes * 1e9),
            on_tokens=heard,
        )
    finally:
        capturer.close()
    write_provenance(run.folder / "features", **run.identity)


def choose_vocabulary(run: Run) -> list[int]:
    """The draft vocabulary of the run: chosen once, then kept for the life of its heads."""
    path = run.folder / "vocabulary.json"
    if path.exists():
        return [int(token_id) for token_id in json.loads(path.read_text())["token_ids"]]
    share = run.recipe.data.held_out_share
    conversations = list(read_conversations(run.folder / "data"))
    vocab_size = run.target.model.config.get_text_config().vocab_size
    trained = [c for c in conversations if not is_held_out(c.key, share)]
    counts = count_tokens((c.output_token_ids for c in trained), vocab_size)
    # Prompts are text like the served one; an output token weighs as much as sixteen of them.
    broad = 16 * counts + count_tokens((c.prompt_token_ids for c in trained), vocab_size)
    out = _held_out_counts(conversations, share, vocab_size)
    size = run.recipe.head.draft_vocab_size or _size_by_cost(run, broad, out)
    chosen = select_vocabulary(broad, min(size, vocab_size), run.target.eos_token_ids)
    atomic_files.write_json(
        path,
        {
            "coverage_trained": coverage(counts, chosen),
            "coverage_held_out": coverage(out, chosen),
            "token_ids": chosen.tolist(),
        },
    )
    return [int(token_id) for token_id in chosen]


def _size_by_cost(run: Run, counts: torch.Tensor, out: torch.Tensor) -> int:
    model = run.target.model
    config = head_config(model, "", HeadShape(1, run.captured_layers))
    head = Eagle3Head(config)
    trained = (p for n, p in head.named_parameters() if not n.startswith(("embed", "lm_head")))
    return choose_size(
        counts,
        out,
        num_body_parameters=sum(p.numel() for p in trained),
        hidden_size=config.hidden_size,
        num_target_parameters=run.target.num_parameters,
        num_drafts=run.recipe.head.num_draft_tokens,
        always=run.target.eos_token_ids,
    )


def _held_out_counts(
    conversations: Sequence[Conversation], share: float, vocab_size: int
) -> torch.Tensor:
    out = (c.output_token_ids for c in conversations if is_held_out(c.key, share))
    return count_tokens(out, vocab_size)


def make_teacher(run: Run, head: Eagle3Head) -> Teacher:
    token_ids = head.draft_token_ids
    weight = run.target.model.get_output_embeddings().weight.detach()
    return Teacher(weight[token_ids].contiguous(), token_ids)


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
        with torch.autocast(
            self.head.device.type,
            dtype=self.autocast_dtype or torch.bfloat16,
            enabled=self.autocast_dtype is not None,
        ):
            return score_conversations(
                self.head, self.teacher, self.cache, greedy or self.rows[1], num_drafts
            )


def make_material(run: Run, start: Path | None = None) -> Material:
    """A fresh head, or that of a folder, and the data to train it on."""
    vocabulary = choose_vocabulary(run)
    target, recipe = run.target, run.recipe
    card = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "window": recipe.head.window,
        "recipe": json.loads(json.dumps(recipe, default=_plain)),
    }
    if start is None:
        shape = HeadShape(len(vocabulary), run.captured_layers, None, recipe.head.num_draft_tokens)
        config = head_config(target.model, target.name, shape)
        head = fresh_head(config, target.model, vocabulary, recipe.distill.seed)
    else:
        head = load_head(start, target.model, target_fingerprint=target.fingerprint)
        head.train()
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name not in ("embed_tokens.weight", "lm_head.weight"))
        card["started_from"] = str(start)
    return Material(run, head, card)


def _plain(value: Any) -> Any:
    return {name: getattr(value, name) for name in type(value).__slots__}


def train(
    material: Material,
    stage: str,
    settings: TrainSettings,
    max_minutes: float = 0.0,
) -> Path:
    """Train the material's head under RUN/<stage>; the folder of the best checkpoint."""
    run = material.run
    folder = run.folder / stage
    module = Distillation(
        material.head,
        material.teacher,
        find_objective(settings.objective),
        settings.num_draft_steps,
        material.autocast_dtype,
    )
    trainer = Trainer(
        module,
        material.cache,
        material.rows[0],
        material.evaluate,
        settings,
        folder,
        {**material.card, "stage": stage},
        run.accelerator,
    )
    trainer.run(max_seconds=max_minutes * 60 or None)
    if run.accelerator.is_main_process:
        write_provenance(folder, settings=json.loads(json.dumps(settings, default=_plain)))
    best = trainer.best_folder
    if best is None:
        raise TrainingError(f"{folder}: no checkpoint was written")
    return best


def distill(run: Run) -> Path:
    """Distillation, then a shorter finish with an objective that knows of acceptance."""
    recipe = run.recipe.distill
    num_finish = int(recipe.num_steps * recipe.finish_share)
    common = {
        "batch_tokens": recipe.batch_tokens,
        "batches_per_step": recipe.batches_per_step,
        "num_draft_steps": run.recipe.head.num_draft_tokens,
        "num_drafts_served": run.recipe.head.num_draft_tokens,
        "evaluate_every": recipe.evaluate_every,
        "has_prompt_anchors": recipe.has_prompt_anchors,
    }
    settings = TrainSettings(
        num_steps=recipe.num_steps - num_finish,
        objective=recipe.objective,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        **common,
    )
    minutes = recipe.max_minutes
    best = train(make_material(run), "distill", settings, minutes * (1 - recipe.finish_share))
    if not num_finish:
        return best
    finish = TrainSettings(
        num_steps=num_finish,
        objective=recipe.finish_objective,
        learning_rate=recipe.learning_rate / 2,
        seed=recipe.seed + 1,
        **common,
    )
    material = make_material(run, best)
    return train(material, "distill-finish", finish, minutes * recipe.finish_share)


def variational(run: Run, start: Path) -> Path:
    """The variational stage from a distilled head; the folder of the best checkpoint."""
    recipe = run.recipe.variational
    material = make_material(run, start)
    objective = "path" if recipe.level == "path" else recipe.teacher_objective
    if recipe.level == "path":
        settings = _continued(run, objective, recipe.num_rounds * recipe.steps_per_round)
        return train(material, "variational", settings)
    trainer = VariationalTrainer(
        material.head,
        material.teacher,
        run.target.model,
        material.cache,
        material.rows[0],
        material.evaluate,
        recipe,
        find_objective(objective),
        run.recipe.head.num_draft_tokens,
        run.recipe.distill.batch_tokens,
        material.autocast_dtype,
        run.folder / "variational",
        {**material.card, "stage": "variational"},
    )
    state = trainer.run()
    write_provenance(run.folder / "variational", seconds=state.seconds)
    best = trainer.best_folder
    if best is None:
        raise TrainingError(f"{run.folder}/variational: no checkpoint was written")
    return best


def control(run: Run, start: Path, objective: str, num_steps: int, max_minutes: float) -> Path:
    """More distillation from the same start, for as long as the variational stage took."""
    settings = _continued(run, objective, num_steps)
    return train(make_material(run, start), f"control-{objective}", settings, max_minutes)


def _continued(run: Run, objective: str, num_steps: int) -> TrainSettings:
    return TrainSettings(
        num_steps=num_steps,
        objective=objective,
        learning_rate=run.recipe.variational.learning_rate,
        batch_tokens=run.recipe.distill.batch_tokens,
        batches_per_step=run.recipe.distill.batches_per_step,
        num_draft_steps=run.recipe.head.num_draft_tokens,
        num_drafts_served=run.recipe.head.num_draft_tokens,
        evaluate_every=max(1, run.recipe.variational.steps_per_round),
        seed=run.recipe.variational.seed + 7,
    )
