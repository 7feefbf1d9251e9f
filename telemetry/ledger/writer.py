"""The ledger's writer: takes records from anywhere, loses none, never holds anyone up.

One thread writes. While the database answers, batches go straight there; when it does not, they
go to the local journal (fsync) and are replayed in order once it is back. A record is durable
when its batch is committed or fsynced. What the database refuses as data is set aside in a file
beside the journal, with an alarm, so that one bad record never stops the others.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from telemetry.ledger.journal import Journal, JournalFullError
from telemetry.ledger.records import Record, RequestRecord, encode_record
from telemetry.ledger.store import LedgerStore, is_connection_failure
from telemetry.ledger.writer_status import WriterConfig, WriterStatus

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    record: Record
    submitted_at: float
    durable: "Future[bool] | None" = None

    def settle(self, is_durable: bool) -> None:
        if self.durable is not None:
            self.durable.set_result(is_durable)


@dataclass(slots=True)
class _Totals:
    written: int = 0
    requests_written: int = 0
    spilled: int = 0
    set_aside: int = 0
    lost: int = 0


class LedgerWriter:
    """Owns the journal and the thread that writes. Every public method is thread-safe.

    prepare runs on the writer's thread once the database answers for the first time and the
    journal of an earlier process has been replayed, before anything else is written: migrations
    and the closing of orphans belong there. It may raise SQLAlchemyError and is then repeated.
    """

    def __init__(
        self,
        store: LedgerStore,
        journal: Journal,
        config: WriterConfig | None = None,
        *,
        migrate: Callable[[], None] | None = None,
        prepare: Callable[[], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._store = store
        self._journal = journal
        self._config = config or WriterConfig()
        self._migrate = migrate
        self._prepare = prepare
        self._queue: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._closing_try_done = False
        self._hurry_at = math.inf  # from then on the disk, which is quick, instead of the database
        self._totals = _Totals()
        self._retry_at = 0.0
        self._retry_wait = self._config.first_retry_seconds
        self._away = False
        self._has_warned = False  # that the journal is nearly full
        self._journal_since = None if journal.is_empty else self._now()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> "Future[bool]":
        """Queue a record. The future gives True once it is durable, False when it is lost."""
        durable: Future[bool] = Future()
        self._queue_up(_Entry(record, self._now(), durable))
        return durable

    def post(self, record: Record) -> None:
        """Queue a record for whose durability nobody waits; the same otherwise, and cheaper."""
        self._queue_up(_Entry(record, self._now()))

    def _queue_up(self, entry: _Entry) -> None:
        with self._changed:
            if not self._closing and len(self._queue) < self._config.max_queued_records:
                self._queue.append(entry)
                self._changed.notify()
                return
            self._totals.lost += 1
        _log.critical("ledger record lost: the writer is closed or its queue is full")
        entry.settle(False)

    def status(self) -> WriterStatus:
        """Cheap; for gauges."""
        with self._changed:
            oldest = [entry.submitted_at for entry in list(self._queue)[:1]]
            if self._journal_since is not None:
                oldest.append(self._journal_since)
            return WriterStatus(
                num_queued=len(self._queue),
                num_written=self._totals.written,
                num_requests_written=self._totals.requests_written,
                num_spilled=self._totals.spilled,
                num_set_aside=self._totals.set_aside,
                num_lost=self._totals.lost,
                journal_bytes=self._journal.num_bytes,
                lag_seconds=max(0.0, self._now() - min(oldest)) if oldest else 0.0,
                is_database_away=self._away,
            )

    def wait_until_written(self, timeout_seconds: float) -> bool:
        """Whether everything submitted so far reached the database within the time."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._queue or self._journal_since is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.05))
        return True

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Make everything durable, stop the thread, release the journal.

        What the database does not take in time stays in the journal for the next start.
        """
        with self._changed:
            self._closing = True
            self._hurry_at = self._now() + timeout_seconds / 2
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _log.critical("the ledger's writer hangs; its journal stays locked until the end")
        else:
            self._journal.close()

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            try:
                self._handle(batch)
            except Exception:
                hidden = {"hides_messages": True}
                _log.critical("ledger batch lost", exc_info=True, extra=hidden)
                if batch and self._queue and self._queue[0] is batch[0]:
                    with self._changed:
                        self._totals.lost += len(batch)
                    self._settle(batch, durable=False)

    def _next_batch(self) -> list[_Entry] | None:
        """Wait for work: records, or a due replay (then an empty list). None: closed and done.

        Entries stay in the queue until they are settled, so that the lag and
        wait_until_written never overlook a batch in flight.
        """
        with self._changed:
            while not self._queue:
                if self._closing:
                    if not self._is_behind() or self._closing_try_done:
                        return None
                    self._closing_try_done = True
                    return []
                wait: float | None = None
                if self._is_behind():
                    wait = self._retry_at - self._now()
                    if wait <= 0:
                        return []
                self._changed.wait(wait)
            return [
                self._queue[i] for i in range(min(len(self._queue), self._config.max_batch_records))
            ]

    def _is_behind(self) -> bool:
        return self._journal_since is not None or self._prepare is not None

    def _handle(self, batch: list[_Entry]) -> None:
        records = [entry.record for entry in batch]
        if self._is_behind():
            # Order first: what comes after journalled records waits behind them, on disk.
            if batch:
                self._settle(batch, durable=self._spill(records))
            if self._retry_at <= self._now() < self._hurry_at:
                self._catch_up()
        elif self._now() < self._hurry_at and self._try_write(records, may_exist=False):
            self._settle(batch, durable=True)
        else:
            self._settle(batch, durable=self._spill(records))

    def _catch_up(self) -> None:
        """Migrate, replay and prepare; stops between segments when new records wait."""
        try:
            if self._migrate is not None:
                self._migrate()  # makes what is missing
                self._migrate = None
            self._store.require_answer()  # before a segment is read for nothing
            segments = self._journal.segments()
            while segments:
                self._replay_segment(segments[0])
                segments = self._journal.segments()
                with self._changed:
                    if self._queue and segments:
                        return
            self._run_prepare()
        except Exception as error:  # a migration may fail in its own ways; all are tried again
            self._database_failed(error)

    def _run_prepare(self) -> None:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        with self._changed:
            self._journal_since = None
            self._changed.notify_all()
        self._database_answered()

    def _replay_segment(self, segment: Path) -> None:
        content = self._journal.read(segment)
        if content.damaged_lines:
            path = self._journal.set_aside(content.damaged_lines, "damaged")
            self._count_aside(len(content.damaged_lines), f"damaged journal lines, kept in {path}")
        size = self._config.max_batch_records
        for start in range(0, len(content.records), size):
            part = content.records[start : start + size]
            if not self._try_write(part, may_exist=True):
                raise _StillAwayError
        self._journal.remove(segment)

    def _try_write(self, records: Sequence[Record], *, may_exist: bool) -> bool:
        """Whether the records are in the database, or set aside because it refuses them."""
        try:
            self._store.write(records, may_exist=may_exist)
        except DBAPIError as error:
            if is_connection_failure(error):
                self._database_failed(error)
                return False
            return self._write_apart(records, error)
        except SQLAlchemyError as error:
            self._database_failed(error)
            return False
        except Exception as error:
            return self._write_apart(records, error)
        self._database_answered()
        with self._changed:
            self._totals.written += len(records)
            self._totals.requests_written += sum(
                isinstance(record, RequestRecord) for record in records
            )
        return True

    def _write_apart(self, records: Sequence[Record], error: Exception) -> bool:
        """Halve a batch that the database refuses until the bad record stands alone."""
        if len(records) > 1:
            middle = len(records) // 2
            first = self._try_write(records[:middle], may_exist=True)
            return self._try_write(records[middle:], may_exist=True) and first
        path = self._journal.set_aside([encode_record(records[0])], "refused")
        self._count_aside(
            1, f"a record that the database refuses, kept in {path}: {_reason(error)}"
        )
        return True

    def _spill(self, records: Sequence[Record]) -> bool:
        try:
            self._journal.append(records)
        except (JournalFullError, OSError) as error:
            with self._changed:
                self._totals.lost += len(records)
            _log.critical("%d ledger records lost: %s", len(records), error)
            return False
        if self._journal.is_nearly_full and not self._has_warned:
            self._has_warned = True
            _log.critical(
                "the ledger's journal is nearly full (%d bytes); once it is full, records are "
                "lost: bring the database back or raise the cap",
                self._journal.num_bytes,
            )
        with self._changed:
            self._totals.spilled += len(records)
            if self._journal_since is None:
                self._journal_since = self._now()
        return True

    def _settle(self, batch: list[_Entry], *, durable: bool) -> None:
        with self._changed:
            for _ in batch:
                self._queue.popleft()
            self._changed.notify_all()
        for entry in batch:
            entry.settle(durable)

    def _database_failed(self, error: Exception) -> None:
        if not self._away and not isinstance(error, _StillAwayError):
            _log.error(
                "the ledger's database is away, records go to the journal: %s", _reason(error)
            )
        self._away = True
        self._retry_at = self._now() + self._retry_wait
        self._retry_wait = min(self._retry_wait * 2, self._config.last_retry_seconds)

    def _database_answered(self) -> None:
        if self._away:
            _log.warning("the ledger's database is back")
        self._away = self._has_warned = False
        self._retry_at = 0.0
        self._retry_wait = self._config.first_retry_seconds

    def _count_aside(self, count: int, what: str) -> None:
        with self._changed:
            self._totals.set_aside += count
        _log.critical("the ledger set aside %s", what)


def _reason(error: Exception) -> str:
    """What went wrong, for the log: a database's further lines quote the row."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


class _StillAwayError(SQLAlchemyError):
    """The database went away in the middle of a replay; the failure has been noted."""
