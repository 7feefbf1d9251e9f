"""Kills a process that writes the ledger, again and again, and counts what is lost.

    python -m tests.telemetry.killed_writer URL JOURNAL_FOLDER NUM_KILLS SEED

Each round forks a writer that files requests as fast as it can over a database that fails at
random, before and after committing, and reports every record that it was told is durable. The
parent kills it with SIGKILL at a random moment. Afterwards one writer starts undisturbed. The
result is one line of JSON: kills, acknowledged, rows, lost, duplicated, orphaned, left_open.
"""

import json
import logging
import os
import random
import select as select_module
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from telemetry.ledger.dimensions import table_of
from telemetry.ledger.journal import Journal
from telemetry.ledger.models import Request, RequestStart
from telemetry.ledger.records import InstanceRecord, Record
from telemetry.ledger.recovery import close_orphans
from telemetry.ledger.session import open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.ledger.writer import LedgerWriter
from telemetry.ledger.writer_status import WriterConfig
from tests.telemetry.ledger_records import request_record, start_record

ID_BYTES = 32
_IN_FLIGHT = 200


class FlakyStore(LedgerStore):
    """Fails at random: before the commit, or after it with the answer lost."""

    random = random.Random()
    failure_share = 0.1

    def write(self, records: Sequence[Record], *, may_exist: bool) -> None:
        chance = self.random.random()
        if chance < self.failure_share / 2:
            raise OperationalError("the database went away", None, RuntimeError())
        super().write(records, may_exist=may_exist)
        if chance < self.failure_share:
            raise OperationalError("the answer was lost", None, RuntimeError())


def open_writer(url: str, folder: Path, store_type: type[LedgerStore], name: str) -> LedgerWriter:
    """A writer as a server opens it: it closes the orphans of the one before."""
    engine = open_ledger(url)
    store = store_type(engine)
    journal = Journal(folder)
    writer = LedgerWriter(
        store,
        journal,
        WriterConfig(first_retry_seconds=0.005, last_retry_seconds=0.01, max_batch_records=100),
        prepare=lambda: void(close_orphans(engine, store, node=journal.node, instance_id=name)),
    )
    now = datetime.now(UTC)
    writer.submit(InstanceRecord(name, journal.node, "host", "0", now, now))
    return writer


def void(_: object) -> None:
    """Drop a result."""


def write_until_killed(url: str, folder: Path, report: int, round_: int, seed: int) -> None:
    FlakyStore.random = random.Random(seed)
    name = f"instance-{round_}"
    writer = open_writer(url, folder, FlakyStore, name)
    waiting: deque[tuple[str, Future[bool]]] = deque()
    for number in range(10**9):
        record = request_record(f"r{round_}-{number}", instance_id=name)
        writer.submit(start_record(record))
        waiting.append((record.record_id, writer.submit(record)))
        while waiting and (waiting[0][1].done() or len(waiting) > _IN_FLIGHT):
            record_id, durable = waiting.popleft()
            if durable.result():
                os.write(report, record_id.encode())


def run(url: str, folder: Path, num_kills: int, seed: int) -> dict[str, int]:
    """The whole experiment; this process must have no threads."""
    random_ = random.Random(seed)
    acknowledged: list[str] = []
    for round_ in range(num_kills):
        reading, report = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                write_until_killed(url, folder, report, round_, seed + round_)
            finally:
                os._exit(1)
        os.close(report)
        acknowledged += _read_and_kill(child, reading, random_.uniform(0.005, 0.12))
    writer = open_writer(url, folder, LedgerStore, "last")
    deadline = time.monotonic() + 60
    while not writer.wait_until_written(1) and time.monotonic() < deadline:
        pass
    writer.close()
    return {"kills": num_kills, **_count(url, acknowledged)}


def _read_and_kill(child: int, reading: int, seconds: float) -> list[str]:
    """Let the child live for `seconds` after its first report; what it reported."""
    data = os.read(reading, 1 << 20)
    kill_at = time.monotonic() + seconds
    while (left := kill_at - time.monotonic()) > 0:
        if select_module.select([reading], [], [], left)[0]:
            data += os.read(reading, 1 << 20)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the writer ended before it was killed")
    while chunk := os.read(reading, 1 << 20):
        data += chunk
    os.close(reading)
    text = data.decode()
    return [text[i : i + ID_BYTES] for i in range(0, len(text) - ID_BYTES + 1, ID_BYTES)]


def _count(url: str, acknowledged: list[str]) -> dict[str, int]:
    engine = open_ledger(url, read_only=True)
    with engine.connect() as connection:
        request = table_of(Request)
        found = connection.execute(select(request.c.record_id, request.c.outcome)).all()
        left_open = connection.execute(select(table_of(RequestStart).c.record_id)).all()
    engine.dispose()
    completed = {record_id for record_id, outcome in found if outcome == "completed"}
    copies = Counter(record_id for record_id, _ in found)
    return {
        "acknowledged": len(acknowledged),
        "rows": len(found),
        "lost": len(set(acknowledged) - completed),
        "duplicated": sum(number - 1 for number in copies.values()),
        "orphaned": sum(outcome == "orphaned" for _, outcome in found),
        "left_open": len(left_open),
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
