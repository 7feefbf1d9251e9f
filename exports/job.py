"""The export: ledger in, tables out, published all at once or not at all.

A run rewrites whole the UTC dates on which anything changed since the last one, so that late
rows and corrections land where they belong and a rerun makes the same files. Every date is
reconciled against the ledger before the manifest that shows it is written.
"""

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from exports.collect import collect_garbage, retire
from exports.compact import Compactor
from exports.days import DayWriter, Files
from exports.dimensions import (
    LEDGER_COLUMNS,
    dim_date,
    dim_outcome,
    dim_time_band,
    ledger_dimension,
)
from exports.errors import TargetError
from exports.extract import LedgerSource, Watermark
from exports.facts import FACT_CAPACITY, FACT_EQUIVALENCE, FACT_REQUEST
from exports.lock import exclusive
from exports.manifest import DataFile, Manifest, read_manifest, write_manifest
from exports.retention import record_watermark
from exports.schemas import (
    DIM_DATE,
    DIM_DRAFTER,
    DIM_MODEL,
    DIM_OUTCOME,
    DIM_PRICE,
    DIM_TENANT,
    DIM_TIME_BAND,
    DIM_VARIANT,
    FACTS,
    REQUEST_TABLES,
    TABLES,
)
from exports.storage import Target
from telemetry.ledger.models import Drafter, Model, Price, Tenant, Variant

logger = logging.getLogger(__name__)

GRACE = timedelta(hours=24)
"""How long a file that is no longer used stays for readers that began before."""

RECOUNTED = timedelta(days=3)
"""Recent dates are counted again, to find rows that were committed later than the lag allowed."""

