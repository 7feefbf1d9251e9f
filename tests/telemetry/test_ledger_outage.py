"""The database is away for an hour of simulated time, under load: nothing is lost or doubled."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from telemetry.ledger import models
from telemetry.ledger.journal import Journal
from telemetry.ledger.records import Record
from telemetry.ledger.session import open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.ledger.writer import LedgerWriter
from tests.telemetry.ledger_records import request_record, start_record
from tests.telemetry.test_ledger_writer import count, rows_of

HOUR = 3600.0
TICK = 30.0  # seconds of simulated time between bursts of load
BURST = 8  # requests


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 1000.0

    def __call__(self) -> float:
        with self._lock:
            return self._seconds

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds


class FlakyStore(LedgerStore):
    """A database that can be away, and whose answers can be lost after the commit."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.is_away = False
        self.num_refusals = 0
        self.num_answers_to_lose = 0

    def require_answer(self) -> None:
        if self.is_away:
            self.num_refusals += 1
            raise OperationalError("SELECT", None, ConnectionError("the database is away"))

    def write(self, records: Sequence[Record], *, may_exist: bool) -> None:
        self.require_answer()
        super().write(records, may_exist=may_exist)
        if self.num_answers_to_lose:
            self.num_answers_to_lose -= 1
            raise OperationalError("COMMIT", None, ConnectionError("no answer"))


class Outage:
    """A writer under steady load, on a clock of its own."""

    def __init__(self, url: str, folder: Path, max_bytes: int) -> None:
        self.clock = Clock()
        self.engine = open_ledger(url)
        self.store = FlakyStore(self.engine)
        self.journal = Journal(folder, max_bytes=max_bytes)
        self.writer = LedgerWriter(self.store, self.journal, now=self.clock)
        self.submitted: list[str] = []
        self.open: list[str] = []  # started and not finished

    def burst(self) -> "list[Future[bool]]":
        """A tick of load; one request of it stays open."""
        futures = []
        for number in range(BURST):
            record = request_record(f"r{len(self.submitted) + len(self.open)}")
            self.writer.post(start_record(record))
            if number:
                self.submitted.append(record.record_id)
                futures.append(self.writer.submit(record))
            else:
                self.open.append(record.record_id)
        self.clock.advance(TICK)
        return futures

    def close(self) -> None:
        self.writer.close()
        self.engine.dispose()


def test_an_hour_without_a_database_is_journalled_and_replayed_once(
    ledger_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outage = Outage(ledger_url, tmp_path / "j", max_bytes=1 << 30)
    assert all(future.result(20) for future in outage.burst())
    outage.store.is_away = True
    for _ in range(int(HOUR / TICK)):
        assert all(future.result(20) for future in outage.burst())  # durable all the while
    status = outage.writer.status()
    assert status.is_database_away
    assert status.lag_seconds >= HOUR - 2 * TICK
    assert status.num_lost == 0
    assert status.journal_bytes > 400_000
    assert 50 < outage.store.num_refusals <= 140  # waits grow up to half a minute
    outage.store.num_answers_to_lose = 2  # the replay is interrupted where nobody knows how far
    outage.store.is_away = False
    for _ in range(10):
        assert all(future.result(60) for future in outage.burst())
        outage.clock.advance(30.0)
    outage.writer.post(request_record("last"))
    assert outage.writer.wait_until_written(60)
    status = outage.writer.status()
    assert (status.num_lost, status.num_set_aside, status.journal_bytes) == (0, 0, 0)
    assert status.lag_seconds == 0
    outage.close()
    written = [row.record_id for row in rows_of(ledger_url, models.Request)]
    assert len(written) == len(set(written)) == len(outage.submitted) + 1
    assert set(outage.submitted) < set(written)
    still_open = {row.record_id for row in rows_of(ledger_url, models.RequestStart)}
    assert still_open == set(outage.open)
    assert count(ledger_url, models.RequestAcceptance) == 2 * len(written)
    assert any("database is back" in record.message for record in caplog.records)


def test_a_journal_that_fills_warns_before_anything_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outage = Outage(f"sqlite:///{tmp_path}/never/l.db", tmp_path / "j", max_bytes=300_000)
    durable = [future.result(20) for _ in range(50) for future in outage.burst()]
    status = outage.writer.status()
    assert status.num_lost > durable.count(False) > 0  # starts are counted as well
    assert status.journal_bytes <= 300_000
    alarms = [r.message for r in caplog.records if r.levelno == logging.CRITICAL]
    assert "nearly full" in alarms[0]
    assert sum("nearly full" in alarm for alarm in alarms) == 1
    assert all("records lost" in alarm for alarm in alarms[1:])
    assert all(durable[:50])
    outage.close()
