"""Rollbacks: false ones are as rare as promised, bad candidates are caught, good ones promoted."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from service.experiments.guard_rails import (
    Action,
    ArmCounts,
    Decision,
    Evidence,
    GuardRails,
    judge,
)
from service.experiments.sequential import Interval
from tests.service.experiments.simulation import Truth, experiment, run, traffic

_RAILS = GuardRails(alpha=0.1, min_units=50)


def _actions(
    num_runs: int, candidate: Truth, control: Truth | None = None, num_requests: int = 1500
) -> Counter[Action]:
    of = experiment(rails=_RAILS)
    found: Counter[Action] = Counter()
    for seed in range(num_runs):
        requests = traffic(of, candidate, control or Truth(), num_requests=num_requests, seed=seed)
        found[run(of, requests).action] += 1
    return found


def test_equal_arms_are_rolled_back_in_at_most_alpha_of_experiments() -> None:
    same = Truth(failure_rate=0.02)
    found = _actions(150, same, same, num_requests=800)
    allowed = 0.1 + 3 * math.sqrt(0.1 * 0.9 / 150)
    assert found[Action.ROLL_BACK] / 150 <= allowed
    assert found[Action.PROMOTE] / 150 <= allowed


def test_a_loss_of_acceptance_is_detected() -> None:
    found = _actions(20, Truth(acceptance=0.7))
    assert found[Action.ROLL_BACK] >= 18


def test_a_gain_of_acceptance_is_promoted() -> None:
    found = _actions(20, Truth(acceptance=1.4))
    assert found[Action.PROMOTE] >= 18


def test_failures_of_the_candidate_are_detected_though_they_are_rare() -> None:
    found = _actions(20, Truth(failure_rate=0.05), Truth(failure_rate=0.002))
    assert found[Action.ROLL_BACK] >= 18


def test_a_small_share_of_traffic_is_enough_to_see_a_broken_candidate() -> None:
    of = experiment(weight=0.05, rails=replace(_RAILS, min_units=20))
    requests = traffic(of, Truth(acceptance=0.2), Truth(), num_requests=8000, seed=1)
    decision = run(of, requests, look_every=100)
    assert decision.action is Action.ROLL_BACK
    assert decision.rule.startswith("acceptance length: changed by -")


def test_latency_is_judged_by_slots_because_both_arms_share_their_steps() -> None:
    rails = replace(_RAILS, min_slot_requests=10)
    of = experiment(slot_seconds=60, rails=rails)
    slow = traffic(of, Truth(latency=1.4), Truth(), num_requests=6000, seed=2)
    decision = run(of, slow, look_every=60)
    assert decision.action is Action.ROLL_BACK
    assert "pairs of slots" in decision.rule
    same = traffic(of, Truth(), Truth(), num_requests=6000, seed=3)
    assert run(of, same, look_every=60).action is Action.CONTINUE


def test_latency_request_by_request_would_see_nothing() -> None:
    """Without slots the same slow candidate goes unnoticed: there is no such rail."""
    of = experiment(rails=_RAILS)
    slow = traffic(of, Truth(latency=1.4), Truth(), num_requests=2000, seed=2)
    assert run(of, slow).action is not Action.ROLL_BACK


def test_tenants_that_differ_do_not_make_false_alarms() -> None:
    """Eight tenants of unlike traffic, 3000 requests: eight draws, not 3000."""
    rails = replace(_RAILS, min_units=2, requests_per_tenant=10)
    found: Counter[Action] = Counter()
    for seed in range(40):
        of = experiment(unit="tenant", rails=rails, key=str(seed))
        requests = traffic(of, Truth(), Truth(), num_requests=1000, seed=seed, num_tenants=8)
        found[run(of, requests).action] += 1
    assert found == {Action.CONTINUE: 40}


def _counts(**changes: object) -> ArmCounts:
    base = ArmCounts(1000, 1000, 0, 0, Interval(2.0, 1.98, 2.02))
    return replace(base, **changes)  # type: ignore[arg-type]


def _judge(candidate: ArmCounts, **changes: object) -> Decision:
    evidence = replace(
        Evidence(candidate, _counts(), 0.5),
        **changes,  # type: ignore[arg-type]
    )
    return judge(evidence, GuardRails(), 0.0125)


def test_one_divergence_is_enough() -> None:
    decision = _judge(_counts(num_divergences=1))
    assert decision.action is Action.ROLL_BACK
    assert decision.rule.startswith("divergence: the auditor found 1")


def test_a_candidate_that_only_drafts_better_waits_for_its_slots() -> None:
    better = _counts(acceptance=Interval(2.3, 2.2, 2.4))
    assert _judge(better).action is Action.PROMOTE
    waiting = _judge(better, slowdowns=[0.0], p99_increases=[0.0])
    assert waiting.action is Action.CONTINUE
    assert "time per output token" in waiting.rule
    steady = [0.001 * (-1) ** index for index in range(60)]
    assert _judge(better, slowdowns=steady, p99_increases=steady).action is Action.PROMOTE


def test_nothing_is_decided_before_there_are_enough_units() -> None:
    decision = _judge(_counts(acceptance=None))
    assert decision.action is Action.CONTINUE
    assert decision.findings[2].effect is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 0.0),
        ("alpha", "0.1"),
        ("min_units", 0),
        ("min_units", 1.5),
        ("max_divergences", -1),
        ("max_failure_ratio", 0.9),
        ("max_slowdown", float("nan")),
    ],
)
def test_a_wrong_rail_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"guard_rails.{name}"):
        GuardRails(**{name: value})  # type: ignore[arg-type]
