"""The simulated fleet: its arithmetic, its limits, and the autoscaler of the manifests."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simpy

from exports.sample.trace import Trace
from tests.benchmarks.fleet import (
    RECORDED_COST,
    jobs_of,
    reaction,
    replay,
    simulate,
)
from tests.benchmarks.fleet_autoscaler import Autoscaler, Reading, read_policy
from tests.benchmarks.fleet_limits import ExportSchedule, demands, first_to_give, read_schedule
from tests.benchmarks.fleet_model import Fleet, Job, Shape
from tests.k8s.manifests import K8S

SCALE = K8S / "base" / "scale.yaml"
SHAPE = Shape(RECORDED_COST, 16, 256, 46_000, 0.0, 45.0)
SECONDS = 600.0


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Ten minutes of about two requests per second, of this test's own making."""
    chance = np.random.default_rng(0)
    arrivals = np.sort(chance.uniform(0, SECONDS, 1200))
    prompts = chance.integers(50, 2000, 1200)
    return [Trace("made up", arrivals, prompts, chance.integers(5, 300, 1200))]


def test_one_request_alone_takes_what_the_cost_table_says() -> None:
    job = Job(0.0, 700, 41)
    env = simpy.Environment()
    fleet = Fleet(env, SHAPE)
    fleet.grow(1, 0.0)
    env.process(fleet.feed([job]))
    env.run(until=100)
    cost = SHAPE.cost
    prefill = cost.forward_seconds(512) + cost.forward_seconds(188)
    assert job.first_token_at == pytest.approx(prefill)
    assert job.finished_at == pytest.approx(prefill + 40 * cost.forward_seconds(1))


def test_rows_share_a_step_and_a_full_batch_makes_others_wait() -> None:
    shape = replace(SHAPE, max_num_rows=2)
    jobs = [Job(0.0, 1, 101) for _ in range(3)]
    env = simpy.Environment()
    fleet = Fleet(env, shape)
    fleet.grow(1, 0.0)
    env.process(fleet.feed(jobs))
    env.run(until=100)
    first, _, last = sorted(jobs, key=lambda job: job.finished_at)
    step = shape.cost.forward_seconds(2)
    assert first.finished_at == pytest.approx(100 * step, rel=0.05)
    assert last.started_at == pytest.approx(first.finished_at)


def test_a_full_queue_refuses_and_nobody_is_lost(traces: list[Trace]) -> None:
    shape = replace(SHAPE, max_num_waiting=2)
    policy = replace(read_policy(SCALE), min_replicas=1, max_replicas=1)
    result = simulate(jobs_of(traces, 1, SECONDS, seed=0), shape, policy, SECONDS)
    assert result["num_requests"] == 1200
    assert 0 < result["num_refused"] < 1200
    assert result["replicas_peak"] == 1


def test_speculation_helps_few_rows_and_never_slows_any() -> None:
    fast = replace(SHAPE, acceptance=0.7)
    assert fast.tokens_per_second(1) > 1.5 * SHAPE.tokens_per_second(1)
    for rows in (1, 4, 16, 64):
        assert fast.tokens_per_second(rows) >= SHAPE.tokens_per_second(rows)


def test_the_policy_is_that_of_the_manifest() -> None:
    policy = read_policy(SCALE)
    assert (policy.min_replicas, policy.max_replicas) == (2, 20)
    assert (policy.waiting_target, policy.rows_target, policy.goodput_target) == (2, 12, 0.85)
    assert (policy.up_share, policy.up_pods, policy.up_period_seconds) == (1.0, 2, 60)
    assert (policy.down_window_seconds, policy.down_pods) == (900, 1)


def test_the_autoscaler_doubles_at_most_per_minute_and_shrinks_one_by_one() -> None:
    policy = read_policy(SCALE, 64)
    env = simpy.Environment()
    fleet = Fleet(env, SHAPE)
    fleet.grow(2, 0.0)
    scaler = Autoscaler(fleet, policy)
    # Five minutes far beyond what two replicas can do, and then nothing.
    jobs = [Job(index / 20, 500, 100) for index in range(6000)]
    env.process(fleet.feed(jobs))
    env.run(until=3600)
    sizes = [(reading.at, reading.num_replicas) for reading in scaler.readings]
    for (at, size), (later, size_later) in itertools.combinations(sizes, 2):
        if later - at < policy.up_period_seconds and later < 300:
            assert size_later <= max(2 * size, size + 2)
        if later - at < policy.down_period_seconds:
            assert size - size_later <= 1
    peak = max(size for _, size in sizes)
    assert peak > 10
    assert sizes[-1][1] < peak
    first_fall = next(at for (at, size), (_, after) in itertools.pairwise(sizes) if after < size)
    last_busy = max(reading.at for reading in scaler.readings if reading.num_rows)
    assert first_fall > last_busy - policy.down_window_seconds
    assert len(fleet.jobs()) + fleet.num_refused == 6000


