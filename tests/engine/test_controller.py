"""The goodput controller against acceptance traces and cost tables of two kinds of machine.

A trace says of every drafted position whether the target would have accepted it; a simulated
step costs what the table says. The controller must come close to the best fixed K at every
batch size, and never lose to plain decoding.
"""

import itertools
import random
from collections.abc import Callable
from functools import cache

import pytest

from engine.cost_table import CostTable
from engine.goodput import DraftSource, StepCosts
from engine.live_request import LiveRequest
from engine.speculation import AcceptanceEstimate, DraftLengths
from tests.engine.driver import request
from tests.engine.test_goodput import LARGE_GPU, SLOW_CPU
from tests.marks import thorough

MAX_DRAFTS = 8
BATCH_SIZES = (1, thorough(2), thorough(4), 8, thorough(16), 32)
# Probability that a draft is accepted at a position, by kind of text: copies from the prompt,
# code, prose in regimes, and prose that a drafter cannot guess.
KINDS: dict[str, Callable[[int], float]] = {
    "summary": lambda position: 0.85,
    "code": lambda position: 0.7 if position % 120 < 80 else 0.3,
    "mixed": lambda position: 0.55 if position % 200 < 100 else 0.15,
    "prose": lambda position: 0.08,
}
DRAFT_MODEL = CostTable((1, 8, 32), (0.004, 0.006, 0.012))
MACHINES = {
    "slow-cpu-lookup": StepCosts(SLOW_CPU, row_seconds=2e-5),
    "slow-cpu-draft-model": StepCosts(SLOW_CPU, DRAFT_MODEL),
    "large-gpu-lookup": StepCosts(LARGE_GPU, row_seconds=2e-6),
}


@cache
def trace(kind: str, seed: int, length: int = 20_000) -> tuple[bool, ...]:
    generator = random.Random(f"{kind}{seed}")
    return tuple(generator.random() < KINDS[kind](position) for position in range(length))


def simulate(
    kinds: list[str],
    costs: StepCosts,
    choose: Callable[[list[str]], dict[str, int]],
    observe: Callable[[str, int, int], None],
    num_steps: int = 600,
) -> float:
    """Emitted tokens per second over num_steps steps of one batch."""
    positions = dict.fromkeys((str(n) for n in range(len(kinds))), 0)
    emitted, seconds = 0, 0.0
    for _ in range(num_steps):
        drafts = choose(list(positions))
        drafting = [k for k in drafts.values() if k]
        num_tokens = len(positions) + sum(drafting)
        seconds += costs.step_seconds(num_tokens, len(drafting), max(drafting, default=0))
        for row, num_drafts in drafts.items():
            accepted = 0
            outcome = trace(kinds[int(row)], int(row))
            while accepted < num_drafts and outcome[positions[row] + accepted]:
                accepted += 1
            positions[row] += accepted + 1
            emitted += accepted + 1
            observe(row, num_drafts, accepted)
    return emitted / seconds


def fixed(kinds: list[str], costs: StepCosts, num_drafts: int, num_steps: int = 600) -> float:
    return simulate(
        kinds, costs, lambda rows: dict.fromkeys(rows, num_drafts), lambda *_: None, num_steps
    )


def controlled(
    kinds: list[str],
    costs: StepCosts,
    num_steps: int = 600,
    lengths: DraftLengths | None = None,
) -> float:
    """lengths: a controller that has seen other rows before."""
    lengths = lengths or DraftLengths(MAX_DRAFTS, costs)
    lives = {
        str(n): LiveRequest(request(str(n), [5, 6], mode="auto"), [5, 6]) for n in range(len(kinds))
    }
    return simulate(
        kinds,
        costs,
        lambda rows: lengths.choose([lives[row] for row in rows]),
        lambda row, drafted, accepted: lengths.observe(lives[row], drafted, accepted),
        num_steps,
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", [*KINDS, "all kinds"])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_the_controller_is_near_the_best_fixed_k_and_never_behind_plain_decoding(
    batch_size: int, kind: str, machine: str
) -> None:
    costs = MACHINES[machine]
    names = list(KINDS) if kind == "all kinds" else [kind]
    kinds = [names[n % len(names)] for n in range(batch_size)]
    plain = fixed(kinds, costs, 0)
    best = max(plain, *(fixed(kinds, costs, k) for k in range(1, MAX_DRAFTS + 1)))
    ours = controlled(kinds, costs)
    assert ours >= 0.97 * best
    assert ours >= 0.98 * plain


@pytest.mark.thorough
@pytest.mark.parametrize("machine", ["slow-cpu-lookup", "slow-cpu-draft-model"])
def test_where_even_perfect_drafts_gain_little_little_is_spent_on_probes(machine: str) -> None:
    """A fixed share of 2 % of the time for probes makes this 0.983."""
    kinds = ["prose"] * 32
    assert controlled(kinds, MACHINES[machine]) >= 0.99 * fixed(kinds, MACHINES[machine], 0)


