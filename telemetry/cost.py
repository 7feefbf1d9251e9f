"""Splits the price of the machine's time over requests and idle time, to the nano-dollar.

Method `step-positions-v1`: the price of a step's wall time is split over its rows by the token
positions that the target computed for them, rejected drafts included: a request pays for its
own failed guesses and never for a neighbour's. Time outside steps is idle. Everything is
integer arithmetic, so over the life of a meter

    sum(requests) + idle = floor(sum over prices of price x wall time)

holds exactly, whatever the number of steps, rows, intervals and price changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.stats import RowStepStats, StepStats
from telemetry.clock import AnchoredClock
from telemetry.ledger.records import (
    NANOSECONDS_PER_HOUR,
    CapacityRecord,
    ModelRecord,
    PriceRecord,
    RequestCost,
)
from telemetry.prices import PriceSchedule


def split_by_weight(total: int, weights: Sequence[int]) -> list[int]:
    """Parts of `total` in proportion to the weights; they add up to it exactly.

    Largest remainder: what the floors leave over goes, one unit each, to the largest
    remainders, the earlier first. Needs total >= 0 and one positive weight; ValueError else.
    """
    whole = sum(weights)
    if whole <= 0 or total < 0:
        raise ValueError(f"cannot split {total} by {list(weights)}")
    if len(weights) == 1:
        return [total]
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    if left:
        order = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
        for index in order[:left]:
            parts[index] += 1
    return parts


@dataclass(slots=True)
class _Account:
    cost: int = 0
    prefill: int = 0
    decode: int = 0
    draft: int = 0
    rejected: int = 0
    drafter: int = 0
    busy_nanoseconds: int = 0

    def add(self, row: RowStepStats, cost: int, nanoseconds: int, drafter: int) -> None:
        self.cost += cost
        self.busy_nanoseconds += nanoseconds
        self.drafter += drafter
        if not (row.num_prefill_positions or row.num_draft_positions):
            self.decode += cost - drafter
            return
        positions = (row.num_prefill_positions, row.num_decode_positions, row.num_draft_positions)
        prefill, decode, draft = split_by_weight(cost - drafter, positions)
        self.prefill += prefill
        self.decode += decode
        self.draft += draft
        if draft:
            num_rejected = row.num_draft_positions - row.num_accepted_tokens
            self.rejected += draft * num_rejected // row.num_draft_positions


@dataclass(slots=True)
class _Interval:
    index: int
    started_nanoseconds: int
    price: PriceRecord
    busy_nanoseconds: int = 0
    idle_nanoseconds: int = 0
    cost_busy: int = 0
    cost_idle: int = 0
    num_steps: int = 0
    num_prefill_positions: int = 0
    num_decode_positions: int = 0
    num_draft_positions: int = 0
    num_emitted_tokens: int = 0
    max_num_running: int = 0
    max_num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one row was charged for one step: its part of the time, for energy."""

    request_id: str
    busy_nanoseconds: int


