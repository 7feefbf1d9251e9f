"""`tandem ledger`: the ledger's schema, health, totals, retention and journal."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from telemetry.ledger.journal import JournalError, JournalLockedError
from telemetry.ledger.queries import check_ledger, ledger_stats
from telemetry.ledger.replay import replay_journal
from telemetry.ledger.retention import RetentionError, prune
from telemetry.ledger.session import (
    LedgerSchemaError,
    migrate,
    open_ledger,
    require_current_schema,
)

EXIT_PROBLEM = 1
EXIT_UNAVAILABLE = 3

app = typer.Typer(help="Look after the ledger of requests.", no_args_is_help=True)
_console = Console()
_errors = Console(stderr=True)

Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="TANDEM_LEDGER_URL",
        help="sqlite:///FILE or postgresql://...",
        show_default="the server's own SQLite file",
    ),
]


def _home() -> Path:
    return Path(os.environ.get("TANDEM_HOME", "~/.cache/tandem")).expanduser()


def _url(ledger: str | None) -> str:
    return ledger or f"sqlite:///{_home() / 'ledger.db'}"


@contextmanager
def _failures_told() -> Iterator[None]:
    try:
        yield
    except (LedgerSchemaError, RetentionError, JournalError, ValueError) as error:
        _errors.print(f"[red]{error}[/red]", soft_wrap=True)
        raise typer.Exit(EXIT_PROBLEM) from error
    except (SQLAlchemyError, OSError) as error:
        _errors.print(f"[red]the ledger does not answer:[/red] {error}", soft_wrap=True)
        raise typer.Exit(EXIT_UNAVAILABLE) from error


@contextmanager
def _opened(ledger: str | None, *, read_only: bool) -> Iterator[Engine]:
    with _failures_told():
        engine = open_ledger(_url(ledger), read_only=read_only)
        try:
            require_current_schema(engine)
            yield engine
        finally:
            engine.dispose()


@app.command("migrate")
def migrate_command(
    ledger: Ledger = None,
    revision: Annotated[str, typer.Option(help="`base` removes every table.")] = "head",
) -> None:
    """Bring the schema up to date; does nothing when it is."""
    with _failures_told():
        migrate(_url(ledger), revision)
    _console.print(f"the ledger's schema is at {revision}")


@app.command()
def check(ledger: Ledger = None) -> None:
    """Check schema, money and open requests; exit code 1 when something is wrong."""
    with _failures_told():
        engine = open_ledger(_url(ledger), read_only=True)
        try:
            findings = check_ledger(engine)
        finally:
            engine.dispose()
    for finding in findings:
        mark = "[green]good[/green]" if finding.is_good else "[red]wrong[/red]"
        _console.print(f"{mark}  {finding.name}: {finding.detail}", soft_wrap=True)
    if not all(finding.is_good for finding in findings):
        raise typer.Exit(EXIT_PROBLEM)


@app.command()
def stats(ledger: Ledger = None) -> None:
    """Show totals."""
    with _opened(ledger, read_only=True) as engine:
        totals = ledger_stats(engine)
    table = Table(show_header=False, box=None)
    for name, value in asdict(totals).items():
        shown = "unknown" if value is None else str(value)
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {number}" for key, number in sorted(value.items())) or "-"
        table.add_row(name, shown)
    _console.print(table)


@app.command("prune")
def prune_command(
    ledger: Ledger = None,
    keep_days: Annotated[int, typer.Option(min=1, help="Days to keep, today included.")] = 90,
    exported_through: Annotated[
        int | None,
        typer.Option(min=0, help="Ledger id that may go at most, where nothing is exported."),
    ] = None,
) -> None:
    """Delete old requests, never beyond what every export has read."""
    before = datetime.now(UTC).date() - timedelta(days=keep_days - 1)
    with _opened(ledger, read_only=False) as engine:
        pruned = prune(engine, before=before, through=exported_through)
    _console.print(
        f"deleted {pruned.num_requests} requests from before {before}"
        + (f" in {pruned.num_partitions} partitions" if pruned.num_partitions else "")
    )
    if pruned.kept_days:
        days = ", ".join(day.isoformat() for day in pruned.kept_days)
        _console.print(f"kept what is not exported yet, of {days}", soft_wrap=True)


@app.command("replay-journal")
def replay_journal_command(
    ledger: Ledger = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="A journal's folder.", show_default="all of TANDEM_HOME"),
    ] = None,
) -> None:
    """Write what waits in journals to the ledger; those of running servers are left alone."""
    if journal is not None and not journal.is_dir():
        _errors.print(f"[red]{journal} is no folder[/red]", soft_wrap=True)
        raise typer.Exit(EXIT_PROBLEM)
    is_complete = True
    for folder in [journal] if journal else sorted((_home() / "journal").glob("*/")):
        with _failures_told():
            try:
                replayed = replay_journal(_url(ledger), folder)
            except JournalLockedError:
                if journal is not None:
                    raise
                _console.print(f"{folder}: left to the server that runs", soft_wrap=True)
                continue
        is_complete = is_complete and replayed.is_complete
        _console.print(
            f"{folder}: {replayed.num_records} records written, {replayed.num_set_aside} set aside",
            soft_wrap=True,
        )
    if not is_complete:
        raise typer.Exit(EXIT_PROBLEM)