@pytest.mark.parametrize("machine", MACHINES)
def test_after_every_step_of_the_load_it_is_near_the_best_fixed_k_of_that_load(
    machine: str,
) -> None:
    costs = MACHINES[machine]
    lengths = DraftLengths(MAX_DRAFTS, costs)
    for batch_size in (1, 32, 4, 16):
        kinds = [list(KINDS)[n % len(KINDS)] for n in range(batch_size)]
        plain, *drafting = (fixed(kinds, costs, k, 300) for k in range(MAX_DRAFTS + 1))
        ours = controlled(kinds, costs, 300, lengths)
        assert ours >= 0.97 * max(plain, *drafting), batch_size
        assert ours >= 0.98 * plain, batch_size
        for number in range(batch_size):
            lengths.forget(str(number))


def test_a_controller_that_always_drafts_would_fail_that_test() -> None:
    costs = MACHINES["slow-cpu-draft-model"]
    kinds = ["prose"] * 32
    assert fixed(kinds, costs, MAX_DRAFTS) < 0.98 * fixed(kinds, costs, 0)


def test_a_full_acceptance_is_no_evidence_of_a_refusal() -> None:
    """Counting a full acceptance of K = 1 as "1 of 2" would keep K at 1 for ever."""
    estimate = AcceptanceEstimate()
    for _ in range(50):
        estimate.observe(1, 1)
    assert estimate.alpha(0.5, 1.0) > 0.9
    for _ in range(100):
        estimate.observe(4, 2)
    assert estimate.alpha(0.5, 0.0) == pytest.approx(2 / 3, abs=0.02)


def test_a_row_whose_text_becomes_predictable_is_found_again() -> None:
    lengths = DraftLengths(4, MACHINES["slow-cpu-draft-model"])
    live = LiveRequest(request("a", [5, 6], mode="auto"), [5, 6])
    for _ in range(200):
        lengths.observe(live, lengths.choose([live])["a"], 0)
    assert sum(lengths.choose([live])["a"] for _ in range(20)) <= 3
    drafted = []
    for _ in range(600):
        drafts = lengths.choose([live])["a"]
        lengths.observe(live, drafts, drafts)
        drafted.append(drafts)
    assert drafted[-1] == 4


def test_the_choice_does_not_flip_with_every_step() -> None:
    lengths = DraftLengths(4, MACHINES["slow-cpu-lookup"])
    rows = [LiveRequest(request(str(n), [5, 6], mode="auto"), [5, 6]) for n in range(8)]
    generator = random.Random(1)
    modes = []
    for _ in range(400):
        drafts = lengths.choose(rows)
        modes.append(sum(drafts.values()) > 2)
        for live in rows:
            count = drafts[live.request_id]
            accepted = 0
            while accepted < count and generator.random() < 0.25:
                accepted += 1
            lengths.observe(live, count, accepted)
    flips = sum(a != b for a, b in itertools.pairwise(modes))
    assert flips < 40


def test_each_drafter_is_judged_by_its_own_drafts() -> None:
    """Refused drafts of a model must not keep a lookup that is always right from drafting."""
    sources: dict[str, DraftSource | None] = {}
    lengths = DraftLengths(
        4, MACHINES["slow-cpu-draft-model"], lambda live: sources[live.request_id]
    )
    live = LiveRequest(request("a", [5, 6], mode="auto"), [5, 6])
    for source, num_accepted in (
        (DraftSource("model", False), 0),
        (DraftSource("lookup", True), 4),
    ):
        sources["a"] = source
        live.drafter = source.drafter
        for _ in range(30):
            lengths.observe(live, 4, num_accepted)
    assert lengths.choose([live])["a"] == 4
    sources["a"] = DraftSource("model", False)
    assert lengths.choose([live])["a"] == 0
    sources["a"] = None  # nobody has anything: nothing is planned, nothing probed
    assert all(lengths.choose([live])["a"] == 0 for _ in range(300))


def test_modes_and_caps_of_a_request_are_kept() -> None:
    lengths = DraftLengths(6, MACHINES["large-gpu-lookup"])
    rows = [
        LiveRequest(request("off", [5], mode="off"), [5]),
        LiveRequest(request("on", [5], mode="on"), [5]),
        LiveRequest(request("capped", [5], mode="on", max_draft_tokens=2), [5]),
        LiveRequest(request("none", [5], mode="auto", max_draft_tokens=0), [5]),
        LiveRequest(request("auto", [5], mode="auto", max_draft_tokens=3), [5]),
    ]
    chosen = lengths.choose(rows)
    assert (chosen["off"], chosen["on"], chosen["capped"], chosen["none"]) == (0, 6, 2, 0)
    assert 0 <= chosen["auto"] <= 3
    lengths.forget("auto")
    assert not lengths._estimates
