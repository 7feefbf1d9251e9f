"""`tandem train`: make a drafter for a target, stage by stage or all at once."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli_train_outcome import friendly
from service.models import default_home, resolve_model

if TYPE_CHECKING:
    from engine.training.recipe import Recipe
    from engine.training.run import Run

app = typer.Typer(no_args_is_help=True, help="Train drafters for a target.")

_RunFolder = Annotated[Path, typer.Option("--out", help="folder of the run")]
_RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="TOML file")]
_Target = Annotated[str | None, typer.Option(help="folder or hub id of the target model")]
_Changes = Annotated[list[str] | None, typer.Argument(help="section.key=value")]
_Threads = Annotated[int | None, typer.Option(help="threads; None leaves torch's choice")]
_DEFAULT_SELF_PROMPTS = 2000
_MAX_STAGE_DAYS = 7  # what other processes wait while one makes the data


@app.command()
def plan(
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    budget: Annotated[str, typer.Option(help="time, as 30m or 2h")] = "2h",
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """Measure this machine for a minute and say what a budget buys."""
    with friendly():
        from engine.training.planning import make_plan

        run = _run(out, recipe, target, threads, changes)
        seconds = _seconds(budget)
        run.on_main(lambda: typer.echo(json.dumps(make_plan(run, seconds), indent=2)))


@app.command()
def data(
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """Have the target answer the prompts."""
    with friendly():
        from engine.training.data_stage import answer_prompts

        answer_prompts(_run(out, recipe, target, threads, changes))


@app.command()
def cache(
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """Capture the target's hidden states over the answers."""
    with friendly():
        from engine.training.feature_stage import make_features

        make_features(_run(out, recipe, target, threads, changes))


