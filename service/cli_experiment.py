"""`tandem experiment`: where a comparison of drafters on live traffic stands."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from service.experiments.canary import CanaryRun
from service.experiments.guard_rails import Decision, judge
from service.experiments.ledger_reader import LedgerReader
from service.experiments.records import RollbackStore
from service.experiments.report import Standing, render
from service.experiments.shadows import read_shadows
from service.experiments.specification import Experiment, ExperimentError, read_experiment
from service.experiments.tally import Tally
from telemetry.ledger.session import LedgerSchemaError, open_ledger, require_current_schema

EXIT_PROBLEM = 1
EXIT_UNAVAILABLE = 3

app = typer.Typer(help="Compare drafters on live traffic.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Argument(envvar="TANDEM_EXPERIMENT_FILE", help="The TOML file that servers read."),
]
Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="TANDEM_LEDGER_URL",
        help="sqlite:///FILE or postgresql://...",
        show_default="the server's own SQLite file",
    ),
]
MaxDraftTokens = Annotated[
    int, typer.Option(envvar="TANDEM_MAX_DRAFT_TOKENS", min=1, max=64, help="As the servers have.")
]


@app.command()
def status(
    file: File,
    ledger: Ledger = None,
    max_draft_tokens: MaxDraftTokens = 4,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the decision on each candidate and the rule that made it."""
    standing = _standing(file, ledger, max_draft_tokens)
    if as_json:
        decisions = {name: asdict(found) for name, found in standing.decisions.items()}
        counts = {name: asdict(found) for name, found in standing.counts.items()}
        rollbacks = [asdict(record) for record in standing.rollbacks]
        typer.echo(
            json.dumps(
                {
                    "experiment": standing.experiment.name,
                    "at": standing.at.isoformat(timespec="seconds"),
                    "variants": counts,
                    "decisions": decisions,
                    "rollbacks": rollbacks,
                    "stage": standing.stage,
                    "shadows": [asdict(found) for found in standing.shadows],
                },
                indent=2,
            )
        )
        return
    if standing.stage:
        typer.echo(f"promotes by itself: {standing.stage}")
    for name, decision in standing.decisions.items():
        typer.echo(f"{name}: {decision.action} - {decision.rule}")
    for shadow in standing.shadows:
        gain = "nothing to compare with yet"
        if shadow.gain is not None:
            found = shadow.gain
            gain = (
                f"{found.estimate:+.2f} (from {found.lower:+.2f} to {found.upper:+.2f}) against "
                f"{shadow.baseline} on {shadow.num_paired} requests"
            )
        typer.echo(f"{shadow.drafter}: in the shadow - acceptance length {gain}")
    for record in standing.rollbacks:
        word = "promoted" if record.is_promoted else "rolled back"
        typer.echo(f"{record.variant}: {word} at {record.at} - {record.rule}")


@app.command()
def report(
    file: File,
    ledger: Ledger = None,
    max_draft_tokens: MaxDraftTokens = 4,
    out: Annotated[Path | None, typer.Option(help="A file; else standard output.")] = None,
) -> None:
    """Write one page in Markdown: both arms, every rail with its interval, the decision."""
    page = render(_standing(file, ledger, max_draft_tokens))
    if out is None:
        typer.echo(page, nl=False)
    else:
        out.write_text(page, encoding="utf-8")
        typer.echo(out)


def _standing(file: Path, ledger: str | None, max_draft_tokens: int) -> Standing:
    home = Path(os.environ.get("TANDEM_HOME", "~/.cache/tandem")).expanduser()
    try:
        experiment = read_experiment(file)
        engine = open_ledger(ledger or f"sqlite:///{home / 'ledger.db'}", read_only=True)
        try:
            require_current_schema(engine)
            now = datetime.now(UTC)
            tally, decisions, stage = _judged(engine, experiment, max_draft_tokens, now)
            shadows = read_shadows(engine, experiment, max_draft_tokens)
        finally:
            engine.dispose()
        rollbacks = RollbackStore(home / "experiments").of(experiment.name)
    except (ExperimentError, LedgerSchemaError, ValueError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(EXIT_PROBLEM) from error
    except (SQLAlchemyError, OSError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(EXIT_UNAVAILABLE) from error
    started_at = experiment.started_at.isoformat()
    of_this_start = [r for r in rollbacks if r.started_at == started_at]
    return Standing(experiment, tally.counts(), decisions, of_this_start, now, shadows, stage)


def _judged(
    engine: Engine, experiment: Experiment, max_draft_tokens: int, now: datetime
) -> tuple[Tally, dict[str, Decision], str]:
    """What is judged by now, each candidate's decision as the servers come to it, and the stage
    of an experiment that promotes by itself."""
    if experiment.promote == "automatic":
        run = CanaryRun(
            experiment,
            lambda tally: LedgerReader(engine, tally),
            max_draft_tokens=max_draft_tokens,
        )
        decision = run.look(now)
        return run.tally, {experiment.candidates[0].name: decision}, run.stage.said
    tally = Tally(experiment, max_draft_tokens=max_draft_tokens)
    LedgerReader(engine, tally).advance(now)
    decisions = {
        candidate.name: judge(
            tally.evidence(candidate.name, now.timestamp()),
            experiment.guard_rails,
            tally.alpha_per_test,
        )
        for candidate in experiment.candidates
    }
    return tally, decisions, ""
