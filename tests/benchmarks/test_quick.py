"""The counts of bench-quick are the same on every run, and see what they are there to see."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import quick
from tests.benchmarks.quick import CASES, STORED, CallCount, Case, OperatorCount, compare

pytestmark = pytest.mark.thorough

PER_STEP = ("operators", "allocations", "python_calls", "c_calls")


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def test_views_are_operators_but_no_allocations() -> None:
    with OperatorCount() as count:
        made = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        made.view(-1).t()
    assert (count.num_operators, count.num_allocations) == (3, 1)
    with OperatorCount() as count:
        made.add_(1)
        made + made
    assert (count.num_operators, count.num_allocations) == (2, 1)


def test_calls_of_python_and_c_are_counted_apart() -> None:
    def three() -> int:
        return len([1, 2, 3])

    with CallCount() as count:
        for _ in range(5):
            three()
    assert count.num_python_calls - 5 <= 2  # leaving the counter is a call as well
    assert count.num_c_calls >= 5
    with pytest.raises(RuntimeError, match="another profiler"), CallCount(), CallCount():
        pass


def test_an_extra_allocation_and_an_extra_forward_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(2, prompt_tokens=8)
    engine = quick.make_engine(case, str(tmp_path))
    before = quick.count(case, engine)
    assert quick.count(case, engine) == before
    runner = engine._verifier.runner
    forward = runner.forward

    def wasteful(rows: Any) -> torch.Tensor:
        torch.zeros(2)
        return forward(rows)

    monkeypatch.setattr(runner, "forward", wasteful)
    after = quick.count(case, engine)
    assert after["allocations"] == before["allocations"] + 1
    assert after["operators"] == before["operators"] + 1
    assert after["python_calls"] == before["python_calls"] + 1
    assert after["target_calls"] == before["target_calls"]

    monkeypatch.setattr(runner, "forward", lambda rows: (forward(rows), forward(rows))[0])
    twice = quick.count(case, engine)
    assert twice["target_calls"] == 2 * before["target_calls"]
    assert twice["row_tokens"] == 2 * before["row_tokens"]


@pytest.mark.parametrize("name", ["target_calls", "row_tokens", "allocations"])
def test_what_grew_is_named_and_what_fell_is_no_failure(stored: dict[str, Any], name: str) -> None:
    found = copy.deepcopy(stored)
    assert compare(stored, found) == ([], [])
    found["cases"]["plain_8"][name] = round(stored["cases"]["plain_8"][name] * 1.02 + 1)
    grown, less = compare(stored, found)
    assert less == []
    assert [line.split(":")[0] for line in grown] == [f"plain_8.{name}"]
    grown, less = compare(found, stored)
    assert grown == []
    assert [line.split(":")[0] for line in less] == [f"plain_8.{name}"]


def test_calls_are_judged_only_on_the_python_they_were_stored_with(stored: dict[str, Any]) -> None:
    found = copy.deepcopy(stored)
    found["cases"]["plain_1"]["python_calls"] *= 2
    assert compare(stored, found)[0]
    found["versions"]["python"] = "3.99"
    assert compare(stored, found) == ([], [])


def test_every_case_has_stored_figures_and_no_other_is_stored(stored: dict[str, Any]) -> None:
    assert set(stored["cases"]) == set(CASES)
    assert all(set(PER_STEP) < set(figures) for figures in stored["cases"].values())
    missing = copy.deepcopy(stored)
    del missing["cases"]["plain_1"]
    assert len(compare(missing, stored)[0]) == len(stored["cases"]["plain_1"])
    assert compare(stored, missing)[0] == ["plain_1: stored, but not run"]
