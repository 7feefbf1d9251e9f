"""Cost and energy as the ledger holds them: split, added up and, where unknown, NULL."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from telemetry.cost import CostMeter
from telemetry.ledger import models
from telemetry.ledger.queries import ledger_stats, reconcile
from telemetry.ledger.records import InstanceRecord, Record, RequestRecord
from telemetry.ledger.recovery import close_orphans
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.prices import PriceSchedule, read_price_book, schedule_of
from tests.telemetry.ledger_records import MODEL, request_record, start_record
from tests.telemetry.recording_rig import Rig, recording_rig
from tests.telemetry.step_stats import row, step
from tests.telemetry.test_cost import DAY, SECOND, FixedClock, _price_times_wall

BOOK = """
version = "day"
[[price]]
machine_type = "box"
purchase = "reserved"
per_hour = "1.234567891"
embodied_per_hour = "0.3"
valid_from = 2026-01-01T00:00:00Z
valid_to = 2026-03-01T07:13:00Z
[[price]]
machine_type = "box"
purchase = "reserved"
per_hour = "0.987654321"
embodied_per_hour = "0.1"
valid_from = 2026-03-01T07:13:00Z
[[price]]
machine_type = "box"
purchase = "spot"
per_hour = "0.30"
currency = "EUR"
usd_per_unit = "1.111111111"
valid_from = 2026-01-01T00:00:00Z
valid_to = 2026-03-01T16:59:59Z
[[price]]
machine_type = "box"
purchase = "spot"
per_hour = "0.50"
currency = "EUR"
usd_per_unit = "1.111111111"
valid_from = 2026-03-01T16:59:59Z
"""


class Counter:
    """An energy counter that a test turns; it counts how often it was read."""

    name = "rapl"

    def __init__(self) -> None:
        self.microjoules: int | None = 0
        self.num_reads = 0

    def read_microjoules(self) -> int | None:
        self.num_reads += 1
        return self.microjoules


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """The counter that a recorder finds on this machine, read several times a second."""
    found = Counter()
    monkeypatch.setattr("telemetry.assembly.find_energy_source", lambda device: found)
    monkeypatch.setattr("telemetry.energy.WINDOW_SECONDS", 0.05)
    return found


def _wait_for_windows(counter: Counter, count: int = 2) -> None:
    seen, patience_until = counter.num_reads, time.monotonic() + 10
    while counter.num_reads < seen + count:
        assert time.monotonic() < patience_until, "no window ended"
        time.sleep(0.005)


def _share_steps(rig: Rig) -> None:
    """Two steps in which "a" has three positions out of four."""
    for index in range(2):
        started = time.monotonic_ns()
        time.sleep(0.002)
        rows = (row("a", prefill=3, decode=0), row("b"))
        rig.recorder.on_step(step(started, time.monotonic_ns() - started, *rows, index=index))


def test_measured_energy_reaches_the_rows_by_token_positions(
    tmp_path: Path, counter: Counter
) -> None:
    with recording_rig(tmp_path, capacity_interval_seconds=0.01) as rig:
        requests = [rig.begin(name) for name in "ab"]
        _wait_for_windows(counter)
        _share_steps(rig)
        counter.microjoules = 8_000_000
        _wait_for_windows(counter, 3)
        for request in requests:
            rig.finish(request)
    rows = {found.request_id: found for found in rig.requests()}
    a, b = (rows[name].energy_microjoules or 0 for name in "ab")
    assert 0 < b < a < 8_000_000
    assert a == pytest.approx(3 * b, rel=1e-3)
    assert {found.energy_source for found in rows.values()} == {"rapl"}
    intervals = rig.rows(models.CapacityInterval)
    assert {interval.energy_source for interval in intervals} == {"rapl"}
    busy = sum(interval.energy_busy_microjoules or 0 for interval in intervals)
    idle = sum(interval.energy_idle_microjoules or 0 for interval in intervals)
    assert busy == a + b
    assert busy + idle == 8_000_000


def test_energy_that_was_not_measured_is_null_with_its_source(
    tmp_path: Path, counter: Counter
) -> None:
    with recording_rig(tmp_path) as rig:
        requests = [rig.begin(name) for name in "ab"]
        _wait_for_windows(counter)
        _share_steps(rig)
        counter.microjoules = None
        _wait_for_windows(counter)
        for request in requests:
            rig.finish(request)
    assert [(r.energy_microjoules, r.energy_source) for r in rig.requests()] == [(None, "rapl")] * 2


def test_the_estimate_without_speculation_is_a_column_apart_and_null_while_unknown(
    tmp_path: Path,
) -> None:
    with recording_rig(tmp_path) as rig:
        unknown, known = rig.begin("unknown"), rig.begin("known")
        at = time.monotonic_ns()
        rig.recorder.on_step(step(at, 1_000_000, row("unknown", draft=4, accepted=4)))
        rig.finish(unknown)
        for index in range(1, 5):  # what a plain step of one row takes
            rig.recorder.on_step(step(at + index * 2_000_000, 1_000_000, row("other"), index=index))
        rig.recorder.on_step(step(at + 20_000_000, 2_000_000, row("known", draft=4, accepted=4)))
        rig.finish(known)
    rows = {found.request_id: found for found in rig.requests()}
    assert rows["unknown"].estimated_cost_without_speculation_nano_usd is None
    assert rows["unknown"].cost_nano_usd == 1_000
    assert rows["known"].cost_nano_usd == 2_000
    assert rows["known"].estimated_cost_without_speculation_nano_usd == 5_000
    assert rows["known"].num_cached_prompt_tokens == 3


STARTS = (0, 5, 9, 13, 18)  # hours of the day; the server of 5 is killed, and down for a minute
KILLED = 1
DOWN = 60 * SECOND


def _live_through(
    store: LedgerStore, meter: CostMeter, clock: FixedClock, name: str, started: int, ended: int
) -> None:
    """Steps of up to a minute, requests that come and go, rows filed as they end."""
    random_ = random.Random(name)
    price = meter.price
    is_killed = name == f"i{KILLED}"
    server = InstanceRecord(name, "node", "host", "1", clock.utc(started), clock.utc(started))
    batch: list[Record] = [server]
    live: dict[str, RequestRecord] = {}
    now, number = started, 0
    while True:
        now += random_.choice((0, 0, random_.randrange(90 * SECOND)))
        duration = random_.randrange(1, 60 * SECOND)
        if now + duration > ended:
            break
        if len(live) < 6:
            number += 1
            record = request_record(f"{name}-{number}", instance_id=name, price=meter.price)
            live[record.request_id] = replace(record, started_at=clock.utc(now))
            batch.append(start_record(live[record.request_id]))
        rows = [
            row(request_id, random_.randrange(40), 1, drafted := random_.randrange(5), drafted // 2)
            for request_id in live
        ]
        meter.on_step(step(now, duration, *rows, propose_nanoseconds=duration // 9))
        now += duration
        if random_.random() < 0.4:
            request_id = random_.choice(list(live))
            cost = replace(meter.finish(request_id), energy_source="none")
            batch.append(replace(live.pop(request_id), cost=cost, finished_at=clock.utc(now)))
        if random_.random() < 0.05:
            store.write([*batch, *meter.take_closed()], may_exist=False)
            batch = []
    assert price.purchase == meter.price.purchase
    if is_killed:  # what was in memory is gone, the requests that ran among it
        assert live
        seen = replace(server, last_seen_at=clock.utc(ended))
        store.write([*batch, seen], may_exist=False)
        return
    intervals = meter.close(ended)
    batch += [
        replace(record, cost=meter.finish(request_id), finished_at=clock.utc(ended))
        for request_id, record in live.items()
    ]
    stopped = replace(server, last_seen_at=clock.utc(ended), stopped_at=clock.utc(ended))
    store.write([*batch, *intervals, stopped], may_exist=False)


@pytest.mark.parametrize("purchase", ["reserved", "spot"])
def test_a_day_with_restarts_is_price_times_wall_in_the_ledger_to_the_nano_dollar(
    tmp_path: Path, purchase: str
) -> None:
    book = tmp_path / "prices.toml"
    book.write_text(BOOK)
    prices = schedule_of(read_price_book(book), "box", purchase)
    url, clock = f"sqlite:///{tmp_path}/ledger.db", FixedClock()
    migrate(url)
    engine = open_ledger(url)
    store = LedgerStore(engine)
    due, embodied = 0, 0
    of_manufacture = PriceSchedule(
        tuple(replace(p, nano_usd_per_hour=p.embodied_nano_usd_per_hour) for p in prices.prices)
    )
    for index, hour in enumerate(STARTS):
        name, started = f"i{index}", hour * DAY // 24
        ended = (*STARTS, 24)[index + 1] * DAY // 24 - (DOWN if index == KILLED else 0)
        num_orphans = close_orphans(engine, store, node="node", instance_id=name)
        assert (num_orphans > 0) == (index == KILLED + 1)
        meter = CostMeter(
            name, prices, clock, started_nanoseconds=started, model=MODEL, interval_seconds=600
        )
        _live_through(store, meter, clock, name, started, ended)
        due += _price_times_wall(prices, clock, started, ended)
        embodied += _price_times_wall(of_manufacture, clock, started, ended)
    interval = models.CapacityInterval
    with Session(engine) as session:
        requests, num_requests = session.execute(
            select(func.sum(models.Request.cost_nano_usd), func.count())
        ).one()
        idle, lost, wall = session.execute(
            select(
                func.sum(interval.cost_idle_nano_usd),
                func.sum(interval.cost_lost_nano_usd),
                func.sum(interval.wall_nanoseconds),
            )
        ).one()
        purchases = session.execute(select(models.Price.purchase, func.count())).all()
        by_price = session.execute(
            select(models.Price.nano_usd_per_hour, func.count())
            .join(interval, interval.price_key == models.Price.price_key)
            .group_by(models.Price.price_key)
        ).all()
    assert num_requests > 200
    assert wall == DAY - DOWN
    assert min(idle, lost) > 0
    assert requests + idle + lost == due
    assert purchases == [(purchase, 2)]  # both periods of the book, and no other entry
    assert {per_hour for per_hour, _ in by_price} == {p.nano_usd_per_hour for p in prices.prices}
    money = reconcile(engine)
    assert (money.num_instances, money.differing) == (len(STARTS), {})
    assert money.charged_nano_usd == money.due_nano_usd == due
    # Each part of the day is rounded down above, the day as a whole here.
    assert 0 <= ledger_stats(engine).embodied_cost_nano_usd - embodied < len(STARTS)
    assert (embodied > 0) == (purchase == "reserved")
    engine.dispose()
