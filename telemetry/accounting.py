"""Cost and energy together: what a step costs, what a request cost, what an interval used."""

from collections.abc import Iterable
from dataclasses import replace

from engine.stats import StepStats
from telemetry.cost import CostMeter
from telemetry.energy import EnergyMeter, IntervalEnergy
from telemetry.ledger.records import CapacityRecord, PriceRecord, RequestCost
from telemetry.prices import PriceSchedule
from telemetry.savings import SavingsEstimator


class Accounting:
    """One instance's accounts. One thread at a time."""

    def __init__(
        self,
        cost: CostMeter,
        energy: EnergyMeter,
        plain_step_seconds: Iterable[tuple[int, float]] = (),
    ) -> None:
        self._cost = cost
        self._energy = energy
        self._savings = SavingsEstimator(plain_step_seconds)

    @property
    def price(self) -> PriceRecord:
        """The price in force."""
        return self._cost.price

    def reprice(self, prices: PriceSchedule, now_nanoseconds: int) -> None:
        """Other prices from now on."""
        self._cost.reprice(prices, now_nanoseconds)

    @property
    def energy_source(self) -> str:
        """The name of the energy counter; "none" when there is none."""
        return self._energy.source_name

    @property
    def has_energy_source(self) -> bool:
        """Whether a counter was found at the start."""
        return self._energy.has_source

    @property
    def energy_answers(self) -> bool:
        """Whether the counter's last reading worked."""
        return self._energy.is_answering

    def on_step(self, stats: StepStats) -> None:
        """Charge a step to its rows."""
        for share in self._cost.on_step(stats):
            self._energy.charge(share.request_id, share.busy_nanoseconds)
        self._savings.on_step(stats)

    def pass_idle(self, now_nanoseconds: int) -> None:
        """Account for the time up to now as idle. Only while no request is open."""
        self._cost.pass_idle(now_nanoseconds)

    def is_energy_due(self, now_nanoseconds: int) -> bool:
        """Whether the counter should be read now."""
        return self._energy.is_due(now_nanoseconds)

    def read_energy(self) -> int | None:
        """The counter, which may take milliseconds: needs no exclusion, always the same thread."""
        return self._energy.read()

    def end_energy_window(self, now_nanoseconds: int, reading: int | None) -> int | None:
        """Split what was measured up to a reading; the microjoules of the window, else None."""
        return self._energy.end_window(now_nanoseconds, reading)

    def finish(self, request_id: str) -> tuple[RequestCost, int | None]:
        """The final cost and energy of a request, and beside them the estimate in nano-USD of
        its cost without speculation (None: unknown). Forgets it."""
        cost = replace(
            self._cost.finish(request_id),
            energy_microjoules=self._energy.finish(request_id),
            energy_source=self._energy.source_name,
        )
        return cost, self._savings.finish(request_id, cost, self._cost.price)

    def take_intervals(self) -> list[CapacityRecord]:
        """The intervals that ended since the last call, with their energy.

        Energy is measured in windows of its own: what was measured since the last call belongs
        to the last interval, and of further ones (around a price change) it is not known.
        """
        return self._with_energy(self._cost.take_closed())

    def close(self, now_nanoseconds: int) -> list[CapacityRecord]:
        """End the running interval now."""
        self._energy.poll(now_nanoseconds)
        return self._with_energy(self._cost.close(now_nanoseconds))

    def _with_energy(self, intervals: list[CapacityRecord]) -> list[CapacityRecord]:
        if not intervals:
            return []
        unknown = IntervalEnergy(None, None, self._energy.source_name)
        energies = [unknown] * (len(intervals) - 1) + [self._energy.take_interval()]
        return [
            replace(
                interval,
                energy_busy_microjoules=energy.busy_microjoules,
                energy_idle_microjoules=energy.idle_microjoules,
                energy_source=energy.source,
            )
            for interval, energy in zip(intervals, energies, strict=True)
        ]
