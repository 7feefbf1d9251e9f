"""What traffic asks of ledger and export, and which of them gives first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class ExportSchedule:
    """How often the export runs, and how long a run may take."""

    period_seconds: float
    deadline_seconds: float


def read_schedule(path: Path) -> ExportSchedule:
    """Of a CronJob that runs every so many minutes. Raises ValueError for another schedule."""
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    minutes, *others = spec["schedule"].split()
    if not minutes.startswith("*/") or others != ["*"] * 4:
        raise ValueError(f"{path}: schedule {spec['schedule']!r} is not */MINUTES * * * *")
    deadline = spec["jobTemplate"]["spec"]["activeDeadlineSeconds"]
    return ExportSchedule(60.0 * int(minutes[2:]), float(deadline))


def demands(
    rate: float, ledger: dict[str, Any], exports: dict[str, Any], schedule: ExportSchedule
) -> dict[str, dict[str, float]]:
    """Of so many requests per second.

    Every run of the export writes the current date anew, from its first row on: the last run of a
    day takes as long as the day has rows, and all of its runs together half as long as if each
    were the last.
    """
    per_day = rate * DAY_SECONDS
    last_run_seconds = per_day / exports["rows_per_cpu_second"]
    num_runs = DAY_SECONDS / schedule.period_seconds
    return {
        "ledger": {
            "rows_per_second": round(rate, 1),
            "share_of_sqlite": round(rate / ledger["sqlite_rows_per_second"], 4),
            "share_of_postgresql": round(rate / ledger["postgresql_rows_per_second"], 4),
        },
        "exports": {
            "million_rows_per_day": round(per_day / 1e6, 2),
            "last_run_seconds": round(last_run_seconds),
            "cores": round(last_run_seconds * (num_runs + 1) / 2 / DAY_SECONDS, 4),
            "gigabytes_per_day": round(per_day * exports["bytes_per_row"] / 1e9, 2),
        },
    }


def first_to_give(
    fleet_rate: float, ledger: dict[str, Any], exports: dict[str, Any], schedule: ExportSchedule
) -> dict[str, float]:
    """Requests per second at which each thing gives, in the order in which traffic meets them.

    fleet_rate: what one fleet of the most replicas takes.
    """
    rows_per_second = exports["rows_per_cpu_second"] / DAY_SECONDS
    limits = {
        "replicas of a fleet": fleet_rate,
        "period of the export": schedule.period_seconds * rows_per_second,
        "deadline of the export": schedule.deadline_seconds * rows_per_second,
        "half of PostgreSQL": ledger["postgresql_rows_per_second"] / 2,
    }
    return dict(sorted(limits.items(), key=lambda item: item[1]))
