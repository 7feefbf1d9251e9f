"""Another language reads the same contract: Node with @grpc/grpc-js.

Runs where node is installed and `make test-node` has fetched its packages.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import TinyService
from tests.e2e.test_tiny_service import target_alone

FOLDER = Path(__file__).parent / "node"
PROTOS = Path(__file__).parents[2] / "protos"
CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, OK = 1, 4, 3, 0


async def test_node_client_sees_the_stream_and_the_statuses(tiny_service: TinyService) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the Node packages are not there; fetch them with: make test-node")
    process = await asyncio.create_subprocess_exec(
        node,
        "client.js",
        f"127.0.0.1:{tiny_service.server.port}",
        str(PROTOS),
        cwd=FOLDER,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    seen = json.loads(output)
    assert seen["kinds"][0] == "started"
    assert seen["kinds"][-1] == "finished"
    assert set(seen["kinds"][1:-1]) == {"delta"}
    assert seen["tokenIds"] == target_alone("the quick brown fox", 12) == seen["unaryTokenIds"]
    assert seen["text"]
    assert seen["reason"] == "FINISH_REASON_LENGTH"
    assert seen["codes"] == {
        "ok": OK,
        "late": DEADLINE_EXCEEDED,
        "left": CANCELLED,
        "wrong": INVALID_ARGUMENT,
    }
    assert "sampling.temperature" in seen["wrongDetails"]
