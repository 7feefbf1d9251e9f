"""The training stages of a run; each goes on where it stopped and skips what is done.

RUN/data, RUN/features, RUN/vocabulary.json    see the stages of these names
RUN/distill, RUN/distill-finish                checkpoints, each a head
RUN/variational, RUN/control-OBJECTIVE         from the distilled head
"""

import json
from dataclasses import replace
from pathlib import Path

from engine.training.distillation import Distillation
from engine.training.errors import TrainingError
from engine.training.material import Material, make_material, plain
from engine.training.objectives import find_objective
from engine.training.provenance import write_provenance
from engine.training.run import Run
from engine.training.trainer import Trainer, TrainSettings
from engine.training.variational import VariationalTrainer


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
    state = trainer.run(max_seconds=max_minutes * 60 or None)
    told = json.loads(json.dumps(settings, default=plain))
    run.on_main(lambda: write_provenance(folder, settings=told, seconds=state.seconds))
    best = trainer.best_folder
    if best is None:
        raise TrainingError(f"{folder}: no checkpoint was written")
    return best


def distill(run: Run) -> Path:
    """Distillation, then a shorter finish with an objective that knows of acceptance."""
    recipe = run.recipe.distill
    num_finish = int(recipe.num_steps * recipe.finish_share)
    settings = TrainSettings(
        num_steps=recipe.num_steps - num_finish,
        objective=recipe.objective,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        batch_tokens=recipe.batch_tokens,
        batches_per_step=recipe.batches_per_step,
        num_draft_steps=run.recipe.head.num_draft_tokens,
        num_drafts_served=run.recipe.head.num_draft_tokens,
        evaluate_every=recipe.evaluate_every,
        sampled_share=run.recipe.data.sampled_share,
        has_prompt_anchors=recipe.has_prompt_anchors,
    )
    minutes = recipe.max_minutes
    best = train(make_material(run), "distill", settings, minutes * (1 - recipe.finish_share))
    if not num_finish:
        return best
    finish = replace(
        settings,
        num_steps=num_finish,
        objective=recipe.finish_objective,
        learning_rate=recipe.learning_rate / 2,
        seed=recipe.seed + 1,
    )
    material = make_material(run, best)
    return train(material, "distill-finish", finish, minutes * recipe.finish_share)


def variational(run: Run, start: Path) -> Path:
    """The variational stage from a distilled head; the folder of the best checkpoint.

    Raises TrainingError where check_level does.
    """
    check_level(run)
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
        run.recipe.data.sampled_share,
    )
    state = trainer.run()
    write_provenance(run.folder / "variational", seconds=state.seconds)
    best = trainer.best_folder
    if best is None:
        raise TrainingError(f"{run.folder}/variational: no checkpoint was written")
    return best


def check_level(run: Run) -> None:
    """Raise TrainingError for sampled paths in several processes, which are not supported."""
    if run.recipe.variational.level == "sampled" and run.accelerator.num_processes > 1:
        raise TrainingError(
            f"variational.level: sampled paths take one process, not "
            f"{run.accelerator.num_processes}; run this stage alone, or with level path"
        )


def control(run: Run, start: Path, objective: str, num_steps: int, max_minutes: float) -> Path:
    """More distillation from the same start, for as long as the variational stage took."""
    settings = _continued(run, objective, num_steps)
    return train(make_material(run, start), f"control-{objective}", settings, max_minutes)


def spent_minutes(run: Run, stage: str) -> float:
    """What a finished stage took, interruptions left out."""
    told = json.loads((run.folder / stage / "provenance.json").read_text())
    return float(told["seconds"]) / 60


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
        sampled_share=run.recipe.data.sampled_share,
        seed=run.recipe.variational.seed + 7,
    )
