"""Accounts on the real engine: every step's price reaches its rows, counts and identities hold."""

import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from engine.request import SamplingParams
from engine.stats import RequestStats, RowStepStats, StepStats
from telemetry.clock import AnchoredClock
from telemetry.cost import CostMeter
from telemetry.latency import summarise_latency
from telemetry.ledger.queries import check_ledger, reconcile
from telemetry.ledger.records import NANOSECONDS_PER_HOUR, RequestCost
from telemetry.ledger.session import open_ledger
from telemetry.prices import fixed_price
from tests.engine.driver import request, tiny_engine
from tests.telemetry.recording_rig import recording_rig

ROOT = Path(__file__).parents[2]
PRICE = fixed_price("123.456789")
PER_HOUR = PRICE.prices[0].nano_usd_per_hour


def _run() -> tuple[list[StepStats], dict[str, RequestStats]]:
    """Six requests that join while others run, with drafts and sampling, one cancelled."""
    engine = tiny_engine(drafters=("draft_model",), max_num_rows=4, max_step_tokens=24)
    steps: list[StepStats] = []
    finished: dict[str, RequestStats] = {}
    for number in range(6):
        prompt = [5 + number, 6, 7, 8] * (3 + number)
        sampling = SamplingParams(temperature=number % 2, seed=number)
        engine.submit(request(f"r{number}", prompt, max_tokens=16, sampling=sampling))
    while engine.has_work():
        output = engine.step()
        if output.stats is not None:
            steps.append(output.stats)
            if len(steps) == 5:
                engine.cancel("r1")
        finished.update({stats.request_id: stats for stats in output.finished})
    return steps, finished


def test_each_step_is_charged_whole_and_all_add_up_to_price_times_wall() -> None:
    started = time.monotonic_ns()
    steps, finished = _run()
    accounts = CostMeter("i", PRICE, AnchoredClock(), started_nanoseconds=started)
    charged_before = 0
    for stats in steps:
        shares = accounts.on_step(stats)
        busy = sum(share.busy_nanoseconds for share in shares)
        assert 0 < busy <= stats.duration_nanoseconds
        charged = accounts._interval.cost_busy
        exact = busy * PER_HOUR / NANOSECONDS_PER_HOUR
        assert abs(charged - charged_before - exact) <= 1
        charged_before = charged
        # To the nano-dollar after every single step, rows and idle time together.
        assert sum(account.cost for account in accounts._accounts.values()) == charged
        wall = accounts._cursor - started
        due = wall * PER_HOUR // NANOSECONDS_PER_HOUR
        assert charged + accounts._interval.cost_idle == due
    ended = time.monotonic_ns()
    (interval,) = accounts.close(ended)
    costs = {name: accounts.finish(name) for name in finished}
    charged = sum(cost.cost_nano_usd for cost in costs.values())
    assert charged == interval.cost_busy_nano_usd
    due = (ended - started) * PER_HOUR // NANOSECONDS_PER_HOUR
    assert charged + interval.cost_idle_nano_usd == due
    _check_parts(costs, finished)


def _check_parts(costs: dict[str, RequestCost], finished: dict[str, RequestStats]) -> None:
    assert any(stats.num_draft_tokens for stats in finished.values())
    for name, stats in finished.items():
        cost = costs[name]
        assert cost.cost_nano_usd > 0
        assert (cost.cost_draft_nano_usd > 0) == (stats.num_draft_tokens > 0)
        rejected = stats.num_draft_tokens - stats.num_accepted_tokens
        assert (cost.cost_rejected_nano_usd > 0) == (rejected > 0)
        latency = summarise_latency(stats)
        assert latency.queue_seconds is not None
        assert latency.queue_seconds <= latency.e2e_seconds


