"""What counts as an observation: the draw between the arms, and not more than it."""

from dataclasses import replace

from service.experiments.guard_rails import GuardRails
from service.experiments.tally import Observation, Tally
from tests.service.experiments.simulation import STARTED_AT, experiment

_AT = STARTED_AT.timestamp()
_ONE = Observation("candidate", "unit", _AT, False, 2.0, 0.02)


def _tally(**options: object) -> Tally:
    return Tally(experiment(**options), max_draft_tokens=4)  # type: ignore[arg-type]


def test_requests_before_the_start_and_of_other_experiments_do_not_count() -> None:
    tally = _tally()
    tally.add(replace(_ONE, at=_AT - 1))
    tally.add(replace(_ONE, variant="something else"))
    tally.add_divergence("something else")
    assert tally.counts()["candidate"].num_requests == 0
    tally.add(_ONE)
    assert tally.counts()["candidate"].num_requests == 1


def test_slots_without_the_candidate_count_for_latency_alone() -> None:
    of = experiment(slot_seconds=60, rails=GuardRails(min_units=1, min_slot_requests=1))
    assert of.slots is not None
    tally = Tally(of, max_draft_tokens=4)
    first = of.slots.index_of(_AT)
    with_candidate = first if of.slots.has_candidate(first) else first + 1
    without = first + 1 if with_candidate == first else first
    control = replace(_ONE, variant="control", is_failed=True)
    tally.add(replace(control, at=without * 60 + 1.0))
    assert tally.counts()["control"].num_requests == 0
    assert tally.counts()["control"].num_failures == 0
    tally.add(replace(control, at=with_candidate * 60 + 1.0, seconds_per_token=0.04))
    assert tally.counts()["control"].num_failures == 1
    evidence = tally.evidence("candidate", now=_AT + 600)
    assert evidence.slowdowns is not None
    assert [round(value, 3) for value in evidence.slowdowns] == [0.693]


def test_a_slot_counts_once_it_is_over_and_latecomers_change_nothing() -> None:
    of = experiment(slot_seconds=60, rails=GuardRails(min_slot_requests=1))
    tally = Tally(of, max_draft_tokens=4)
    for index in range(2):
        tally.add(replace(_ONE, at=_AT + 60 * index + 1))
    assert tally.evidence("candidate", now=_AT + 119).slowdowns == []
    assert tally.evidence("candidate", now=_AT + 300).slowdowns == [0.0]
    tally.add(replace(_ONE, at=_AT + 30, seconds_per_token=9.0))
    assert tally.evidence("candidate", now=_AT + 300).slowdowns == [0.0]


def test_acceptance_is_a_length_and_waits_for_enough_units() -> None:
    tally = _tally(rails=GuardRails(min_units=3))
    tally.add(_ONE)
    tally.add(replace(_ONE, accepted_per_step=None))
    tally.add(_ONE)
    assert tally.counts()["candidate"].acceptance is None
    tally.add(_ONE)
    found = tally.counts()["candidate"]
    assert found.acceptance is not None
    assert found.acceptance.estimate == 3.0
    assert (found.num_requests, found.num_units) == (4, 3)


def test_a_tenant_is_one_observation_and_one_failure() -> None:
    tally = _tally(unit="tenant", rails=GuardRails(min_units=1, requests_per_tenant=2))
    for accepted in (1.0, 3.0, 4.0, 4.0):
        tally.add(replace(_ONE, accepted_per_step=accepted, is_failed=True))
    found = tally.counts()["candidate"]
    assert found.acceptance is not None
    assert (found.num_units, found.acceptance.estimate, found.num_failures) == (1, 3.0, 1)


def test_the_expected_share_of_failures_follows_the_weights() -> None:
    assert _tally(weight=0.1).evidence("candidate", now=_AT).candidate_share == 0.1


def test_a_long_past_that_is_read_at_once_keeps_figures_and_not_values() -> None:
    of = experiment(slot_seconds=60, rails=GuardRails(min_slot_requests=1))
    tally = Tally(of, max_draft_tokens=4)
    for index in range(400):
        tally.add(replace(_ONE, at=_AT + 60 * index + 1))
    assert len(tally._latencies) <= 40
    differences = tally.evidence("candidate", now=_AT + 60 * 500).slowdowns
    assert differences == [0.0] * 200