@app.command()
def distill(
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """Distil the target into a head; goes on where it was stopped."""
    with friendly():
        from engine.training.stages import distill as run_distill

        started = _run(out, recipe, target, threads, changes)
        _say(started, str(run_distill(started)))


@app.command()
def variational(
    start: Annotated[Path, typer.Option(help="the distilled head to start from")],
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """Train on whole draft paths: rounds of expectation and maximisation."""
    with friendly():
        from engine.training.stages import variational as run_variational

        started = _run(out, recipe, target, threads, changes)
        _say(started, str(run_variational(started, start)))


@app.command()
def control(
    start: Annotated[Path, typer.Option(help="the distilled head to start from")],
    objective: Annotated[str, typer.Option(help="what to distil with")] = "lk_hybrid",
    steps: Annotated[int, typer.Option(help="at most")] = 600,
    minutes: Annotated[float, typer.Option(help="at most; 0 is no limit")] = 0.0,
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """Spend the variational stage's time on more distillation, to compare with."""
    with friendly():
        from engine.training.stages import control as run_control

        run = _run(out, recipe, target, threads, changes)
        _say(run, str(run_control(run, start, objective, steps, minutes)))


@app.command()
def evaluate(
    heads: Annotated[list[Path], typer.Argument(help="folders of heads")],
    prompts: Annotated[list[Path], typer.Option(help="JSONL files, never trained on")],
    target: Annotated[str, typer.Option(help="folder or hub id of the target model")],
    out: _RunFolder = Path("build/training/evaluation"),
    draft_tokens: Annotated[int, typer.Option(help="K")] = 4,
    max_output_tokens: Annotated[int, typer.Option()] = 128,
    max_conversations: Annotated[int, typer.Option()] = 100_000,
    dtype: Annotated[str, typer.Option()] = "auto",
    threads: _Threads = None,
) -> None:
    """Replay heads over the target's own answers: exact, with confidence intervals; any number
    of heads is compared pairwise."""
    with friendly():
        _evaluate(
            heads,
            prompts,
            target,
            out,
            draft_tokens,
            max_output_tokens,
            max_conversations,
            dtype,
            threads,
        )


app.command(name="compare", help="The same as evaluate, for two heads or more.")(evaluate)


@app.command()
def run(
    out: _RunFolder = Path("build/training/run"),
    recipe: _RecipeFile = None,
    target: _Target = None,
    budget: Annotated[str | None, typer.Option(help="time, as 30m or 2h")] = None,
    threads: _Threads = None,
    changes: _Changes = None,
) -> None:
    """All stages, from a recipe or from no more than a target and a time budget."""
    with friendly():
        from engine.training.whole_run import train_whole

        started = _run(out, recipe, target, threads, changes)
        seconds = _seconds(budget) if budget is not None else None
        _say(started, json.dumps(train_whole(started, seconds), indent=2))


def _evaluate(
    heads: list[Path],
    prompts: list[Path],
    target: str,
    out: Path,
    draft_tokens: int,
    max_output_tokens: int,
    max_conversations: int,
    dtype: str,
    threads: int | None,
) -> None:
    from engine.training import atomic_files, report
    from engine.training.errors import TrainingError
    from engine.training.evaluation_stage import EvaluationSet, evaluate_heads

    names = {_label(folder): folder for folder in heads}
    if len(names) != len(heads):
        raise TrainingError("heads: two of them have the same name")
    recipe = _recipe(
        None,
        target,
        [
            f"dtype='{dtype}'",
            f"data.prompts={[str(path.resolve()) for path in prompts]}",
            f"data.max_output_tokens={max_output_tokens}",
            f"data.max_conversations={max_conversations}",
        ],
    )
    accelerator = _accelerator(threads)
    evaluation = EvaluationSet(out, recipe, recipe.data.prompts, accelerator)
    evaluation.make()
    if not accelerator.is_main_process:
        return
    found = evaluate_heads(evaluation, names, draft_tokens)
    sign_heads(found, names)
    atomic_files.write_json(out / "evaluation.json", found)
    report.draw(out / "evaluation.png", found["heads"])
    typer.echo(json.dumps(found, indent=2))


def sign_heads(evaluation: dict[str, Any], heads: Mapping[str, Path]) -> None:
    """Say which files each name stands for, so that a promotion can tell."""
    from engine.drafter.registry import head_fingerprint

    for name, folder in heads.items():
        evaluation["heads"][name]["fingerprint"] = head_fingerprint(folder)


def _say(run: "Run", text: str) -> None:
    if run.accelerator.is_main_process:
        typer.echo(text)


def _label(folder: Path) -> str:
    """The stage for a checkpoint's folder, else the folder's own name."""
    return folder.parent.name if folder.name.startswith("step-") else folder.name


def _run(
    out: Path,
    recipe: Path | None,
    target: str | None,
    threads: int | None,
    changes: list[str] | None,
) -> "Run":
    from engine.training.run import Run

    return Run(out, _recipe(recipe, target, changes or []), _accelerator(threads))


def _recipe(path: Path | None, target: str | None, changes: list[str]) -> "Recipe":
    from engine.training.errors import TrainingError
    from engine.training.recipe import load_recipe

    pairs: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise TrainingError(f"{change}: is no section.key=value")
        pairs[name] = value
    if target is not None:
        pairs["target"] = json.dumps(target)
    if path is None and "data.prompts" not in pairs:
        pairs.setdefault("data.self_prompts", str(_DEFAULT_SELF_PROMPTS))
    recipe = load_recipe(path, pairs)
    return replace(recipe, target=resolve_model(recipe.target, default_home()))


def _accelerator(threads: int | None) -> Any:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    if threads is not None:
        torch.set_num_threads(threads)
    patience = InitProcessGroupKwargs(timeout=timedelta(days=_MAX_STAGE_DAYS))
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])


def _seconds(text: str) -> float:
    from engine.training.errors import TrainingError

    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return float(text[:-1]) * units[text[-1]]
    except (ValueError, KeyError, IndexError):
        raise TrainingError(f"budget: {text!r} is no time; write 45s, 30m, 2h or 1d") from None