class CostMeter:
    """Accounts for the time of one instance from its start on. One thread at a time.

    Intervals end at the first step boundary (or idle instant) after `interval_seconds`, and
    exactly where a price changes: an interval has one price.
    """

    def __init__(
        self,
        instance_id: str,
        prices: PriceSchedule,
        clock: AnchoredClock,
        *,
        started_nanoseconds: int,
        model: ModelRecord | None = None,
        interval_seconds: float = 60.0,
    ) -> None:
        self._instance_id = instance_id
        self._prices = prices
        self._clock = clock
        self._model = model
        self._interval_nanoseconds = int(interval_seconds * 1e9)
        self._cursor = started_nanoseconds
        self._price_remainder = 0  # what the last division left over, in nano-USD x ns / hour
        self._accounts: dict[str, _Account] = {}
        self._closed: list[CapacityRecord] = []
        self._price_ends: int | None = None
        self._repricing: tuple[int, PriceSchedule] | None = None  # from when on, to what
        self._interval = self._new_interval(0)

    @property
    def price(self) -> PriceRecord:
        """The price in force at the point that the accounts have reached."""
        return self._interval.price

    def reprice(self, prices: PriceSchedule, now_nanoseconds: int) -> None:
        """Other prices from now on: a step that is running is split exactly here."""
        since = max(now_nanoseconds, self._cursor)
        self._repricing = (since, prices)
        self._price_ends = since if self._price_ends is None else min(since, self._price_ends)

    def on_step(self, stats: StepStats) -> list[StepShare]:
        """Charge a step to its rows, and the time since the step before it to idle.

        A step that seems to begin before the last one ended (clock resolution) is charged from
        there on, so that no time is paid twice.
        """
        started = int(stats.started_at * 1e9)
        self._advance(started, None)
        shares = self._advance(started + stats.duration_nanoseconds, stats)
        self._count(stats)
        if self._cursor - self._interval.started_nanoseconds >= self._interval_nanoseconds:
            self._roll()
        return shares

    def pass_idle(self, now_nanoseconds: int) -> None:
        """Account for the time up to now as idle. Only while no request is open."""
        self._advance(now_nanoseconds, None)
        if self._cursor - self._interval.started_nanoseconds >= self._interval_nanoseconds:
            self._roll()

    def finish(self, request_id: str) -> RequestCost:
        """The final cost of a request; all zero when no step computed it. Forgets it."""
        account = self._accounts.pop(request_id, None) or _Account()
        return RequestCost(
            cost_nano_usd=account.cost,
            cost_prefill_nano_usd=account.prefill,
            cost_decode_nano_usd=account.decode,
            cost_draft_nano_usd=account.draft,
            cost_rejected_nano_usd=account.rejected,
            cost_drafter_nano_usd=account.drafter,
            busy_nanoseconds=account.busy_nanoseconds,
        )

    def take_closed(self) -> list[CapacityRecord]:
        """The intervals that ended since the last call; energy is not filled in."""
        closed, self._closed = self._closed, []
        return closed

    def close(self, now_nanoseconds: int) -> list[CapacityRecord]:
        """End the running interval now and return what was not taken yet."""
        self._advance(now_nanoseconds, None)
        self._roll()
        return self.take_closed()

    def _advance(self, until: int, stats: StepStats | None) -> list[StepShare]:
        shares: list[StepShare] = []
        while self._cursor < until:
            end = until if self._price_ends is None else min(until, self._price_ends)
            nanoseconds = end - self._cursor
            cost = self._price_of(nanoseconds)
            if stats is None or not any(row.num_positions for row in stats.rows):
                self._interval.idle_nanoseconds += nanoseconds
                self._interval.cost_idle += cost
            else:
                self._interval.busy_nanoseconds += nanoseconds
                self._interval.cost_busy += cost
                shares.extend(self._charge(stats, cost, nanoseconds))
            self._cursor = end
            if end == self._price_ends:
                self._roll()
        return shares

    def _price_of(self, nanoseconds: int) -> int:
        cost, self._price_remainder = divmod(
            nanoseconds * self._interval.price.nano_usd_per_hour + self._price_remainder,
            NANOSECONDS_PER_HOUR,
        )
        return cost

    def _charge(self, stats: StepStats, cost: int, nanoseconds: int) -> list[StepShare]:
        rows = [row for row in stats.rows if row.num_positions]
        weights = [row.num_positions for row in rows]
        costs = split_by_weight(cost, weights)
        times = split_by_weight(nanoseconds, weights)
        # The drafter's part of a step is that of its time; prompt lookup's is close to nothing.
        propose = min(stats.propose_nanoseconds, stats.duration_nanoseconds)
        duration = max(1, stats.duration_nanoseconds)
        shares = []
        for row, row_cost, row_time in zip(rows, costs, times, strict=True):
            account = self._accounts.get(row.request_id)
            if account is None:
                account = self._accounts[row.request_id] = _Account()
            account.add(row, row_cost, row_time, row_cost * propose // duration)
            shares.append(StepShare(row.request_id, row_time))
        return shares

    def _count(self, stats: StepStats) -> None:
        interval = self._interval
        interval.num_steps += 1
        for row in stats.rows:
            interval.num_prefill_positions += row.num_prefill_positions
            interval.num_decode_positions += row.num_decode_positions
            interval.num_draft_positions += row.num_draft_positions
            interval.num_emitted_tokens += row.num_emitted_tokens
        interval.max_num_running = max(interval.max_num_running, stats.num_running)
        interval.max_num_waiting = max(interval.max_num_waiting, stats.num_waiting)

    def _roll(self) -> None:
        done = self._interval
        wall = self._cursor - done.started_nanoseconds
        if wall:
            self._closed.append(
                CapacityRecord(
                    instance_id=self._instance_id,
                    interval_index=done.index,
                    started_at=self._clock.utc(done.started_nanoseconds),
                    finished_at=self._clock.utc(self._cursor),
                    model=self._model,
                    price=done.price,
                    wall_nanoseconds=wall,
                    busy_nanoseconds=done.busy_nanoseconds,
                    idle_nanoseconds=done.idle_nanoseconds,
                    lost_nanoseconds=0,
                    num_steps=done.num_steps,
                    num_prefill_positions=done.num_prefill_positions,
                    num_decode_positions=done.num_decode_positions,
                    num_draft_positions=done.num_draft_positions,
                    num_emitted_tokens=done.num_emitted_tokens,
                    max_num_running=done.max_num_running,
                    max_num_waiting=done.max_num_waiting,
                    cost_busy_nano_usd=done.cost_busy,
                    cost_idle_nano_usd=done.cost_idle,
                    cost_lost_nano_usd=0,
                )
            )
        self._interval = self._new_interval(done.index + (1 if wall else 0))

    def _new_interval(self, index: int) -> _Interval:
        if self._repricing is not None and self._repricing[0] <= self._cursor:
            self._prices, self._repricing = self._repricing[1], None
        now = self._clock.utc(self._cursor)
        change = self._prices.next_change(now)
        ends = [] if change is None else [self._clock.monotonic_nanoseconds(change)]
        if self._repricing is not None:
            ends.append(self._repricing[0])
        self._price_ends = min(ends, default=None)
        return _Interval(index, self._cursor, self._prices.at(now))
