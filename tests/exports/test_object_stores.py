"""An export to S3 (moto's server, over HTTP) keeps the promises of one to a folder."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs, parquet
from werkzeug.serving import make_server

from exports.errors import LockedError, TargetError
from exports.job import Progress, run_export
from exports.lock import exclusive
from exports.manifest import read_manifest
from exports.storage import Target
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_job import published
from tests.ports import free_port

pytestmark = pytest.mark.thorough

moto_server = pytest.importorskip("moto.server")

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)


class ObjectStore:
    """A server that keeps its objects while it is away; it can be told to refuse all writes.

    after_write is called with the path of each write when that is done and not yet answered.
    """

    def __init__(self) -> None:
        self.refuses_writes = False
        self.after_write: Callable[[str], None] | None = None
        self._app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self.refuses_writes and environ["REQUEST_METHOD"] in {"PUT", "POST"}:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code></Error>"]
        answer: Iterable[bytes] = self._app(environ, start_response)
        if self.after_write is not None and environ["REQUEST_METHOD"] in {"PUT", "POST", "DELETE"}:
            self.after_write(environ["PATH_INFO"])
        return answer

    def filesystem(self) -> fs.FileSystem:
        return fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def url(self, path: str) -> str:
        return f"s3://{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running = ObjectStore()
    running.filesystem().create_dir("bucket")
    yield running
    running.stop()


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    for index in range(3):
        fill.request(NOON + timedelta(days=index), drafted=(3,), accepted=(2,))
    fill.interval(NOON)
    return fill


def stored(store: ObjectStore, folder: str) -> dict[str, bytes]:
    filesystem = store.filesystem()

    def read(path: str) -> bytes:
        with filesystem.open_input_stream(f"bucket/{folder}/{path}") as stream:
            content: bytes = stream.read()
            return content

    manifest: dict[str, Any] = json.loads(read("manifest.json"))
    files = [file["path"] for table in manifest["tables"].values() for file in table["files"]]
    return {path: read(path) for path in files}


def test_a_bucket_gets_the_bytes_that_a_folder_gets(
    store: ObjectStore, ledger: LedgerFill, tmp_path: Path
) -> None:
    run_export(ledger.url, store.url("bucket/a"), now=NOW)
    run_export(ledger.url, tmp_path / "out", now=NOW)
    assert stored(store, "a") == published(tmp_path / "out")
    table = parquet.read_table("bucket/a/fact_request", filesystem=store.filesystem())
    assert isinstance(table, pa.Table)
    assert table.num_rows == 3


def test_changes_and_garbage_are_handled_in_a_bucket(
    store: ObjectStore, ledger: LedgerFill, tmp_path: Path
) -> None:
    url = store.url("bucket/b")
    run_export(ledger.url, url, now=NOW)
    ledger.request(NOON)
    summary = run_export(ledger.url, url, now=NOW)
    assert (summary.generation, summary.tables["fact_request"]) == (2, 4)
    late = run_export(ledger.url, url, now=NOW + timedelta(hours=25))
    assert late.num_deleted_files > 0
    run_export(ledger.url, tmp_path / "out", now=NOW)
    assert stored(store, "b") == published(tmp_path / "out")


@pytest.mark.parametrize(
    "failure",
    # The client tries for seconds to reach a store that is gone; a refusal is final.
    ["refuses", pytest.param("is gone", marks=pytest.mark.slow)],
)
def test_a_store_that_fails_half_way_leaves_the_old_version(
    failure: str, store: ObjectStore, ledger: LedgerFill
) -> None:
    url = store.url("bucket/c")
    run_export(ledger.url, url, now=NOW)
    before = stored(store, "c")
    for index in range(3):
        ledger.request(NOON + timedelta(days=index))

    def fail(progress: Progress) -> None:
        if progress.num_days_done != 1:
            return
        if failure == "is gone":
            store.stop()
        store.refuses_writes = True

    with pytest.raises(TargetError):
        run_export(ledger.url, url, now=NOW, on_progress=fail)
    if failure == "is gone":
        store.start()
    store.refuses_writes = False
    assert stored(store, "c") == before
    assert run_export(ledger.url, url, now=NOW).tables["fact_request"] == 6


def test_two_exports_of_a_bucket_exclude_each_other(store: ObjectStore, ledger: LedgerFill) -> None:
    target = Target(store.url("bucket/d"))
    with exclusive(target, 0), pytest.raises(LockedError):
        run_export(ledger.url, store.url("bucket/d"), now=NOW)
    assert read_manifest(target).generation == 0


def test_what_fsspec_knows_is_a_target_too(ledger: LedgerFill, tmp_path: Path) -> None:
    import fsspec

    summary = run_export(ledger.url, "memory://export", now=NOW)
    run_export(ledger.url, tmp_path / "out", now=NOW)
    memory = fsspec.filesystem("memory")
    for path, content in published(tmp_path / "out").items():
        assert memory.cat(f"/export/{path}") == content
    assert summary.tables["fact_request"] == 3


def test_an_unknown_kind_of_place_is_refused(ledger: LedgerFill) -> None:
    with pytest.raises(TargetError, match="cannot open"):
        run_export(ledger.url, "carrier-pigeon://loft", now=NOW)
