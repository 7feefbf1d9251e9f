"""Metrics of an export in Prometheus' text format, for node-exporter's textfile collector."""

import os
from datetime import datetime
from pathlib import Path

from exports.errors import ExportError, TargetError
from exports.job import ExportSummary


def write_metrics(
    path: Path,
    summary: ExportSummary | None,
    error: ExportError | None,
    began_at: datetime,
    ended_at: datetime,
) -> None:
    """Replace the file. After a failure it holds the outcome and the times, and no counts.

    Raises TargetError when it cannot be written.
    """
    text = metrics_text(summary, error, began_at, ended_at)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.new")
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, path)
    except OSError as failure:
        raise TargetError(f"cannot write {path}: {failure}") from failure


def metrics_text(
    summary: ExportSummary | None,
    error: ExportError | None,
    began_at: datetime,
    ended_at: datetime,
) -> str:
    """The lines of a run, each metric with its help and type."""
    lines: list[str] = []

    def gauge(name: str, meaning: str, *values: tuple[str, float]) -> None:
        lines.extend([f"# HELP {name} {meaning}", f"# TYPE {name} gauge"])
        lines.extend(f"{name}{labels} {value!r}" for labels, value in values)

    exit_code = 0 if error is None else error.exit_code
    gauge("tandem_export_exit_code", "0 after a successful run.", ("", exit_code))
    gauge(
        "tandem_export_duration_seconds",
        "Duration of the last run.",
        ("", (ended_at - began_at).total_seconds()),
    )
    gauge("tandem_export_end_timestamp_seconds", "When it ended.", ("", ended_at.timestamp()))
    if summary is not None:
        gauge(
            "tandem_export_table_rows",
            "Rows published.",
            *((f'{{table="{name}"}}', rows) for name, rows in summary.tables.items()),
        )
        gauge("tandem_export_generation", "Versions published.", ("", summary.generation))
        gauge("tandem_export_request_rows", "Rows read.", ("", summary.num_request_rows))
        gauge("tandem_export_rewritten_dates", "Dates.", ("", len(summary.rewritten_dates)))
        gauge(
            "tandem_export_protected_dates",
            "Changed dates left as published because the ledger was pruned.",
            ("", len(summary.protected_dates)),
        )
        gauge(
            "tandem_export_covered_timestamp_seconds",
            "Ledger rows recorded up to here are published.",
            ("", summary.recorded_until.timestamp()),
        )
    return "\n".join(lines) + "\n"
