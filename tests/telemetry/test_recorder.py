"""The recorder: every outcome gets one row, money adds up, and no failure reaches a request."""

import logging
import threading
import time
from pathlib import Path

import pytest

from engine.request import FinishReason
from engine.stats import StepStats
from telemetry.ledger import models
from telemetry.ledger.journal import Journal
from telemetry.ledger.queries import reconcile
from telemetry.ledger.records import NANOSECONDS_PER_HOUR, Verdict
from telemetry.ledger.session import open_ledger
from telemetry.prices import fixed_price
from telemetry.pseudonym import TenantKey
from telemetry.recording import AuditFinding
from tests.telemetry.recording_rig import recording_rig


@pytest.mark.parametrize(
    ("status_code", "outcome"),
    [
        ("OK", "completed"),
        ("CANCELLED", "cancelled"),
        ("DEADLINE_EXCEEDED", "deadline_exceeded"),
        ("RESOURCE_EXHAUSTED", "failed"),
        ("INTERNAL", "failed"),
    ],
)
def test_every_outcome_is_a_row(tmp_path: Path, status_code: str, outcome: str) -> None:
    with recording_rig(tmp_path) as rig:
        request = rig.begin()
        rig.run_step("r")
        done = rig.finish(request, status_code, finish_reason=FinishReason.CANCELLED)
        assert done.durable.result(10)
        (found,) = rig.requests()
    assert (found.outcome, found.status_code) == (outcome, status_code)
    assert found.finish_reason == "cancelled"
    assert found.cost_nano_usd == done.cost.cost_nano_usd > 0
    assert found.ttft_seconds == done.latency.ttft_seconds == pytest.approx(0.5)
    assert (found.temperature, found.seed, found.max_tokens) == (0.5, 9, 256)
    assert found.labels == {"team": "x"}
    assert found.num_output_tokens == 11
    assert found.energy_source in ("none", "rapl")


def test_refused_and_lost_requests_are_rows_too(tmp_path: Path) -> None:
    with recording_rig(tmp_path) as rig:
        rig.recorder.on_refused(
            "", status_code="INVALID_ARGUMENT", reason="invalid", error="prompt: empty"
        )
        request = rig.begin("lost")
        rig.run_step("lost")
        rig.recorder.on_lost(request, status_code="ABORTED", error="the engine died")
        with pytest.raises(ValueError, match="finished before"):
            rig.recorder.on_lost(request, status_code="ABORTED", error="again")
    refused, lost = rig.requests()
    assert (refused.outcome, refused.cost_nano_usd) == ("refused", 0)
    assert (lost.outcome, lost.error) == ("failed", "the engine died")
    assert lost.cost_nano_usd > 0


def test_nothing_that_a_caller_sends_keeps_its_refusal_out_of_the_ledger(
    ledger_url: str, tmp_path: Path
) -> None:
    with recording_rig(tmp_path, url=ledger_url) as rig:
        for request_id in ("x" * 5_000, "a\x00b", "\ud800", "same", "same"):
            rig.recorder.on_refused(
                request_id,
                status_code="INVALID_ARGUMENT",
                reason="invalid",
                error="labels: \x00" + "y" * 5_000,
                tenant="t\x00\ud800",
                labels={f"k\x00{n}" * 50: "\ud800" * 500 for n in range(100)},
            )
        lost = rig.begin("lost")
        rig.recorder.on_lost(lost, status_code="INTERNAL", error="\x00" * 10 + "z" * 5_000)
    assert len(rig.requests()) == 6
    assert not list((tmp_path / "journal").glob("aside-*"))


def test_tenants_are_pseudonyms_that_stay_the_same_over_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with recording_rig(tmp_path) as rig:
            rig.finish(rig.begin(tenant="acme"))
            rig.finish(rig.begin(tenant="other"))
            rig.finish(rig.begin(tenant=""))
    tenants = rig.rows(models.Tenant)
    assert len(tenants) == 2
    assert len({row.tenant_key for row in rig.requests()}) == 3
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("ledger.db*"))
    assert b"acme" not in stored


def test_a_rotated_key_gives_new_pseudonyms_under_its_own_id(tmp_path: Path) -> None:
    keys = [TenantKey("k1", b"1" * 16), TenantKey("k2", b"2" * 16)]
    for key in (*keys, keys[1]):
        with recording_rig(tmp_path, tenant_key=key) as rig:
            rig.finish(rig.begin("r", tenant="acme"))
    tenants = {(row.key_id, row.pseudonym) for row in rig.rows(models.Tenant)}
    assert {key_id for key_id, _ in tenants} == {"k1", "k2"}
    assert len({pseudonym for _, pseudonym in tenants}) == len(tenants) == 2
    assert "acme" not in str(tenants)


def test_attempts_count_over_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with recording_rig(tmp_path) as rig:
            rig.finish(rig.begin("again"))
            rig.finish(rig.begin("again"))
    assert sorted(row.attempt for row in rig.requests()) == [1, 2, 3, 4]


