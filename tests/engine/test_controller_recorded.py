"""The goodput controller over what prompt lookup really had accepted in a model's own answers.

lookup_traces.json holds, for every position of 120 Spec-Bench answers, whether the lookup found
anything there and how much of it the target accepted; record_lookup_traces.py made it. Rows answer
one prompt after the other, each as a request of its own.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.config import SpeculationConfig
from engine.cost_table import CostTable
from engine.goodput import DraftSource, StepCosts
from engine.live_request import LiveRequest
from engine.speculation import DraftLengths
from tests.engine.driver import request
from tests.engine.record_lookup_traces import MAX_DRAFTS, MAX_NGRAM, MIN_NGRAM, TRACES
from tests.engine.test_goodput import LARGE_GPU, SLOW_CPU
from tests.marks import thorough

LOOKUP = DraftSource("prompt_lookup", is_free=True)
# As a server measured it at its start, of the demo model on one core.
ONE_CORE = CostTable(
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    (0.0352, 0.0366, 0.039, 0.0447, 0.0461, 0.0502, 0.0581, 0.0625, 0.0793, 0.1183, 0.1426, 0.1737),
)
MACHINES = {
    "slow-cpu": StepCosts(SLOW_CPU, row_seconds=2e-5),
    "one-core": StepCosts(ONE_CORE, row_seconds=2e-5),
    "large-gpu": StepCosts(LARGE_GPU, row_seconds=2e-6),
}


@cache
def answers() -> tuple[str, ...]:
    """Those of all categories in turn."""
    by_category: dict[str, list[str]] = json.loads(Path(TRACES).read_text())
    longest = max(map(len, by_category.values()))
    return tuple(
        found[number] for number in range(longest) for found in by_category.values()
        if number < len(found) and found[number]
    )  # fmt: skip


class Row:
    """A place in the batch: where it is in which answer."""

    def __init__(self, first: int, step: int) -> None:
        self._next, self._step = first, step
        self.position = 0
        self._begin()

    def _begin(self) -> None:
        self.answer = answers()[self._next % len(answers())]
        self.live = LiveRequest(request(f"answer {self._next}", [5, 6], mode="auto"), [5, 6])
        self.live.drafter = LOOKUP.drafter
        self._next += self._step
        self.position = 0

    @property
    def num_right(self) -> int | None:
        """Drafts that would be accepted; None where nothing is found."""
        found = self.answer[self.position]
        return None if found == "." else int(found)

    def advance(self, num_tokens: int) -> str | None:
        """The request that has ended with these tokens."""
        self.position += num_tokens
        if self.position < len(self.answer):
            return None
        ended = self.live.request_id
        self._begin()
        return ended


def simulate(
    num_rows: int,
    costs: StepCosts,
    num_steps: int,
    choose: Callable[[list[Row]], list[int]],
    lengths: DraftLengths | None = None,
) -> float:
    """Emitted tokens per second."""
    rows = [Row(number, num_rows) for number in range(num_rows)]
    emitted, seconds = 0, 0.0
    for _ in range(num_steps):
        drafts = choose(rows)
        num_drafting = sum(count > 0 for count in drafts)
        seconds += costs.step_seconds(num_rows + sum(drafts), num_drafting, 0)
        for row, count in zip(rows, drafts, strict=True):
            accepted = min(count, row.num_right or 0)
            emitted += accepted + 1
            if lengths is not None:
                lengths.observe(row.live, count, accepted)
            ended = row.advance(accepted + 1)
            if ended is not None and lengths is not None:
                lengths.forget(ended)
    return emitted / seconds


def fixed(num_rows: int, costs: StepCosts, num_steps: int, num_drafts: int) -> float:
    return simulate(
        num_rows,
        costs,
        num_steps,
        lambda rows: [0 if row.num_right is None else num_drafts for row in rows],
    )


class Controlled:
    """A controller that goes from one load to the next."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._rows: dict[str, Row] = {}
        self._lengths = DraftLengths(MAX_DRAFTS, costs, self._foresee)

    def _foresee(self, live: LiveRequest) -> DraftSource | None:
        return None if self._rows[live.request_id].num_right is None else LOOKUP

    def _choose(self, rows: list[Row]) -> list[int]:
        self._rows = {row.live.request_id: row for row in rows}
        chosen = self._lengths.choose([row.live for row in rows])
        return [chosen[row.live.request_id] for row in rows]

    def run(self, num_rows: int, num_steps: int) -> float:
        return simulate(num_rows, self._costs, num_steps, self._choose, self._lengths)


def check(costs: StepCosts, num_rows: int, num_steps: int, ours: float) -> None:
    plain, *drafting = (fixed(num_rows, costs, num_steps, k) for k in range(MAX_DRAFTS + 1))
    assert ours >= 0.97 * max(plain, *drafting), (ours / plain, max(drafting) / plain)
    assert ours >= 0.98 * plain, ours / plain


def test_the_traces_are_of_a_lookup_as_it_is_configured() -> None:
    config = SpeculationConfig()
    assert (config.lookup_min_ngram, config.lookup_max_ngram) == (MIN_NGRAM, MAX_NGRAM)
    found = "".join(answers())
    assert len(answers()) > 100
    assert 0.1 < 1 - found.count(".") / len(found) < 0.6


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_rows", [1, thorough(2), thorough(4), 8, thorough(16), thorough(32)])
def test_it_is_near_the_best_fixed_k_and_never_behind_plain_decoding(
    num_rows: int, machine: str
) -> None:
    costs = MACHINES[machine]
    num_steps = max(300, 2400 // num_rows)
    check(costs, num_rows, num_steps, Controlled(costs).run(num_rows, num_steps))


@pytest.mark.thorough
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_so_after_every_step_of_the_load(machine: str) -> None:
    costs = MACHINES[machine]
    controlled = Controlled(costs)
    for num_rows in (1, 32, 4, 16):
        check(costs, num_rows, 300, controlled.run(num_rows, 300))
