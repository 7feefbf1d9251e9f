"""An estimate of what requests would have cost without speculation. Never a measurement.

Steps in which nobody drafted measure what plain decoding costs at a number of rows. A request's
output is then priced as if each of its tokens had taken its share of such a step, at the number
of rows that decoded beside it. Where no plain step was seen near that number, the cost table of
the engine's start stands in: it was measured with short contexts, so it rather underrates what
speculation saves. Without either the estimate is unknown.
"""

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.stats import StepStats
from telemetry.ledger.records import NANOSECONDS_PER_HOUR, PriceRecord, RequestCost

_MIN_STEPS = 3


@dataclass(slots=True)
class _Seen:
    nanoseconds: int = 0
    num_steps: int = 0


class PlainDecodeTable:
    """Mean wall time of plain decode steps by number of rows."""

    def __init__(self, measured_at_start: Iterable[tuple[int, float]] = ()) -> None:
        """measured_at_start: (rows, seconds of a plain step)."""
        self._at_start = {num_rows: seconds * 1e9 for num_rows, seconds in measured_at_start}
        self._seen: dict[int, _Seen] = {}

    def observe(self, stats: StepStats) -> None:
        """Learn from a step in which every row decoded one token and none drafted."""
        for row in stats.rows:
            if row.num_prefill_positions or row.num_draft_positions or not row.num_decode_positions:
                return
        if stats.rows:
            seen = self._seen.setdefault(len(stats.rows), _Seen())
            seen.nanoseconds += stats.duration_nanoseconds
            seen.num_steps += 1

    def step_nanoseconds(self, num_rows: int) -> float | None:
        """The mean at `num_rows`, interpolated between measured neighbours; None outside them."""
        means = {
            n: seen.nanoseconds / seen.num_steps
            for n, seen in self._seen.items()
            if seen.num_steps >= _MIN_STEPS
        }
        found = _interpolated(means, num_rows)
        return _interpolated(self._at_start, num_rows) if found is None else found


def _interpolated(times: Mapping[int, float], num_rows: int) -> float | None:
    known = sorted(times)
    right = bisect.bisect_left(known, num_rows)
    if right == len(known):
        return None
    if known[right] == num_rows:
        return times[num_rows]
    if right == 0:
        return None
    low, high = known[right - 1], known[right]
    share = (num_rows - low) / (high - low)
    return times[low] * (1 - share) + times[high] * share


@dataclass(slots=True)
class _Plain:
    nanoseconds: float = 0.0
    is_known: bool = True


class SavingsEstimator:
    """Follows the requests of one instance. One thread at a time."""

    def __init__(self, measured_at_start: Iterable[tuple[int, float]] = ()) -> None:
        self._table = PlainDecodeTable(measured_at_start)
        self._requests: dict[str, _Plain] = {}

    def on_step(self, stats: StepStats) -> None:
        """Price the tokens of a step as if they had been decoded one by one."""
        self._table.observe(stats)
        decoding = [row for row in stats.rows if row.num_decode_positions]
        if not decoding:
            return
        whole = self._table.step_nanoseconds(len(decoding))
        for row in decoding:
            plain = self._requests.setdefault(row.request_id, _Plain())
            if whole is None:
                plain.is_known = False
            else:
                plain.nanoseconds += row.num_emitted_tokens * whole / len(decoding)

    def finish(self, request_id: str, cost: RequestCost, price: PriceRecord) -> int | None:
        """Nano-USD: the measured prefill plus the estimated decoding. Forgets the request."""
        plain = self._requests.pop(request_id, None)
        if plain is None or not plain.is_known:
            return None
        decoding = plain.nanoseconds * price.nano_usd_per_hour / NANOSECONDS_PER_HOUR
        return cost.cost_prefill_nano_usd + round(decoding)
