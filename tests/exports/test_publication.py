"""Readers see one complete version, whatever happens to the run that writes the next."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import parquet
from sqlalchemy import text

from exports import job
from exports.errors import LockedError, SourceError, TargetError
from exports.extract import LedgerSource
from exports.job import ExportOptions, run_export
from exports.lock import exclusive
from exports.manifest import read_manifest
from exports.row_stream import Statement
from exports.storage import Target
from telemetry.ledger.session import open_ledger
from tests.exports.ledgers import NOON, LedgerFill, new_ledger

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


def run_killed(ledger: LedgerFill, out: Path, die_at: int) -> tuple[int, int]:
    """Export in a child that kills itself at the n-th call of what changes something on disk.

    Returns the child's wait status and the number of such calls it made, at most 255.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return status, os.waitstatus_to_exitcode(status)
    num_calls = 0

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, call)

    counted(os, "replace")
    counted(os, "fsync")
    counted(parquet.ParquetWriter, "write_table")
    counted(job, "write_manifest")
    counted(job, "collect_garbage")
    counted(job, "record_watermark")
    try:
        run_export(ledger.url, out, now=NOW)
    except BaseException:
        os._exit(255)
    os._exit(num_calls)


def complete_version(out: Path) -> tuple[int, int]:
    """Generation and requests, after checking that every file is there, whole."""
    manifest = json.loads((out / "manifest.json").read_text())
    for table in manifest["tables"].values():
        assert table["rows"] == sum(file["rows"] for file in table["files"])
        for file in table["files"]:
            content = (out / file["path"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == file["sha256"]
            assert parquet.read_metadata(out / file["path"]).num_rows == file["rows"]
    return manifest["generation"], manifest["tables"]["fact_request"]["rows"]


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    fill.request(NOON, drafted=(3,), accepted=(2,))
    fill.request(NOON + timedelta(days=1))
    return fill


@pytest.mark.parametrize(
    ("step", "num_last"), [(40, 2), pytest.param(4, 12, marks=pytest.mark.slow)]
)
def test_a_run_killed_at_any_write_leaves_the_old_version_or_the_new(
    step: int, num_last: int, ledger: LedgerFill, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    run_export(ledger.url, first, now=NOW)
    assert complete_version(first) == (1, 2)
    ledger.request(NOON + timedelta(minutes=1), drafted=(3,), accepted=(1,))
    ledger.interval(NOON)

    num_calls = run_killed(ledger, copied(first, tmp_path / "whole"), 0)[1]
    assert 20 < num_calls < 255
    last = range(num_calls - num_last + 1, num_calls + 1)  # around publication
    points = sorted({*range(1, num_calls, step), *last})
    seen = set()
    for die_at in points:
        out = copied(first, tmp_path / f"killed-{die_at}")
        assert run_killed(ledger, out, die_at)[1] == -signal.SIGKILL
        version = complete_version(out)
        assert version in {(1, 2), (2, 3)}
        seen.add(version)
        run_export(ledger.url, out, now=NOW)
        assert complete_version(out) == (2, 3)
        assert tables_of(out) == tables_of(tmp_path / "whole")
    assert seen == {(1, 2), (2, 3)}


def copied(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    return target


def tables_of(out: Path) -> object:
    return json.loads((out / "manifest.json").read_text())["tables"]


def test_a_full_disk_leaves_the_old_version(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    ledger.request(NOON)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192));"
        "from service.cli_export import app; app()"
    )
    with open_ledger(ledger.url).connect() as server:
        server.execute(text("SELECT count(*) FROM requests"))  # it keeps SQLite's shared memory
        result = subprocess.run(
            [sys.executable, "-c", program, "--ledger", ledger.url, "--out", str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert result.returncode == TargetError.exit_code, result.stderr
    assert "cannot write" in result.stderr
    assert complete_version(out) == (1, 2)


def test_a_source_that_fails_half_way_leaves_the_old_version(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    ledger.request(NOON, drafted=(3,), accepted=(2,))
    with open_ledger(ledger.url).begin() as connection:
        connection.execute(text("DROP TABLE request_acceptance"))
    with pytest.raises(SourceError, match="request_acceptance"):
        run_export(ledger.url, out, now=NOW)
    assert complete_version(out) == (1, 2)


def test_a_reading_process_that_is_killed_leaves_the_old_version(
    ledger: LedgerFill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    ledger.request(NOON)
    others = set(psutil.Process().children())
    rows_of = LedgerSource.request_rows

    def kill_first(self: LedgerSource, day: date, until: int) -> Statement:
        for worker in set(psutil.Process().children()) - others:
            worker.kill()
        return rows_of(self, day, until)

    with monkeypatch.context() as patch:
        patch.setattr(LedgerSource, "request_rows", kill_first)
        with pytest.raises(SourceError, match="ended with -9"):
            run_export(ledger.url, out, now=NOW)
    assert complete_version(out) == (1, 2)
    run_export(ledger.url, out, now=NOW)
    assert complete_version(out) == (2, 3)


def test_a_second_export_leaves_while_the_first_runs(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with exclusive(Target(out), 0), pytest.raises(LockedError):
        run_export(ledger.url, out, now=NOW)
    run_export(ledger.url, out, now=NOW)


def test_a_second_export_waits_when_told_to(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive(Target(out), 0):
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    threading.Timer(0.3, done.set).start()
    began = time.monotonic()
    run_export(ledger.url, out, ExportOptions(wait_seconds=60), now=NOW)
    assert time.monotonic() - began >= 0.25
    holder.join()


def test_another_writer_of_the_same_target_is_noticed_before_publishing(
    ledger: LedgerFill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    ledger.request(NOON)
    manifest = read_manifest(Target(out))
    readings = iter([manifest, job.replace(manifest, generation=7)])
    monkeypatch.setattr(job, "read_manifest", lambda _: next(readings))
    with pytest.raises(TargetError, match="generation 7"):
        run_export(ledger.url, out, now=NOW)
    assert complete_version(out) == (1, 2)


def test_replaced_files_stay_for_a_day_and_then_go(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    old = {file["path"] for file in manifest_files(out, "fact_request")}
    ledger.request(NOON)
    run_export(ledger.url, out, now=NOW)
    replaced = old - {file["path"] for file in manifest_files(out, "fact_request")}
    assert replaced
    run_export(ledger.url, out, now=NOW + timedelta(hours=23))
    assert all((out / path).exists() for path in replaced)
    summary = run_export(ledger.url, out, now=NOW + timedelta(hours=25))
    assert summary.num_deleted_files >= len(replaced)
    assert not any((out / path).exists() for path in replaced)
    assert complete_version(out) == (2, 3)


def test_files_that_a_killed_run_left_behind_go_after_a_day(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    left = out / "fact_request" / "dt=2026-03-28" / "part-0000-0123456789abcdef.parquet"
    left.write_bytes(b"half")
    now = datetime.now(UTC)
    assert run_export(ledger.url, out, now=now).num_deleted_files == 0
    assert run_export(ledger.url, out, now=now + timedelta(hours=25)).num_deleted_files == 1
    assert not left.exists()
    assert complete_version(out) == (1, 2)


def manifest_files(out: Path, table: str) -> list[dict[str, str]]:
    files: list[dict[str, str]] = json.loads((out / "manifest.json").read_text())["tables"][table][
        "files"
    ]
    return files


def test_a_manifest_of_another_version_is_left_alone(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    path = out / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    before = path.read_bytes()
    with pytest.raises(TargetError, match="schema version 99"):
        run_export(ledger.url, out, now=NOW)
    assert path.read_bytes() == before


def test_the_ledger_knows_how_far_it_was_exported(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_export(ledger.url, out, now=NOW)
    ledger.request(NOON)
    run_export(ledger.url, out, now=NOW)
    with open_ledger(ledger.url).connect() as connection:
        rows = list(connection.execute(text("SELECT name, ledger_id FROM export_watermarks")))
    assert rows == [(str(out), 3)]