def test_requests_and_idle_are_price_times_wall_in_the_ledger(tmp_path: Path) -> None:
    with recording_rig(tmp_path, capacity_interval_seconds=0.05) as rig:
        for number in range(10):
            names = [f"r{number}-{n}" for n in range(3)]
            requests = [rig.begin(name) for name in names]
            for _ in range(4):
                rig.run_step(*names)
            for request in requests:
                rig.finish(request)
            time.sleep(0.01)
    intervals = rig.rows(models.CapacityInterval)
    assert len(intervals) > 1
    charged = sum(row.cost_nano_usd for row in rig.requests())
    idle = sum(row.cost_idle_nano_usd for row in intervals)
    wall = sum(row.wall_nanoseconds for row in intervals)
    assert charged + idle == wall * 3_600_000_000 // NANOSECONDS_PER_HOUR
    assert charged == sum(row.cost_busy_nano_usd for row in intervals)
    assert idle > 0
    assert sum(row.num_steps for row in intervals) == 40


def test_prices_that_change_while_running_and_between_starts_reconcile(tmp_path: Path) -> None:
    for _ in range(2):  # the second start begins with the first price again
        with recording_rig(tmp_path, capacity_interval_seconds=0.02) as rig:
            for number in range(6):
                request = rig.begin(f"r{number}")
                rig.run_step(f"r{number}")
                if number == 3:
                    rig.recorder.reprice(fixed_price("7.77"))
                rig.run_step(f"r{number}")
                rig.finish(request)
    engine = open_ledger(rig.url, read_only=True)
    money = reconcile(engine)
    engine.dispose()
    assert money.num_instances == 2
    assert money.differing == {}
    assert money.charged_nano_usd == money.due_nano_usd > 0
    prices = rig.rows(models.Price)
    assert sorted(price.nano_usd_per_hour for price in prices) == [3_600_000_000, 7_770_000_000]


def test_a_killed_server_is_closed_at_the_next_start_and_its_cost_still_reconciles(
    tmp_path: Path,
) -> None:
    with recording_rig(tmp_path) as rig:
        done, running = rig.begin("done"), rig.begin("running")
        rig.run_step("done", "running")
        assert rig.finish(done).durable.result(10)
        first_instance = rig.recorder._instance.instance_id
        # As kill -9 leaves it: neither intervals nor a farewell are written.
        rig.recorder._writer.close()
        rig.recorder._live._closing.set()
        rig.recorder._is_closed = True
    with recording_rig(tmp_path) as rig:
        time.sleep(0.2)
    assert running.request_id == "running"
    rows = {row.request_id: row for row in rig.requests()}
    assert rows["done"].outcome == "completed"
    assert rows["running"].outcome == "orphaned"
    assert rig.rows(models.RequestStart) == []
    dead = next(i for i in rig.rows(models.Instance) if i.instance_id == first_instance)
    assert dead.stopped_at is not None
    (interval,) = (i for i in rig.rows(models.CapacityInterval) if i.instance_id == first_instance)
    total = interval.cost_busy_nano_usd + interval.cost_idle_nano_usd + interval.cost_lost_nano_usd
    assert total == interval.wall_nanoseconds * 3_600_000_000 // NANOSECONDS_PER_HOUR
    assert interval.cost_busy_nano_usd == rows["done"].cost_nano_usd
    assert interval.cost_lost_nano_usd >= 0


def test_the_engine_thread_only_queues_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording_rig(tmp_path) as rig:
        threads: set[int] = set()
        real = rig.recorder._live._accounting.on_step

        def on_step(stats: StepStats) -> None:
            threads.add(threading.get_ident())
            real(stats)

        monkeypatch.setattr(rig.recorder._live._accounting, "on_step", on_step)
        request = rig.begin()
        with rig.recorder._live._lock:  # telemetry is busy; the engine must not wait for it
            rig.run_step("r")
        deadline = time.monotonic() + 10
        while not threads and time.monotonic() < deadline:
            time.sleep(0.01)
        rig.finish(request)
    assert threads == {rig.recorder._live._thread.ident}


def test_audits_are_filed(tmp_path: Path) -> None:
    with recording_rig(tmp_path) as rig:
        rig.recorder.on_audit(
            AuditFinding("r", Verdict.DIVERGENCE, 10, 2, 4, 0.5, 1e-3, 0.01, "prompt_lookup")
        )
        points = rig.metrics()["tandem.audit.results"].data.data_points
        counted = {point.attributes["tandem.audit.verdict"]: point.value for point in points}
        assert counted == {"exact": 0, "numeric_tie": 0, "divergence": 1}
    (audit,) = rig.rows(models.AuditResult)
    assert (audit.verdict, audit.first_mismatch_index, audit.guarantee) == (
        "divergence",
        4,
        "bit_exact",
    )


def test_a_ledger_that_never_answers_costs_no_request_and_waits_in_the_journal(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    url = f"sqlite:///{blocked}/ledger.db"
    with recording_rig(tmp_path, url=url) as rig:
        assert rig.finish(rig.begin()).durable.result(10)
    with Journal(tmp_path / "journal") as journal:
        kept = [r for s in journal.segments() for r in journal.read(s).records]
    assert any(type(record).__name__ == "RequestRecord" for record in kept)


def test_a_failing_metric_is_logged_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with recording_rig(tmp_path) as rig:

        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(rig.recorder._metrics, "on_finished", broken)
        assert rig.finish(rig.begin()).durable.result(10)
    assert any(record.levelno == logging.ERROR for record in caplog.records)
