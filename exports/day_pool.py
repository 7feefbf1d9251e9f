"""Dates written by several processes at once, each of which reads and writes whole dates.

A process of their own, because the driver that reads rows must not share one with Python's
SQLite (exports.row_stream); several, because reading is the greatest part of the work.
"""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from exports.day_messages import Opening, Reply, RowsDone
from exports.days import DayTask, WrittenDay
from exports.errors import ExportError, SourceError
from exports.ledger_facts import DayTotals

ROWS_PER_WORKER = 100_000
"""A further process is started for so many rows: fewer are read before it has started."""


_ENVIRONMENT = {
    # A batch is filled in one thread and freed in another: with a heap per thread, or Arrow's
    # own, the freed parts of many dates add up.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    # numpy's threads for matrices, of which there are none here, would wait for them busily.
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class FinishedDay:
    """A date's files, and what the database says that they must add up to."""

    task: DayTask
    written: WrittenDay
    ledger: DayTotals


Event = RowsDone | FinishedDay


class DayPool:
    """Up to `max_workers` processes, started when there is work for them.

    `totals` is asked for the ledger's totals of a task while the task is worked on, from any
    thread. Close it, by `with`, to end the processes.
    """

    def __init__(
        self, opening: Opening, totals: Callable[[DayTask], DayTotals], max_workers: int
    ) -> None:
        self._opening = opening
        self._totals = totals
        self._max_workers = max_workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and what they are doing. There may be further work later."""
        while self._workers:
            self._workers.pop().close()

    def start(self, num_rows: int) -> None:
        """Start the processes that so many rows are worth, before their dates are known."""
        wanted = min(1 + num_rows // ROWS_PER_WORKER, self._max_workers)
        while len(self._workers) < wanted:
            self._workers.append(_Worker(self._opening))

    def write(self, tasks: Sequence[DayTask]) -> Iterator[Event]:
        """Write all dates; yields what happens, dates in the order in which they are finished.

        Raises the first worker's ExportError; the pool is of no use after it.
        """
        if not tasks:
            return
        if not self._workers:
            self.start(0)
        waiting = deque(tasks)
        # Finished dates wait on the disk until the caller has placed them: not too many.
        may_begin = threading.Semaphore(2 * len(self._workers))
        events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        threads = [
            threading.Thread(
                target=self._serve, args=(worker, waiting, may_begin, events), daemon=True
            )
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        num_left = len(tasks)
        try:
            while num_left:
                event = events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, FinishedDay):
                    num_left -= 1
                    may_begin.release()
        finally:
            waiting.clear()
            may_begin.release(len(threads))

    def _serve(
        self,
        worker: "_Worker",
        waiting: deque[DayTask],
        may_begin: threading.Semaphore,
        events: "queue.SimpleQueue[Event | BaseException]",
    ) -> None:
        try:
            while waiting:
                may_begin.acquire()
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                worker.send(task)
                ledger = self._totals(task)
                while isinstance(reply := worker.receive(), RowsDone):
                    events.put(reply)
                events.put(FinishedDay(task, reply, ledger))
        except BaseException as error:
            events.put(error)


class _Worker:
    def __init__(self, opening: Opening) -> None:
        ours, theirs = Pipe()
        self._connection: Connection[Opening | DayTask, Reply] = ours
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - own arguments
                [sys.executable, "-P", "-m", "exports.day_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._complaints,
                stderr=self._complaints,
                pass_fds=[theirs.fileno()],
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
            )
        self.send(opening)

    def send(self, message: Opening | DayTask) -> None:
        # Not by an argument: it may hold a password, which `ps` would show.
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> RowsDone | WrittenDay:
        try:
            reply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(reply, ExportError):
            raise reply
        return reply

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._complaints.close()

    def _died(self) -> SourceError:
        status = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1]}" if lines else ""
        return SourceError(f"the process that reads the ledger ended with {status}{reason}")
