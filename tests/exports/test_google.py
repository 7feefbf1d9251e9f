"""An export to Google Cloud Storage (an emulator, over HTTP) keeps the promises of a folder's."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyarrow import fs

from exports.errors import TargetError
from exports.job import Progress, run_export
from exports.manifest import read_manifest
from exports.storage import Target
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_job import published

pytestmark = pytest.mark.thorough

pytest.importorskip("gcp_storage_emulator")

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)

# In a process of its own, because pyarrow holds Python's lock while it waits for Google; with a
# thread per connection, because the emulator's own server answers one connection at a time.
SERVER = """
import sys
from functools import partial
from http.server import ThreadingHTTPServer
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

kept = Storage(data_dir=sys.argv[2])
if len(sys.argv) > 3:
    kept.create_bucket("bucket", {"name": "bucket"})
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), partial(RequestHandler, kept))
print(server.server_port, flush=True)
server.serve_forever()
"""


class Bucket:
    """A bucket behind HTTP that keeps its objects while its server is away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.start("with a bucket")

    def start(self, *arguments: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self.port), str(self._folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._server.stdout is not None
        self.port = int(self._server.stdout.readline())

    def stop(self) -> None:
        if self._server.poll() is None:
            self._server.kill()
            self._server.communicate()

    def url(self, folder: str) -> str:
        place = f"endpoint_override=127.0.0.1:{self.port}&scheme=http"
        return f"gs://anonymous@bucket/{folder}?{place}&retry_limit_seconds=1"

    def content(self, folder: str) -> dict[str, bytes]:
        """What the manifest lists, by path."""
        target = Target(self.url(folder))
        content = {path: target.read(path) for path in read_manifest(target).paths()}
        return {path: data for path, data in content.items() if data is not None}


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    running = Bucket(tmp_path / "bucket")
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


def test_a_bucket_gets_the_bytes_that_a_folder_gets(
    bucket: Bucket, ledger: LedgerFill, tmp_path: Path
) -> None:
    run_export(ledger.url, bucket.url("a"), now=NOW)
    ledger.request(NOON)
    # Months later: March is compacted, which reads files back, and replaced files go.
    ledger.request(NOON + timedelta(days=60))
    late = NOON + timedelta(days=70)
    summary = run_export(ledger.url, bucket.url("a"), now=late)
    assert (summary.generation, summary.tables["fact_request"]) == (2, 5)
    removing = run_export(ledger.url, bucket.url("a"), now=late + timedelta(hours=25))
    assert removing.num_deleted_files > 0
    run_export(ledger.url, tmp_path / "out", now=late)
    assert bucket.content("a") == published(tmp_path / "out")
    assert any("month=2026-03" in path for path in bucket.content("a"))


@pytest.mark.slow  # the client tries for a while to reach a store that is gone
def test_a_store_that_is_gone_half_way_leaves_the_old_version(
    bucket: Bucket, ledger: LedgerFill
) -> None:
    run_export(ledger.url, bucket.url("b"), now=NOW)
    before = bucket.content("b")
    for index in range(3):
        ledger.request(NOON + timedelta(days=index))

    def fail(progress: Progress) -> None:
        if progress.num_days_done == 1:
            bucket.stop()

    with pytest.raises(TargetError):
        run_export(ledger.url, bucket.url("b"), now=NOW, on_progress=fail)
    bucket.start()
    assert bucket.content("b") == before
    assert run_export(ledger.url, bucket.url("b"), now=NOW).tables["fact_request"] == 6


def test_pyarrow_opens_the_address_itself(bucket: Bucket) -> None:
    filesystem, root = fs.FileSystem.from_uri(bucket.url("c"))
    assert isinstance(filesystem, fs.GcsFileSystem)
    assert root == "bucket/c"
