"""The process that reads dates of the ledger and writes their files.

Started by exports.day_pool with a socket's number as its argument. What comes in and goes out
is in exports.day_messages. When the other end is gone, it ends at once, whatever it is doing.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pyarrow as pa

from exports.day_messages import Opening, Reply, RowsDone
from exports.days import DayBuilder, DayKind, DayTask, WrittenDay
from exports.errors import ExportError
from exports.row_stream import RowStream
from exports.without_pandas import hide_pandas


def main() -> None:
    """Serve until the other end closes."""
    hide_pandas()
    # A terminal and a service manager signal the whole group: the export alone decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection: Connection[Reply, Opening | DayTask] = Connection(int(sys.argv[1]))
    opening = connection.recv()
    assert isinstance(opening, Opening)  # noqa: S101 - narrows the type
    tasks: queue.SimpleQueue[DayTask] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    builder = DayBuilder(
        opening.staging,
        np.array(opening.superseded_ids, dtype=np.int64),
        lambda num_rows: connection.send(RowsDone(num_rows)),
    )
    try:
        # A connection streams one answer at a time, and acceptance is read while requests are.
        rows, acceptance = RowStream(opening.database), RowStream(opening.database)
        while True:
            connection.send(_write(builder, tasks.get(), rows, acceptance))
    except ExportError as error:
        connection.send(error)


def _receive(
    connection: "Connection[Reply, Opening | DayTask]", tasks: "queue.SimpleQueue[DayTask]"
) -> None:
    try:
        while True:
            task = connection.recv()
            assert isinstance(task, DayTask)  # noqa: S101 - narrows the type
            tasks.put(task)
    except (EOFError, OSError):
        os._exit(0)


def _write(
    builder: DayBuilder, task: DayTask, rows: RowStream, acceptance: RowStream
) -> WrittenDay:
    batches = rows.batches(task.rows)
    if task.kind is DayKind.CAPACITY:
        return builder.capacity(task.day, batches)
    if task.kind is DayKind.EQUIVALENCE:
        return builder.equivalence(task.day, batches)
    positions: Iterator[pa.RecordBatch] = iter(())
    if task.acceptance is not None:
        positions = acceptance.batches(task.acceptance)
    return builder.requests(task.day, batches, positions)


if __name__ == "__main__":
    main()
