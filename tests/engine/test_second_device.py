"""The engine on a device that is not the processor: nothing is left behind on the host, nothing
waits for it. Real CUDA hardware is tried by tests/benchmarks/gpu.sh."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A program of its own, which builds a backend of torch first.
pytestmark = pytest.mark.thorough

READS = "reads of the host that wait for the device"
WAITING_WRITES = "writes that the host waits for"
SETTINGS = ("prompt_lookup", "draft_model", "small_blocks", "buckets", "head", "aligned")
RAGGED = SETTINGS[:5]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.engine.second_device_program"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    answer: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    assert tuple(answer) == SETTINGS
    return answer


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_processor(found: dict[str, Any], name: str) -> None:
    """Greedy and sampled, both rules, penalties, bias, a grammar; torch refuses a tensor that
    stayed on the host."""
    assert found[name]["device"] == "second:0"
    assert found[name]["num_requests"] == 6
    assert found[name]["differing"] == []


@pytest.mark.parametrize("name", RAGGED)
def test_the_host_waits_for_no_write(found: dict[str, Any], name: str) -> None:
    assert found[name]["guarantee"] == "bit_exact"
    assert WAITING_WRITES not in found[name]["crossings"], found[name]["lines"]


@pytest.mark.parametrize("name", RAGGED)
def test_a_step_reads_what_was_accepted_and_nothing_else(found: dict[str, Any], name: str) -> None:
    """A drafter that runs a model reads each of its tokens, to give it back to the model."""
    reads = {
        line.removeprefix(f"{READS}: ").partition(":")[0]: count
        for line, count in found[name]["lines"].items()
        if line.startswith(READS)
    }
    assert reads.pop("verifier.py") == found[name]["num_steps"]
    if name == "prompt_lookup":
        assert not reads
    assert set(reads) <= {"drafter/drawing.py", "drafter/head/drafter.py"}
