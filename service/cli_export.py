"""`tandem export`: the ledger as Parquet tables for dashboards."""

import os
import signal
import threading
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from exports.errors import ExportError
from exports.job import ExportOptions, ExportSummary, run_export
from exports.job import Progress as ExportProgress
from exports.metrics import write_metrics

app = typer.Typer(help="Publish the ledger as Parquet tables.")

Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="TANDEM_LEDGER_URL",
        help="sqlite:///FILE or postgresql://...",
        show_default="the server's own SQLite file",
    ),
]


def default_ledger_url() -> str:
    """The SQLite ledger of a server that was not told another."""
    home = Path(os.environ.get("TANDEM_HOME", "~/.cache/tandem")).expanduser()
    return f"sqlite:///{home / 'ledger.db'}"


@app.command("export")
def export(
    out: Annotated[str, typer.Option(help="A folder, or s3://, gs://, abfss://, az://...")],
    ledger: Ledger = None,
    full: Annotated[bool, typer.Option("--full", help="Rewrite every date.")] = False,
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Also rewrite the dates from this one on."),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=1, help="Export again every so many seconds, until stopped."),
    ] = None,
    lag_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="How old a row must be.",
            show_default="0 from SQLite, 120 from PostgreSQL",
        ),
    ] = None,
    grace_hours: Annotated[
        float, typer.Option(min=0, help="How long replaced files stay for running refreshes.")
    ] = 24,
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="How long to wait for another export of this target.")
    ] = 0,
    metrics_file: Annotated[
        Path | None, typer.Option(help="Write metrics in Prometheus' text format here.")
    ] = None,
) -> None:
    """Write the ledger's tables, all at once or not at all.

    Exit codes: 0 done, 3 another export is running, 4 the ledger cannot be read, 5 the target
    cannot be written, 6 the tables would differ from the ledger. After a failure the tables
    are those of the run before.
    """
    options = ExportOptions(
        full=full,
        since=_date(since),
        lag=None if lag_seconds is None else timedelta(seconds=lag_seconds),
        grace=timedelta(hours=grace_hours),
        wait_seconds=wait_seconds,
    )
    stopped = threading.Event()
    if watch is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
    while True:
        try:
            _export_once(ledger or default_ledger_url(), out, options, metrics_file)
        except ExportError as error:
            typer.secho(f"error: {error}", err=True, fg="red")
            if watch is None:
                raise typer.Exit(error.exit_code) from error
        if watch is None or stopped.wait(watch):
            return


def _export_once(ledger: str, out: str, options: ExportOptions, metrics_file: Path | None) -> None:
    console = Console()
    began_at = datetime.now(UTC)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("days, {task.fields[rows]:,} requests"),
        TimeElapsedColumn(),
    )
    error: ExportError | None = None
    summary: ExportSummary | None = None
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Exporting", total=None, rows=0)

        def show(reading: ExportProgress) -> None:
            bar.update(
                task,
                total=reading.num_days,
                completed=reading.num_days_done,
                rows=reading.num_rows_done,
            )

        try:
            summary = run_export(ledger, out, options, on_progress=show)
        except ExportError as failure:
            error = failure
    if metrics_file is not None:
        write_metrics(metrics_file, summary, error, began_at, datetime.now(UTC))
    if error is not None:
        raise error
    if summary is not None:
        _show(console, out, summary)


def _show(console: Console, out: str, summary: ExportSummary) -> None:
    table = Table("table", "rows")
    table.columns[1].justify = "right"
    for name, num_rows in summary.tables.items():
        table.add_row(name, f"{num_rows:,}")
    console.print(table)
    if summary.is_published:
        news = f"published generation {summary.generation}"
    else:
        news = f"nothing new since generation {summary.generation}"
    console.print(f"{out}: {news}, {len(summary.rewritten_dates)} dates rewritten", soft_wrap=True)
    for day in summary.protected_dates:
        console.print(f"{day} stays as published: the ledger was pruned", style="yellow")


def _date(moment: datetime | None) -> date | None:
    return None if moment is None else moment.date()
