"""Training on a device that is not the processor: head, teacher, batches and the optimizer's
state are there, and what is learned is what the processor learns."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # every operation passes Python

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.training.second_device_training",
            str(tmp_path_factory.mktemp("devices")),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    answer: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    assert answer["second"]["device"] == "second:0"
    return answer


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in _numbers(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("part", ["held_out", "path_steps", "evaluation"])
def test_what_is_learned_is_what_the_processor_learns(found: dict[str, Any], part: str) -> None:
    """Lengths after each stage, losses and effective sample sizes of the variational steps,
    scores of an evaluation. torch refuses a tensor that stayed on the processor."""
    ours, theirs = _numbers(found["second"][part]), _numbers(found["cpu"][part])
    assert len(ours) >= 3
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_the_stages_learned_something_there(found: dict[str, Any]) -> None:
    stages = found["second"]["held_out"]
    first, last = stages["distill"][0][1], stages["variational"][-1][1]
    assert last > first