def test_the_autoscaler_reacts_to_goodput_alone() -> None:
    policy = replace(read_policy(SCALE), waiting_target=1e9, rows_target=1e9, min_replicas=1)
    sizes = []
    for target in (policy.goodput_target, 1e9):
        env = simpy.Environment()
        fleet = Fleet(env, SHAPE)
        fleet.grow(1, 0.0)
        scaler = Autoscaler(fleet, replace(policy, goodput_target=target))
        env.process(fleet.feed([Job(index / 10, 5, 400) for index in range(3000)]))
        env.run(until=300)
        sizes.append(max(reading.num_replicas for reading in scaler.readings))
    assert sizes[0] > sizes[1] == 1


def test_a_new_replica_takes_requests_only_once_it_is_ready() -> None:
    env = simpy.Environment()
    fleet = Fleet(env, SHAPE)
    fleet.grow(1, 45.0)
    env.process(fleet.feed([Job(10.0, 10, 2), Job(46.0, 10, 2)]))
    env.run(until=60)
    assert (len(fleet.jobs()), fleet.num_refused) == (1, 1)


def test_more_traffic_takes_more_replicas_at_about_the_same_price(traces: list[Trace]) -> None:
    small, large = (replay(traces, n, SHAPE, SCALE, 0.2, SECONDS, 8) for n in (1, 6))
    assert small["num_fleets"] == 1
    assert large["num_fleets"] > 1
    assert large["one_fleet"]["replicas_peak"] <= 8
    assert 3 < large["replicas_mean"] / small["replicas_mean"] < 9
    assert large["requests_per_second"] == pytest.approx(6 * small["requests_per_second"], rel=0.1)
    assert replay(traces, 1, SHAPE, SCALE, 0.2, SECONDS, 8) == small


def test_a_surge_makes_the_fleet_grow(traces: list[Trace]) -> None:
    found = reaction(traces, SHAPE, SCALE, SECONDS)
    readings = [Reading(**reading) for reading in found["readings"]]
    begin, end = found["surge_seconds"]
    before = max(reading.num_replicas for reading in readings if reading.at < begin)
    assert max(r.num_replicas for r in readings if begin <= r.at < end + 60) > before


def test_demands_are_shares_of_what_was_measured() -> None:
    ledger = {"sqlite_rows_per_second": 1000, "postgresql_rows_per_second": 500}
    exports = {"bytes_per_row": 40, "rows_per_cpu_second": 86_400}
    found = demands(250.0, ledger, exports, ExportSchedule(21_600.0, 3600.0))
    assert found["ledger"]["share_of_postgresql"] == 0.5
    assert found["exports"]["last_run_seconds"] == 250
    # Four runs of a day write a quarter, a half, three quarters and all of it.
    assert found["exports"]["cores"] == pytest.approx(250 * 2.5 / 86_400, abs=1e-4)
    assert found["exports"]["gigabytes_per_day"] == pytest.approx(250 * 86_400 * 40 / 1e9, abs=0.01)


def test_what_gives_first_is_where_a_run_of_the_export_takes_its_whole_time() -> None:
    schedule = read_schedule(K8S / "base" / "export.yaml")
    assert schedule == ExportSchedule(900.0, 3600.0)
    ledger = {"sqlite_rows_per_second": 1, "postgresql_rows_per_second": 3000}
    exports = {"bytes_per_row": 1, "rows_per_cpu_second": 86_400}
    found = first_to_give(30.0, ledger, exports, schedule)
    assert list(found.items()) == [
        ("replicas of a fleet", 30.0),
        ("period of the export", 900.0),
        ("half of PostgreSQL", 1500.0),
        ("deadline of the export", 3600.0),
    ]
    last = demands(900.0, ledger, exports, schedule)["exports"]["last_run_seconds"]
    assert last == schedule.period_seconds


def test_a_schedule_that_the_plan_cannot_read_is_refused(tmp_path: Path) -> None:
    text = (K8S / "base" / "export.yaml").read_text(encoding="utf-8")
    path = tmp_path / "export.yaml"
    path.write_text(text.replace("*/15 * * * *", "0 3 * * *"), encoding="utf-8")
    with pytest.raises(ValueError, match="schedule"):
        read_schedule(path)
