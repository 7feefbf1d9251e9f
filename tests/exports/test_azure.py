"""An export to Azure Blob Storage (azurite, over HTTP), by the address `az://container/folder`.

`make test-exports` fetches azurite from npm into build/azurite.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from exports.job import run_export
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.exports.test_job import published
from tests.ports import free_port

pytestmark = pytest.mark.slow

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)
AZURITE = Path(os.environ.get("TANDEM_AZURITE", "build/azurite"))
ACCOUNT = "devstoreaccount1"  # azurite's own account, and its published key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("adlfs", reason="needs tandem[azure]")
    import fsspec

    program = AZURITE / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists() or shutil.which("node") is None:
        pytest.skip("no azurite: make test-exports")
    port = free_port()
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};",
    )
    server = subprocess.Popen(
        [
            str(program.absolute()),
            *("--silent", "--skipApiVersionCheck", "--blobPort", str(port)),
            *("--location", str(tmp_path / "blobs")),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until_open(port)
        filesystem = fsspec.filesystem("az", skip_instance_cache=True)
        filesystem.mkdir("box")
        yield filesystem
    finally:
        server.kill()  # its own ending waits for connections that the client keeps
        server.wait(30)


def wait_until_open(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, "azurite did not start"
        time.sleep(0.1)


def test_a_container_gets_the_bytes_that_a_folder_gets(blobs: Any, tmp_path: Path) -> None:
    ledger = LedgerFill(new_ledger(tmp_path))
    ledger.dimensions()
    ledger.request(NOON, drafted=(3,), accepted=(2,))
    run_export(ledger.url, "az://box/export", now=NOW)
    ledger.request(NOON)
    run_export(ledger.url, "az://box/export", now=NOW)
    run_export(ledger.url, tmp_path / "out", now=NOW)

    manifest = json.loads(blobs.cat("box/export/manifest.json"))
    assert manifest["generation"] == 2
    files = [file["path"] for table in manifest["tables"].values() for file in table["files"]]
    found = {path: blobs.cat(f"box/export/{path}") for path in files}
    assert found == published(tmp_path / "out")
    late = run_export(ledger.url, "az://box/export", now=NOW + timedelta(hours=25))
    assert late.num_deleted_files > 0
