"""Another language reads the same contract: Node with @grpc/grpc-js.

Runs where node is installed and `make test-node` has fetched its packages.
"""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import TinyService
from tests.e2e.test_tiny_service import target_alone
from tests.service.serving import running_server

FOLDER = Path(__file__).parent / "node"
PROTOS = Path(__file__).parents[2] / "protos"
CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, OK = 1, 4, 3, 0


def node_program() -> str:
    """Skips where node or its packages are not there."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the Node packages are not there; fetch them with: make test-node")
    return node


async def test_node_client_sees_the_stream_and_the_statuses(tiny_service: TinyService) -> None:
    process = await asyncio.create_subprocess_exec(
        node_program(),
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


async def test_the_documented_node_example_prints_the_text() -> None:
    found = re.search(r"```js\n(.*?)```", (PROTOS / "README.md").read_text("utf-8"), re.DOTALL)
    assert found
    async with running_server() as running:
        example = found.group(1).replace("127.0.0.1:50051", running.address)
        process = await asyncio.create_subprocess_exec(
            node_program(),
            *("--input-type=module", "--eval"),
            example.replace('"protos"', json.dumps(str(PROTOS))),
            cwd=FOLDER,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    assert len(output.decode()) == 32  # the fake engine's tokens are one letter each
    assert not errors