_LEDGER_DIMENSIONS: tuple[tuple[Any, type[Any]], ...] = (
    (DIM_MODEL, Model),
    (DIM_DRAFTER, Drafter),
    (DIM_VARIANT, Variant),
    (DIM_TENANT, Tenant),
    (DIM_PRICE, Price),
)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export.

    full: rewrite every date that the ledger holds. since: also rewrite the dates from here on.
    lag: how old a row must be; None takes the ledger's default (LedgerSource.default_lag).
    grace: how long files that are no longer used stay. wait_seconds: how long to wait for
    another export of the same target.
    """

    full: bool = False
    since: date | None = None
    lag: timedelta | None = None
    grace: timedelta = GRACE
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A momentary reading: dates and request rows done, of the totals known so far."""

    num_days_done: int
    num_days: int
    num_rows_done: int


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What a run published.

    tables: rows of every table now. rewritten_dates: dates that this run wrote anew.
    protected_dates: dates left as published because the ledger holds fewer rows of them now
    (they were pruned); late rows of such a date are not exported.
    is_published is False when nothing had changed.
    """

    tables: dict[str, int]
    generation: int
    is_published: bool
    rewritten_dates: tuple[date, ...]
    protected_dates: tuple[date, ...]
    num_request_rows: int
    num_deleted_files: int
    recorded_until: datetime


def run_export(
    ledger_url: str,
    out: str | Path,
    options: ExportOptions | None = None,
    *,
    now: datetime | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ExportSummary:
    """Export a ledger to a folder or the URI of an object store.

    Raises LockedError, SourceError, TargetError or ReconciliationError (exports.errors); then
    what was published before is still there, whole.
    """
    options = options or ExportOptions()
    now = now or datetime.now(UTC)
    target = Target(out)
    with exclusive(target, options.wait_seconds), LedgerSource(ledger_url) as source:
        staging = target.staging_folder()
        try:
            run = _Run(source, target, staging, options, now, on_progress)
            summary = run.publish()
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if summary.is_published:
            record_watermark(ledger_url, target.location, run.last_ledger_id, now)
        return summary


class _Run:
    def __init__(
        self,
        source: LedgerSource,
        target: Target,
        staging: Path,
        options: ExportOptions,
        now: datetime,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source = source
        self._target = target
        self._options = options
        self._now = now
        self._on_progress = on_progress
        self._num_rows = self._num_days = self._num_days_done = 0
        lag = source.default_lag() if options.lag is None else options.lag
        self._recorded_until = now - lag
        self._before = read_manifest(target)
        self._watermark = source.watermark(self._recorded_until)
        self._compactor = Compactor(target, staging)
        self._writer = DayWriter(
            source,
            target,
            staging,
            self._watermark,
            np.array(source.superseded_ids(self._watermark.ledger_id), dtype=np.int64),
            self._count_rows,
        )

    @property
    def last_ledger_id(self) -> int:
        return self._watermark.ledger_id

    def publish(self) -> ExportSummary:
        after = Watermark() if self._options.full else self._before.watermark
        until = self._watermark
        if after.ledger_id < until.ledger_id:
            self._source.start_reading()
        request_days, protected = self._request_days(after)
        capacity_days = self._source.capacity_dates(after.capacity_id, until.capacity_id)
        audit_days = self._source.audit_dates(after.audit_id, until.audit_id)
        self._num_days = len(request_days) + len(capacity_days) + len(audit_days)

        tables = dict(self._before.tables)
        for days, facts, write in (
            (request_days, REQUEST_TABLES, self._writer.request_tables),
            (capacity_days, (FACT_CAPACITY,), self._writer.capacity_table),
            (audit_days, (FACT_EQUIVALENCE,), self._writer.equivalence_table),
        ):
            for fact in facts:
                files = tables.get(fact.name, ())
                tables[fact.name] = self._compactor.split(fact, files, days)
            for day in sorted(days):
                _replace_day(tables, day, write(day))
                self._num_days_done += 1
                self._report()
        last = max(_days(tables), default=self._now.date())
        for fact in FACTS:
            tables[fact.name] = self._compactor.merged(fact, tables[fact.name], last)
        for name, rewritten_files in self._dimensions(tables).items():
            tables[name] = tuple(rewritten_files)

        rewritten = tuple(sorted(request_days | capacity_days | audit_days))
        manifest, is_published = self._before, False
        if tables != self._before.tables or until != self._before.watermark:
            manifest = replace(
                retire(self._before, tables, self._now),
                generation=self._before.generation + 1,
                published_at=self._now,
                recorded_until=self._recorded_until,
                watermark=until,
            )
            self._publish(manifest)
            is_published = True
        manifest, num_deleted = collect_garbage(
            self._target, manifest, self._now, self._options.grace
        )
        return ExportSummary(
            tables={name: manifest.num_rows(name) for name in TABLES},
            generation=manifest.generation,
            is_published=is_published,
            rewritten_dates=rewritten,
            protected_dates=tuple(sorted(protected)),
            num_request_rows=self._num_rows,
            num_deleted_files=num_deleted,
            recorded_until=self._recorded_until,
        )

    def _publish(self, manifest: Manifest) -> None:
        # An object store has no lock across machines; a second writer shows itself here.
        found = read_manifest(self._target).generation
        if found != self._before.generation:
            raise TargetError(
                f"another export published generation {found} meanwhile; nothing was changed"
            )
        write_manifest(self._target, manifest)

    def _request_days(self, after: Watermark) -> tuple[set[date], set[date]]:
        until = self._watermark.ledger_id
        published = self._before.day_rows(FACT_REQUEST.name)
        days = self._source.request_dates(after.ledger_id, until)
        recent = (self._now - RECOUNTED).date()
        counted_from = min([recent, *days, *filter(None, [self._options.since])])
        counts = self._source.day_counts(counted_from, until)
        for day, count in counts.items():
            is_late = day >= recent and count > published.get(day, 0)
            is_wanted = self._options.since is not None and day >= self._options.since
            if is_late or is_wanted:
                days.add(day)
        protected = set()
        for day in sorted(days):
            if counts.get(day, 0) >= published.get(day, 0):
                continue
            # A correction may move a request to another date, pruning takes its row away.
            totals = self._source.day_totals(day, until)
            if totals.num_requests + totals.num_superseded < published[day]:
                protected.add(day)
                logger.warning(
                    "%s stays as published: the ledger holds %d requests of it, the export %d",
                    day,
                    totals.num_requests,
                    published[day],
                )
        return days - protected, protected

    def _dimensions(self, tables: dict[str, tuple[DataFile, ...]]) -> Files:
        days = _days(tables)
        today = self._now.date()
        rows: list[tuple[Any, pa.Table]] = [
            (DIM_DATE, dim_date(min(days, default=today), max(days, default=today))),
            (DIM_TIME_BAND, dim_time_band()),
            (DIM_OUTCOME, dim_outcome()),
        ]
        for table, model in _LEDGER_DIMENSIONS:
            members = self._source.dimension_rows(model, LEDGER_COLUMNS[table.name])
            rows.append((table, ledger_dimension(table, members)))
        files: Files = {}
        for table, content in rows:
            files |= self._writer.dimension(table, content)
        return files

    def _count_rows(self, num_rows: int) -> None:
        self._num_rows += num_rows
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self._num_days_done, self._num_days, self._num_rows))


def _days(tables: dict[str, tuple[DataFile, ...]]) -> list[date]:
    return [day for fact in FACTS for file in tables[fact.name] for day in file.days]


def _replace_day(tables: dict[str, tuple[DataFile, ...]], day: date, files: Files) -> None:
    for name, new in files.items():
        others: Iterable[DataFile] = (f for f in tables[name] if day not in f.days)
        tables[name] = tuple(sorted([*others, *new], key=lambda file: file.path))
