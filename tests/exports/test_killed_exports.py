"""An export to a bucket, with Delta tables and FOCUS files there, killed at any of its writes.

The store itself kills it, when it has done a write and before it has answered: every stage of
every one of the three targets is a place to die. Whoever reads then finds a complete version.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs, parquet

from exports.delta import GENERATION
from exports.schemas import TABLES
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_object_stores import ObjectStore, store

__all__ = ["store"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

deltalake = pytest.importorskip("deltalake")

ROOT = Path(__file__).parents[2]
PROGRAM = "from service.cli import main; main()"
STEP = 12  # of some eighty writes
Rows = list[dict[str, Any]]


class Bucket:
    """A folder of the store with an export (`out`), its Delta tables and its FOCUS files."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name = store, name
        self._files = fs.SubTreeFileSystem(f"bucket/{name}", store.filesystem())

    def copy_to(self, name: str) -> "Bucket":
        other = Bucket(self.store, name)
        for info in self._files.get_file_info(fs.FileSelector("", recursive=True)):
            if info.type == fs.FileType.File:
                with other._files.open_output_stream(info.path) as sink:
                    sink.write(self.read(info.path))
        return other

    def read(self, path: str) -> bytes:
        with self._files.open_input_stream(path) as source:
            content: bytes = source.read()
            return content

    def url(self, part: str) -> str:
        return self.store.url(f"bucket/{self.name}/{part}")

    @property
    def delta_url(self) -> str:
        return f"s3://bucket/{self.name}/delta"

    def export(self, ledger: LedgerFill, die_at: int = 0) -> list[str]:
        """In a process that is killed with the n-th write, if any; returns the paths of writes.

        In one of its own in any case: the Delta writer looks for a table without giving up the
        interpreter's lock, which the store in this process needs.
        """
        written: list[str] = []
        command = ("export", "--ledger", ledger.url, "--out", self.url("out"))
        targets = ("--delta", self.delta_url, "--focus", self.url("focus"))
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *command, *targets],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as running:

            def count(path: str) -> None:
                written.append(path)
                if len(written) == die_at:
                    running.kill()

            self.store.after_write = count
            _, complaints = running.communicate()
            self.store.after_write = None
        assert running.returncode == (-signal.SIGKILL if die_at else 0), complaints
        return written

    def tables(self) -> tuple[int, dict[str, Rows]]:
        """What a reader of the manifest sees: the generation, and the rows of complete files."""
        manifest = json.loads(self.read("out/manifest.json"))
        found: dict[str, Rows] = {}
        for name, table in manifest["tables"].items():
            parts = [self.read(f"out/{file['path']}") for file in table["files"]]
            for content, file in zip(parts, table["files"], strict=True):
                assert hashlib.sha256(content).hexdigest() == file["sha256"]
            found[name] = _in_order(
                row
                for content in parts
                for row in parquet.read_table(pa.BufferReader(content)).to_pylist()
            )
        return manifest["generation"], found

    def delta_tables(self) -> dict[str, tuple[int, Rows]]:
        """Generation and rows, read from a copy: a reader would not give up the lock either."""
        with tempfile.TemporaryDirectory() as folder:
            selector = fs.FileSelector("delta", recursive=True)
            for info in self._files.get_file_info(selector):
                if info.type == fs.FileType.File:
                    path = Path(folder) / info.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self.read(info.path))
            return {name: _delta_table(Path(folder) / "delta" / name) for name in TABLES}

    def focus_files(self) -> dict[str, bytes]:
        selector = fs.FileSelector("focus")
        return {
            info.base_name: self.read(info.path) for info in self._files.get_file_info(selector)
        }


def _delta_table(folder: Path) -> tuple[int, Rows]:
    table = deltalake.DeltaTable(str(folder))
    [latest] = table.history(1)
    return int(latest[GENERATION]), _in_order(table.to_pyarrow_table().to_pylist())


def _in_order(rows: Any) -> Rows:
    return sorted(rows, key=str)


@pytest.fixture
def bucket(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")  # the Delta writer's
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return Bucket(store, "first")


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    fill.request(NOON, drafted=(3,), accepted=(2,))
    fill.request(NOON + timedelta(days=1))
    fill.interval(NOON)
    return fill


def test_a_run_killed_at_any_write_leaves_complete_versions(
    bucket: Bucket, ledger: LedgerFill
) -> None:
    bucket.export(ledger)
    rows_of = dict([bucket.tables()])
    old_focus = bucket.focus_files()
    ledger.request(NOON + timedelta(minutes=1), drafted=(3,), accepted=(1,))
    whole = bucket.copy_to("whole")
    written = whole.export(ledger)
    rows_of |= dict([whole.tables()])
    new_focus = whole.focus_files()
    assert len(rows_of) == 2
    assert len(written) > 2 * len(TABLES)
    publication = max(n for n, path in enumerate(written, 1) if path.endswith("/manifest.json"))

    seen = set()
    for die_at in sorted({*range(1, len(written), STEP), publication, len(written)}):
        killed = bucket.copy_to(f"killed-{die_at}")
        killed.export(ledger, die_at)
        generation, found = killed.tables()
        assert found == rows_of[generation]
        in_delta = set()
        for name, (of_table, rows) in killed.delta_tables().items():
            assert rows == rows_of[of_table][name], (die_at, name)
            assert of_table <= generation
            in_delta.add(of_table)
        for name, content in killed.focus_files().items():
            assert content in (old_focus.get(name), new_focus[name]), (die_at, name)
        seen.add((generation, *sorted(in_delta)))

        killed.export(ledger)  # the next run, which finds nothing new in the ledger
        assert killed.tables() == (2, rows_of[2])
        assert killed.delta_tables() == {name: (2, rows_of[2][name]) for name in TABLES}
        assert killed.focus_files() == new_focus
    assert seen == {(1, 1), (2, 1), (2, 1, 2), (2, 2)}
