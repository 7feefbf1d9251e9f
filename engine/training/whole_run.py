"""All stages in a row: from prompts to an evaluated head, within a budget if there is one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.drafter.head.file_names import CARD
from engine.drafter.head.files import read_card
from engine.training import atomic_files, report
from engine.training.data_stage import answer_prompts
from engine.training.errors import TrainingError
from engine.training.evaluation import (
    greedy_acceptance_length,
    sampled_acceptance_length,
    score_conversations,
    served_acceptance_length,
)
from engine.training.evaluation_stage import calibration_of
from engine.training.feature_cache import FeatureCache
from engine.training.feature_stage import make_features
from engine.training.language import language_reader
from engine.training.material import held_out, make_material, make_teacher
from engine.training.planning import make_plan
from engine.training.run import Run
from engine.training.stages import check_level, control, distill, spent_minutes, variational

_STEPS_WITHOUT_END = 1_000_000
_LEAST_MINUTES = 1 / 60
_COMPARISON = "comparison.json"


def train_whole(run: Run, budget_seconds: float | None) -> dict[str, Any]:
    """Data, features, distillation, the variational stage and its controls; the best head by
    held-out acceptance length lies in RUN/head. Returns the comparison, written beside it."""
    check_level(run)
    if budget_seconds is not None:
        run.recipe = _fit(run, budget_seconds)
    answer_prompts(run)
    make_features(run)
    distilled = distill(run)
    heads = {"distilled": distilled, "variational": variational(run, distilled)}
    minutes = max(spent_minutes(run, "variational"), _LEAST_MINUTES)
    for objective in run.recipe.variational.control_objectives:
        steps = _STEPS_WITHOUT_END
        heads[f"control-{objective}"] = control(run, distilled, objective, steps, minutes)
    return compare_and_keep(run, heads)


def compare_and_keep(run: Run, heads: dict[str, Path]) -> dict[str, Any]:
    """Score the heads on the held-out conversations and keep the best in RUN/head."""
    run.on_main(lambda: _compare_and_keep(run, heads))
    found: dict[str, Any] = json.loads((run.folder / _COMPARISON).read_text())
    return found


def _compare_and_keep(run: Run, heads: dict[str, Path]) -> None:
    num_drafts = run.recipe.head.num_draft_tokens
    languages = language_reader(run.target.tokenizer)
    scores = {}
    for name, folder in heads.items():
        material = make_material(run, folder)
        cache = FeatureCache(run.folder / "features", run.identity)
        rows = held_out(cache.rows, run.recipe.data.held_out_share)[1]
        head = material.head.to(run.target.model.dtype)
        teacher = make_teacher(run, head)
        greedy = [row for row in rows if row.temperature == 0] or rows
        scores[name] = (
            score_conversations(head, teacher, cache, greedy, num_drafts, languages),
            score_conversations(head, teacher, cache, rows, num_drafts),
        )
    reports = {name: report.summarize(*both, num_drafts) for name, both in scores.items()}
    lengths = {
        name: served_acceptance_length(
            greedy_acceptance_length(greedy, num_drafts),
            sampled_acceptance_length(both, num_drafts),
            run.recipe.data.sampled_share,
        )
        for name, (greedy, both) in scores.items()
    }
    best = max(lengths, key=lambda name: lengths[name])
    found = {"best": best, "heads": reports, "comparisons": report.compare(scores, num_drafts)}
    try:
        report.draw(run.folder / "comparison.png", reports)
    except TrainingError as error:
        found["picture"] = str(error)
    keep_head(run.folder / "head", heads[best], calibration_of(scores[best][0]), reports[best])
    atomic_files.write_json(run.folder / _COMPARISON, found)


def keep_head(
    folder: Path, source: Path, calibration: dict[str, list[float]], evaluation: dict[str, Any]
) -> None:
    """A copy of a checkpoint's head alone, its card completed."""
    card = read_card(source) | {"calibration": calibration, "evaluation": evaluation}

    def fill(place: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            shutil.copy(source / name, place / name)
        (place / CARD).write_text(json.dumps(card, indent=2) + "\n")

    atomic_files.write_folder(folder, fill)


def _fit(run: Run, budget_seconds: float) -> Any:
    """The recipe with as much of everything as the budget allows."""
    recipe = run.recipe
    path = run.folder / "plan.json"

    def measure() -> None:
        # A run that goes on keeps its plan: measured anew it would be another run's.
        if not path.exists():
            atomic_files.write_json(path, make_plan(run, budget_seconds))

    run.on_main(measure)
    plan = json.loads(path.read_text())
    if plan["budget_seconds"] != budget_seconds:
        raise TrainingError(
            f"budget: the run in {run.folder} was begun with {plan['budget_seconds']} seconds, "
            f"not {budget_seconds}; go on with those, or begin another"
        )
    per_answer = max(1, recipe.data.max_output_tokens // 2)
    count = max(24, plan["output_tokens"] // per_answer)
    minutes = plan["seconds"]["distill"] / 60
    positions = plan["seconds"]["distill"] * plan["train_positions_per_second"]
    steps = max(20, int(positions / (recipe.distill.batch_tokens / 2)))
    round_seconds = plan["seconds"]["variational"] / recipe.variational.num_rounds
    # A variational step costs about three of distillation: drawing, scoring and learning.
    step_seconds = 3 * recipe.distill.batch_tokens / 2 / plan["train_positions_per_second"]
    return replace(
        recipe,
        data=replace(
            recipe.data,
            max_conversations=min(count, recipe.data.max_conversations),
            self_prompts=min(count, recipe.data.self_prompts),
        ),
        distill=replace(
            recipe.distill,
            num_steps=steps,
            max_minutes=minutes,
            evaluate_every=max(5, steps // 12),
        ),
        variational=replace(
            recipe.variational, steps_per_round=max(2, int(round_seconds / step_seconds))
        ),
    )
