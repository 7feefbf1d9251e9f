"""Processes that share the dates: the same bytes from any number, and none outlives its export."""

import signal
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from exports import day_pool
from exports.day_messages import Opening
from exports.days import DayKind, DayTask
from exports.job import ExportOptions, run_export
from exports.row_stream import Database, Statement
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_job import published

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)
ENDLESS = "WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s) SELECT count(*) FROM s"


def test_any_number_of_processes_makes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = LedgerFill(new_ledger(tmp_path))
    ledger.dimensions()
    for index in range(8):
        ledger.request(NOON + timedelta(days=index // 2), drafted=(3, 2), accepted=(2, index % 2))
        ledger.interval(NOON + timedelta(days=index))
    monkeypatch.setattr(day_pool, "ROWS_PER_WORKER", 2)
    seen: set[int] = set()
    idle = len(psutil.Process().children())

    def count(_: object) -> None:
        seen.add(len(psutil.Process().children()) - idle)

    for number in (1, 3):
        options = ExportOptions(num_workers=number)
        run_export(ledger.url, tmp_path / str(number), options, now=NOW, on_progress=count)
    assert seen == {1, 3}
    assert published(tmp_path / "1") == published(tmp_path / "3")
    assert len(psutil.Process().children()) == idle


@pytest.mark.skipif(find_spec("pandas") is None, reason="pandas is not installed")
def test_a_process_loads_no_pandas(tmp_path: Path) -> None:
    ledger = LedgerFill(new_ledger(tmp_path))
    ledger.dimensions()
    ledger.request(NOON, drafted=(3, 2), accepted=(2, 1))
    others = set(psutil.Process().children())
    libraries: set[str] = set()

    def look(_: object) -> None:
        for worker in set(psutil.Process().children()) - others:
            libraries.update(area.path for area in worker.memory_maps())

    run_export(ledger.url, tmp_path / "out", now=NOW, on_progress=look)
    assert any("pyarrow" in path for path in libraries)
    assert not any("/pandas/" in path for path in libraries)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_process_ends_with_its_export_whatever_it_is_doing(is_busy: bool, tmp_path: Path) -> None:
    database = Database("sqlite", str(tmp_path / "ledger.db"))
    ours, theirs = Pipe()
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "exports.day_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
    ours.send(Opening(database, tmp_path, ()))
    if is_busy:
        task = DayTask(DayKind.CAPACITY, date(2026, 3, 28), Statement(ENDLESS, ("n",)))
        ours.send(task)
        process = psutil.Process(worker.pid)
        while process.cpu_times().user < 0.5 and worker.poll() is None:
            worker_is_reading = ours.poll(0.05)
            assert not worker_is_reading, ours.recv()
        # What a terminal or a service manager sends to all processes of an export.
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        assert not ours.poll(0.2)
    ours.close()
    assert worker.wait(timeout=30) == 0