def test_rows_of_the_ledger_say_what_speculation_cost_and_saved_on_the_real_engine(
    tmp_path: Path,
) -> None:
    engine = tiny_engine(drafters=("draft_model",), max_num_rows=4)
    with recording_rig(tmp_path, capacity_interval_seconds=0.05) as rig:
        prompt = list(range(5, 45))
        for name, mode in (("plain", "off"), ("first", "on"), ("second", "on")):
            made = request(name, prompt, max_tokens=24, mode=mode, max_draft_tokens=4)
            opened = rig.recorder.begin(made, labels={}, variant="", trace=None)
            engine.submit(made)
            while engine.has_work():
                output = engine.step()
                assert output.stats is not None
                rig.recorder.on_step(output.stats)
                for stats in output.finished:
                    done = rig.recorder.on_finished(opened, stats, status_code="OK")
            assert done.durable.result(10)
    rows = {found.request_id: found for found in rig.requests()}
    ledger = open_ledger(rig.url, read_only=True)
    money, findings = reconcile(ledger), check_ledger(ledger)
    ledger.dispose()
    assert money.charged_nano_usd == money.due_nano_usd > 0
    assert all(finding.is_good for finding in findings), findings
    for name, found in rows.items():
        parts = (
            found.cost_prefill_nano_usd,
            found.cost_decode_nano_usd,  # with the drafts' part: verification
            found.cost_draft_nano_usd,
            found.cost_drafter_nano_usd,
        )
        assert sum(parts) == found.cost_nano_usd, name
        assert (min(parts) > 0) == (name != "plain")
        num_rejected = found.num_draft_tokens - found.num_accepted_tokens
        assert (found.cost_rejected_nano_usd > 0) == (num_rejected > 0)
        assert found.cost_rejected_nano_usd <= found.cost_draft_nano_usd
        assert (found.num_cached_prompt_tokens > 0) == (name != "plain"), "the same prompt again"
        # Made of plain steps measured before, and no part of what this request cost.
        estimate = found.estimated_cost_without_speculation_nano_usd
        assert (estimate is None) == (name == "plain")
        assert estimate not in (0, found.cost_nano_usd)


def test_the_estimate_falls_back_on_what_the_engine_measured_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tiny_engine().info
    monkeypatch.setattr("tests.telemetry.recording_rig.MODEL_INFO", info)
    with recording_rig(tmp_path) as rig:
        opened = rig.begin()
        rig.run_step("r")  # three tokens in one step, and no plain step before it
        rig.finish(opened)
    (found,) = rig.requests()
    seconds = dict(info.plain_step_seconds)[1]
    assert seconds > 0
    estimate = found.estimated_cost_without_speculation_nano_usd
    assert estimate == pytest.approx(found.cost_prefill_nano_usd + 3 * seconds * 1e6, abs=1)


def test_the_engines_counts_agree_step_by_step_and_request_by_request() -> None:
    steps, finished = _run()
    for name, stats in finished.items():
        rows = [row for step in steps for row in step.rows if row.request_id == name]
        assert sum(row.num_draft_positions for row in rows) == stats.num_draft_tokens
        assert sum(row.num_accepted_tokens for row in rows) == stats.num_accepted_tokens
        assert sum(row.num_prefill_positions for row in rows) == stats.num_prefill_positions
        assert sum(row.num_emitted_tokens for row in rows) == stats.num_output_tokens
        assert sum(stats.drafted_per_position) == stats.num_draft_tokens
        assert sum(stats.accepted_per_position) == stats.num_accepted_tokens


def test_what_telemetry_reads_of_a_step_is_on_the_host_already() -> None:
    """A tensor among these values would make the reader wait for the device."""
    steps, finished = _run()
    plain = (int, float, str, type(None))
    for found in (*steps, *(row for step in steps for row in step.rows), *finished.values()):
        for spec in fields(found):
            value = getattr(found, spec.name)
            if isinstance(value, tuple):
                assert all(isinstance(item, (*plain, RowStepStats)) for item in value), spec.name
            else:
                assert isinstance(value, plain), spec.name


def test_telemetry_knows_no_tensors() -> None:
    program = (
        "import sys, telemetry.assembly, telemetry.recorder, telemetry.tracing\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
