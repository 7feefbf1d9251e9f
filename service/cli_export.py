"""`tandem export`: the ledger as Parquet tables for dashboards."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
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

from exports.delta import publish_delta
from exports.errors import ExportError, TargetError
from exports.focus import publish_focus
from exports.job import ExportOptions, ExportSummary, run_export
from exports.job import Progress as ExportProgress
from exports.manifest import read_manifest
from exports.metrics import write_metrics
from exports.sample.ledger import write_sample_ledger
from exports.sample.trace import read_traces
from exports.sample.traffic import BEGIN, NUM_DAYS
from exports.storage import Target

app = typer.Typer(help="Publish the ledger as Parquet tables.")


class Sample(StrEnum):
    """What sample traffic is drawn from."""

    AZURE = "azure"


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
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the dates, each with 200 MB.")
    ] = 2,
    metrics_file: Annotated[
        Path | None, typer.Option(help="Write metrics in Prometheus' text format here.")
    ] = None,
    delta: Annotated[
        str | None,
        typer.Option(help="Also keep Delta tables under this folder or URI."),
    ] = None,
    focus: Annotated[
        str | None,
        typer.Option(help="Also write a FOCUS 1.3 cost file per date under this folder or URI."),
    ] = None,
    focus_account: Annotated[
        str, typer.Option(help="Who runs the service, in the FOCUS files.")
    ] = "Tandem",
    sample: Annotated[
        Sample | None,
        typer.Option(help="Publish invented days of traffic instead of a ledger."),
    ] = None,
    sample_days: Annotated[
        int | None,
        typer.Option(
            min=1, max=NUM_DAYS, help="So many of the sample's days.", show_default=str(NUM_DAYS)
        ),
    ] = None,
    trace_folder: Annotated[
        Path,
        typer.Option(envvar="TANDEM_DATA", help="Where the traces of --sample lie."),
    ] = Path("../shared/data"),
) -> None:
    """Write the ledger's tables, all at once or not at all.

    Exit codes: 0 done, 3 another export is running, 4 the ledger cannot be read, 5 the target
    cannot be written, 6 the tables would differ from the ledger. After a failure the tables
    are those of the run before.
    """
    if sample is not None:
        _refuse_beside_sample(full=full, since=since, watch=watch, delta=delta, focus=focus)
        num_days = sample_days or NUM_DAYS
        raise typer.Exit(
            _exit_code(lambda: _export_sample(out, trace_folder, num_days, metrics_file))
        )
    if sample_days is not None:
        raise typer.BadParameter("needs --sample", param_hint="--sample-days")
    options = ExportOptions(
        full=full,
        since=_date(since),
        lag=None if lag_seconds is None else timedelta(seconds=lag_seconds),
        grace=timedelta(hours=grace_hours),
        wait_seconds=wait_seconds,
        num_workers=workers,
    )
    stopped = threading.Event()
    if watch is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
    while True:
        exit_code = _exit_code(
            lambda: _export_once(
                ledger or default_ledger_url(),
                out,
                options,
                metrics_file,
                delta,
                focus=None if focus is None else (focus, focus_account),
            )
        )
        if watch is None:
            raise typer.Exit(exit_code)
        if stopped.wait(watch):
            return


def _refuse_beside_sample(**options: object) -> None:
    """A sample is published once and whole: what asks for more is refused by name."""
    given = [f"--{name}" for name, value in options.items() if value not in (None, False)]
    if given:
        raise typer.BadParameter(f"cannot be used with {', '.join(given)}", param_hint="--sample")


def _exit_code(run: Callable[[], None]) -> int:
    try:
        run()
    except ExportError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return error.exit_code
    return 0


def _export_sample(out: str, trace_folder: Path, num_days: int, metrics_file: Path | None) -> None:
    if read_manifest(Target(out)).generation:
        raise TargetError(f"{out} holds an export already; a sample needs a place of its own")
    traces = read_traces(trace_folder)
    with tempfile.TemporaryDirectory(prefix="tandem-sample-") as folder:
        ledger = Path(folder) / "ledger.db"
        typer.echo(f"Writing {num_days} days of sample traffic...", err=True)
        write_sample_ledger(ledger, traces, num_days)
        end = BEGIN + timedelta(days=num_days + 1)
        _export_once(f"sqlite:///{ledger}", out, ExportOptions(), metrics_file, now=end)


def _export_once(
    ledger: str,
    out: str,
    options: ExportOptions,
    metrics_file: Path | None,
    delta: str | None = None,
    now: datetime | None = None,
    focus: tuple[str, str] | None = None,
) -> None:
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
            summary = run_export(ledger, out, options, now=now, on_progress=show)
            if delta is not None:
                target = Target(out)
                publish_delta(target, read_manifest(target), delta)
            if focus is not None:
                target = Target(out)
                publish_focus(target, read_manifest(target), summary.rewritten_dates, *focus)
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
