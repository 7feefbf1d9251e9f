"""Cost: requests + idle = price x wall time, to the nano-dollar, whatever happens."""

import itertools
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.clock import AnchoredClock
from telemetry.cost import CostMeter, split_by_weight
from telemetry.ledger.records import NANOSECONDS_PER_HOUR, CapacityRecord
from telemetry.prices import PriceSchedule, fixed_price
from tests.telemetry.ledger_records import PRICE
from tests.telemetry.step_stats import row, step

SECOND = 1_000_000_000
DAY = 24 * 3600 * SECOND


class FixedClock(AnchoredClock):
    """Monotonic zero is midnight of 1 March 2026."""

    def __init__(self) -> None:
        super().__init__()
        midnight = datetime(2026, 3, 1, tzinfo=UTC)
        self._offset_nanoseconds = int(midnight.timestamp()) * SECOND


def meter(prices: PriceSchedule | None = None, started: int = 0, **options: float) -> CostMeter:
    schedule = prices or PriceSchedule((PRICE,))
    return CostMeter("i", schedule, FixedClock(), started_nanoseconds=started, **options)  # type: ignore[arg-type]


@given(
    st.integers(0, 10**15),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(lambda w: sum(w) > 0),
)
def test_parts_add_up_and_none_is_a_unit_off_its_share(total: int, weights: list[int]) -> None:
    parts = split_by_weight(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < sum(weights)


def test_what_cannot_be_split_is_refused() -> None:
    for total, weights in ((5, [0, 0]), (5, []), (-1, [1])):
        with pytest.raises(ValueError, match="cannot split"):
            split_by_weight(total, weights)


def test_a_step_is_paid_by_position_and_the_gap_before_it_is_idle() -> None:
    """3.6 dollars an hour are 1 nano-dollar per nanosecond x 1000: a second costs 1e6."""
    accounts = meter()
    accounts.on_step(step(SECOND, SECOND, row("a", prefill=6, decode=0), row("b", draft=3)))
    assert accounts.finish("a").cost_nano_usd == 600_000
    assert accounts.finish("b").cost_nano_usd == 400_000
    (interval,) = accounts.close(3 * SECOND)
    assert (interval.cost_busy_nano_usd, interval.cost_idle_nano_usd) == (1_000_000, 2_000_000)
    assert (interval.busy_nanoseconds, interval.idle_nanoseconds) == (SECOND, 2 * SECOND)


def test_a_request_pays_for_its_own_rejected_drafts_and_no_neighbour_does() -> None:
    accounts = meter()
    accounts.on_step(step(0, SECOND, row("a"), row("b", draft=4, accepted=1)))
    lucky, guessing = accounts.finish("a"), accounts.finish("b")
    assert lucky.cost_nano_usd == 1_000_000 // 6 + 1
    assert lucky.cost_rejected_nano_usd == 0
    assert guessing.cost_draft_nano_usd == pytest.approx(4 / 6 * 1e6, abs=1)
    assert guessing.cost_rejected_nano_usd == pytest.approx(3 / 6 * 1e6, abs=1)


def test_the_parts_of_a_cost_add_up_to_it() -> None:
    accounts = meter()
    for index in range(50):
        rows = (row("a", prefill=index % 3, draft=index % 5, accepted=index % 5 // 2), row("b"))
        accounts.on_step(step(index * 7_777_777, 7_654_321, *rows, propose_nanoseconds=1_234_567))
    cost = accounts.finish("a")
    parts = (
        cost.cost_prefill_nano_usd,
        cost.cost_decode_nano_usd,
        cost.cost_draft_nano_usd,
        cost.cost_drafter_nano_usd,
    )
    assert sum(parts) == cost.cost_nano_usd
    assert all(part > 0 for part in parts)
    assert 0 < cost.cost_rejected_nano_usd < cost.cost_draft_nano_usd


def test_time_is_never_paid_twice_when_steps_seem_to_overlap() -> None:
    accounts = meter()
    accounts.on_step(step(0, SECOND, row("a")))
    accounts.on_step(step(SECOND - 5, SECOND, row("a")))
    (interval,) = accounts.close(2 * SECOND)
    assert interval.busy_nanoseconds + interval.idle_nanoseconds == 2 * SECOND
    assert accounts.finish("a").cost_nano_usd == interval.cost_busy_nano_usd


def test_a_step_without_positions_is_idle_time() -> None:
    accounts = meter()
    accounts.on_step(step(0, SECOND))
    (interval,) = accounts.close(SECOND)
    assert (interval.busy_nanoseconds, interval.num_steps) == (0, 1)


def test_a_price_change_within_a_step_is_paid_exactly() -> None:
    change = datetime(2026, 3, 1, 0, 0, 1, tzinfo=UTC)
    cheap = replace(PRICE, valid_to=change)
    dear = replace(PRICE, valid_from=change, nano_usd_per_hour=2 * PRICE.nano_usd_per_hour)
    accounts = meter(PriceSchedule((cheap, dear)))
    accounts.on_step(step(SECOND // 2, SECOND, row("a")))
    first, second = accounts.close(2 * SECOND)
    assert accounts.finish("a").cost_nano_usd == 500_000 + 1_000_000
    assert (first.price, first.wall_nanoseconds) == (cheap, SECOND)
    assert (second.price, second.wall_nanoseconds) == (dear, SECOND)
    assert second.cost_busy_nano_usd == second.cost_idle_nano_usd == 1_000_000


def test_a_simulated_day_reconciles_to_the_nano_dollar_with_restarts_and_price_changes() -> None:
    random_ = random.Random(7)
    prices = _three_prices()
    clock = FixedClock()
    charged, intervals, wall_cost = 0, list[CapacityRecord](), 0
    cursor = 0
    num_steps = 0
    while cursor < DAY:
        started, ended = cursor, min(DAY, cursor + random_.randrange(3600, 7 * 3600) * SECOND)
        accounts = CostMeter("i", prices, clock, started_nanoseconds=started)
        now = started
        while True:
            now += int(random_.expovariate(1 / 20) * SECOND) if random_.random() < 0.1 else 0
            duration = random_.randrange(1, 10 * SECOND)
            if now + duration > ended:
                break
            live = random_.sample(range(12), random_.randrange(1, 12))
            rows = [
                row(f"r{n}", random_.randrange(0, 90), 1, k := random_.randrange(5), k // 2)
                for n in live
            ]
            accounts.on_step(step(now, duration, *rows, propose_nanoseconds=duration // 9))
            num_steps += 1
            now += duration
            if random_.random() < 0.2:
                charged += accounts.finish(f"r{live[0]}").cost_nano_usd
        intervals += accounts.close(ended)
        charged += sum(accounts.finish(f"r{n}").cost_nano_usd for n in range(12))
        wall_cost += _price_times_wall(prices, clock, started, ended)
        cursor = ended
    assert num_steps > 10_000
    idle = sum(interval.cost_idle_nano_usd for interval in intervals)
    assert charged + idle == wall_cost
    assert charged == sum(interval.cost_busy_nano_usd for interval in intervals)
    assert sum(interval.wall_nanoseconds for interval in intervals) == DAY
    for earlier, later in itertools.pairwise(intervals):
        assert earlier.finished_at == later.started_at


def _three_prices() -> PriceSchedule:
    """Odd prices, changing at odd instants of the day."""
    first = datetime(2026, 3, 1, 7, 13, 0, 1, tzinfo=UTC)
    second = datetime(2026, 3, 1, 16, 59, 59, 999_999, tzinfo=UTC)
    return PriceSchedule(
        (
            replace(PRICE, nano_usd_per_hour=1_234_567_891, valid_to=first),
            replace(PRICE, nano_usd_per_hour=987_654_321, valid_from=first, valid_to=second),
            replace(PRICE, nano_usd_per_hour=3_000_000_001, valid_from=second),
        )
    )


def _price_times_wall(prices: PriceSchedule, clock: FixedClock, started: int, ended: int) -> int:
    """Computed apart from the meter: the sum over prices of price x time, then rounded down."""
    total = 0
    for price in prices.prices:
        opens = clock.monotonic_nanoseconds(price.valid_from)
        closes = clock.monotonic_nanoseconds(price.valid_to) if price.valid_to else ended
        total += max(0, min(ended, closes) - max(started, opens)) * price.nano_usd_per_hour
    return total // NANOSECONDS_PER_HOUR


def test_intervals_end_after_their_time_even_when_nothing_happens() -> None:
    accounts = meter(interval_seconds=60)
    for second in range(0, 300, 10):
        accounts.pass_idle(second * SECOND)
    assert [i.interval_index for i in accounts.take_closed()] == [0, 1, 2, 3]
    assert accounts.take_closed() == []


def test_a_new_price_book_splits_the_step_that_is_running_exactly() -> None:
    odd = PriceSchedule((replace(PRICE, nano_usd_per_hour=987_654_321, book_version="t2"),))
    accounts = meter(_three_prices())
    accounts.on_step(step(0, 10 * SECOND, row("a", 1)))
    accounts.reprice(odd, 14 * SECOND + 3)  # within the next step, which is accounted for later
    assert accounts.price.nano_usd_per_hour == 1_234_567_891
    accounts.on_step(step(12 * SECOND, 6 * SECOND, row("a"), row("b")))
    assert accounts.price.nano_usd_per_hour == 987_654_321
    intervals = accounts.close(20 * SECOND)
    assert [i.wall_nanoseconds for i in intervals] == [14 * SECOND + 3, 6 * SECOND - 3]
    due = sum(i.wall_nanoseconds * i.price.nano_usd_per_hour for i in intervals if i.price)
    charged = sum(accounts.finish(name).cost_nano_usd for name in "ab")
    idle = sum(interval.cost_idle_nano_usd for interval in intervals)
    assert charged + idle == due // NANOSECONDS_PER_HOUR


def test_a_new_price_book_for_a_time_already_accounted_for_begins_now() -> None:
    accounts = meter()
    accounts.pass_idle(10 * SECOND)
    accounts.reprice(fixed_price("9"), 4 * SECOND)
    intervals = accounts.close(20 * SECOND)
    assert [i.wall_nanoseconds for i in intervals] == [10 * SECOND, 10 * SECOND]
    assert intervals[1].cost_idle_nano_usd == 10 * SECOND * 9_000_000_000 // NANOSECONDS_PER_HOUR


def test_a_price_book_out_of_date_never_makes_the_machine_free() -> None:
    ended = replace(PRICE, valid_to=PRICE.valid_from + timedelta(days=1))
    assert PriceSchedule((ended,)).at(PRICE.valid_from + timedelta(days=900)) == ended
    assert fixed_price("1.25").prices[0].nano_usd_per_hour == 1_250_000_000


def test_prices_with_a_gap_are_refused() -> None:
    early = replace(PRICE, valid_to=PRICE.valid_from + timedelta(days=1))
    late = replace(PRICE, valid_from=PRICE.valid_from + timedelta(days=2))
    with pytest.raises(ValueError, match="gap or overlap"):
        PriceSchedule((early, late))
