"""The export: ledger in, tables out, published all at once or not at all.

A run rewrites whole the UTC dates on which anything changed since the last one, so that late
rows and corrections land where they belong and a rerun makes the same files. Every date is
reconciled against the ledger before the manifest that shows it is written.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from exports.collect import collect_garbage, retire
from exports.compact import Compactor
from exports.data_file import DataFile
from exports.day_messages import Opening, RowsDone
from exports.day_pool import DayPool, FinishedDay
from exports.days import DayKind, DayTask, whole_table
from exports.dimension_tables import dimension_tables
from exports.dirty_days import dirty_request_days
from exports.errors import TargetError
from exports.extract import LedgerSource
from exports.facts import FACT_CAPACITY, FACT_EQUIVALENCE, FACT_RECONCILIATION, FACT_REQUEST
from exports.ledger_facts import DayTotals, Watermark
from exports.lock import exclusive
from exports.manifest import Manifest, read_manifest, write_manifest
from exports.reconcile import reconciliation_row
from exports.retention import record_watermark
from exports.schemas import FACTS, REQUEST_TABLES, TABLES
from exports.storage import Target, place
from exports.write import day_folder

Files = dict[str, list[DataFile]]

GRACE = timedelta(hours=24)
"""How long a file that is no longer used stays for readers that began before."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export.

    full: rewrite every date that the ledger holds. since: also rewrite the dates from here on.
    lag: how old a row must be; None takes the ledger's default (LedgerSource.default_lag).
    grace: how long files that are no longer used stay. wait_seconds: how long to wait for
    another export of the same target. num_workers: processes that share the dates, each with
    its own connection and some 200 MB of memory.
    """

    full: bool = False
    since: date | None = None
    lag: timedelta | None = None
    grace: timedelta = GRACE
    wait_seconds: float = 0.0
    num_workers: int = 2


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
            with _Run(source, target, staging, options, now, on_progress) as run:
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
        self._staging = staging
        self._compactor = Compactor(target, staging)
        superseded = source.superseded_ids(self._watermark.ledger_id)
        opening = Opening(source.database, staging, tuple(superseded))
        self._pool = DayPool(opening, self._totals, options.num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, traceback)

    @property
    def last_ledger_id(self) -> int:
        return self._watermark.ledger_id

    def publish(self) -> ExportSummary:
        after = Watermark() if self._options.full else self._before.watermark
        until = self._watermark
        if until != after:
            self._pool.start(until.ledger_id - after.ledger_id)
        request_days, protected = dirty_request_days(
            self._source,
            self._before.day_rows(FACT_REQUEST.name),
            (after.ledger_id, until.ledger_id),
            self._options.since,
            self._now,
        )
        capacity_days = self._source.capacity_dates(after.capacity_id, until.capacity_id)
        audit_days = self._source.audit_dates(after.audit_id, until.audit_id)
        self._num_days = len(request_days) + len(capacity_days) + len(audit_days)

        tables = dict(self._before.tables)
        for kind, days, facts in (
            (DayKind.REQUESTS, request_days, REQUEST_TABLES),
            (DayKind.CAPACITY, capacity_days, (FACT_CAPACITY,)),
            (DayKind.EQUIVALENCE, audit_days, (FACT_EQUIVALENCE,)),
        ):
            for fact in facts:
                files = tables.get(fact.name, ())
                tables[fact.name] = self._compactor.split(fact, files, days)
            self._write(kind, sorted(days), tables)
        self._pool.close()
        last = max(_days(tables), default=self._now.date())
        for fact in FACTS:
            tables[fact.name] = self._compactor.merged(fact, tables[fact.name], last)
        for table, rows in dimension_tables(self._source, _days(tables), self._now.date()):
            staged = whole_table(self._staging, table, "", rows)
            tables[table.name] = tuple(place(self._target, staged))

        rewritten = tuple(sorted(request_days | capacity_days | audit_days))
        manifest, is_published = self._before, False
        if tables != self._before.tables or until != self._before.watermark:
            manifest = replace(
                retire(self._before, tables, self._now),
                generation=self._before.generation + 1,
                published_at=self._now,
                recorded_until=self._recorded_until,
                watermark=until,
                changed_dates=rewritten,
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

    def _write(
        self, kind: DayKind, days: list[date], tables: dict[str, tuple[DataFile, ...]]
    ) -> None:
        for event in self._pool.write([self._task(kind, day) for day in days]):
            if isinstance(event, RowsDone):
                self._num_rows += event.num_rows
            else:
                _replace_day(tables, event.task.day, self._placed(event))
                self._num_days_done += 1
            self._report()

    def _task(self, kind: DayKind, day: date) -> DayTask:
        source, until = self._source, self._watermark
        if kind is DayKind.CAPACITY:
            return DayTask(kind, day, source.capacity_rows(day, until.capacity_id))
        if kind is DayKind.EQUIVALENCE:
            return DayTask(kind, day, source.audit_rows(day, until.audit_id))
        rows = source.request_rows(day, until.ledger_id)
        return DayTask(kind, day, rows, source.acceptance_rows(day, until.ledger_id))

    def _totals(self, task: DayTask) -> DayTotals:
        if task.kind is not DayKind.REQUESTS:
            return DayTotals()
        return self._source.day_totals(task.day, self._watermark.ledger_id)

    def _placed(self, finished: FinishedDay) -> Files:
        """The date's files in their places, once they agree with the ledger."""
        staged = dict(finished.written.files)
        if finished.task.kind is DayKind.REQUESTS:
            row, folder = reconciliation_row(finished), day_folder(finished.task.day)
            table = FACT_RECONCILIATION
            staged[table.name] = whole_table(self._staging, table, folder, row)
        return {name: place(self._target, files) for name, files in staged.items()}

    def _publish(self, manifest: Manifest) -> None:
        # An object store has no lock across machines; a second writer shows itself here.
        found = read_manifest(self._target).generation
        if found != self._before.generation:
            raise TargetError(
                f"another export published generation {found} meanwhile; nothing was changed"
            )
        write_manifest(self._target, manifest)

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self._num_days_done, self._num_days, self._num_rows))


def _days(tables: dict[str, tuple[DataFile, ...]]) -> list[date]:
    return [day for fact in FACTS for file in tables[fact.name] for day in file.days]


def _replace_day(tables: dict[str, tuple[DataFile, ...]], day: date, files: Files) -> None:
    for name, new in files.items():
        others: Iterable[DataFile] = (f for f in tables[name] if day not in f.days)
        tables[name] = tuple(sorted([*others, *new], key=lambda file: file.path))
