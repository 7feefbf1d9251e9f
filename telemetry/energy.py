"""Measured energy, split over requests and idle time like cost. Missing is None, never 0.

A source is a counter of consumed energy. It is read in windows of at least one second, because
the hardware updates it some ten times a second only. A window's energy is split by wall time
into busy and idle, and the busy part over the rows by their share of the steps' time.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

WINDOW_SECONDS = 1.0
NO_SOURCE = "none"
POWERCAP = Path("/sys/class/powercap")


class EnergySource(Protocol):
    """A counter of energy since some moment."""

    @property
    def name(self) -> str:
        """nvml_counter, nvml_power_integral or rapl."""
        ...

    def read_microjoules(self) -> int | None:
        """Only grows; None when the counter does not answer any more."""
        ...


class NvmlCounter:
    """NVIDIA's own energy counters, summed over devices (Volta and later)."""

    name = "nvml_counter"

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def read_microjoules(self) -> int | None:
        try:
            return sum(
                1000 * int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
                for handle in self._handles
            )
        except self._nvml.NVMLError:
            return None


class NvmlPowerIntegral:
    """The integral of NVIDIA's power readings, where a device has no energy counter."""

    name = "nvml_power_integral"

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._microjoules = 0.0
        self._last: tuple[float, float] | None = None

    def read_microjoules(self) -> int | None:
        now = time.monotonic()
        try:
            milliwatts = sum(self._nvml.nvmlDeviceGetPowerUsage(handle) for handle in self._handles)
        except self._nvml.NVMLError:
            self._last = None
            return None
        if self._last is not None:
            then, before = self._last
            self._microjoules += (now - then) * (milliwatts + before) / 2 * 1000
        self._last = (now, milliwatts)
        return int(self._microjoules)


class RaplCounter:
    """Intel's and AMD's package energy through Linux powercap. Needs readable files."""

    name = "rapl"

    def __init__(self, zones: Sequence[Path]) -> None:
        self._zones = zones
        self._last: dict[Path, int] = {}
        self._total = 0

    def read_microjoules(self) -> int | None:
        try:
            for zone in self._zones:
                value = int((zone / "energy_uj").read_text())
                before = self._last.get(zone, value)
                if value < before:  # the counter wrapped around
                    value_range = int((zone / "max_energy_range_uj").read_text())
                    self._total += value + value_range - before
                else:
                    self._total += value - before
                self._last[zone] = value
        except (OSError, ValueError):
            self._last.clear()
            return None
        return self._total


def find_energy_source(device: str, powercap: Path = POWERCAP) -> EnergySource | None:
    """The best counter for the device that the model runs on ("cuda..." or "cpu").

    None when nothing answers: energy is then unknown, and stays NULL.
    """
    if device.startswith("cuda"):
        return _find_nvml()
    zones = [z for z in sorted(powercap.glob("*-rapl:*")) if z.name.count(":") == 1]
    if not zones:
        return None
    source = RaplCounter(zones)
    return source if source.read_microjoules() is not None else None


def _find_nvml() -> EnergySource | None:
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # All devices that the driver shows: which of them torch numbers 0 depends on settings
        # that NVML ignores, so a server takes the devices of its container as its own.
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    for source in (NvmlCounter(nvml, handles), NvmlPowerIntegral(nvml, handles)):
        if handles and source.read_microjoules() is not None:
            return source
    return None


@dataclass(slots=True)
class _Account:
    microjoules: int = 0
    known: bool = True
    window_nanoseconds: int = 0


@dataclass(frozen=True, slots=True)
class IntervalEnergy:
    """Microjoules of an interval; None when any part of it was not measured."""

    busy_microjoules: int | None
    idle_microjoules: int | None
    source: str


@dataclass(slots=True)
class _Totals:
    busy: int = 0
    idle: int = 0
    known: bool = True
    measured: bool = field(default=False)


class EnergyMeter:
    """Splits what a source measures over requests and idle time. One thread at a time.

    A request that ends inside a window is charged for it at the power of the last full window;
    the difference to what the window then measures goes to idle. So over whole windows
    requests + idle = measured, to the microjoule.
    """

    def __init__(self, source: EnergySource | None, started_nanoseconds: int) -> None:
        self._source = source
        self._reading = source.read_microjoules() if source else None
        self._window_started = started_nanoseconds
        self._window_busy = 0
        self._charged_early = 0
        self._idle_debt = 0
        self._power: float | None = None  # microjoules per nanosecond of the last full window
        self._accounts: dict[str, _Account] = {}
        self._totals = _Totals()

    @property
    def source_name(self) -> str:
        """ "none" when the machine has no counter."""
        return self._source.name if self._source else NO_SOURCE

    @property
    def has_source(self) -> bool:
        """Whether there is a counter at all."""
        return self._source is not None

    @property
    def is_answering(self) -> bool:
        """Whether the last reading of the source worked."""
        return self._reading is not None

    def charge(self, request_id: str, busy_nanoseconds: int) -> None:
        """Note a row's part of a step."""
        if self._source is None:
            return
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = _Account()
        account.window_nanoseconds += busy_nanoseconds
        self._window_busy += busy_nanoseconds

    def poll(self, now_nanoseconds: int) -> int | None:
        """Read the counter and end the window, if it is a second old; see the two steps."""
        if not self.is_due(now_nanoseconds):
            return None
        return self.end_window(now_nanoseconds, self.read())

    def is_due(self, now_nanoseconds: int) -> bool:
        """Whether the running window is a second old."""
        wall = now_nanoseconds - self._window_started
        return self._source is not None and wall >= WINDOW_SECONDS * 1e9

    def read(self) -> int | None:
        """Ask the counter, which may take milliseconds. The only method that needs no exclusion
        from the others; always called from the same thread."""
        return None if self._source is None else self._source.read_microjoules()

    def end_window(self, now_nanoseconds: int, reading: int | None) -> int | None:
        """Split what was measured up to a reading; the microjoules of the window, else None."""
        before, self._reading = self._reading, reading
        measured = None
        if before is None or reading is None:
            self._lose_window()
        else:
            measured = max(0, reading - before)
            self._settle(measured, now_nanoseconds - self._window_started)
        self._window_started = now_nanoseconds
        self._window_busy = self._charged_early = 0
        return measured

    def finish(self, request_id: str) -> int | None:
        """The microjoules of a request; None when any part of it is unknown. Forgets it."""
        if self._source is None:
            return None
        account = self._accounts.pop(request_id, None) or _Account()
        if account.window_nanoseconds and account.known:
            if self._power is None or self._reading is None:
                return None
            early = math.floor(account.window_nanoseconds * self._power)
            self._charged_early += early
            self._totals.busy += early
            account.microjoules += early
        return account.microjoules if account.known else None

    def take_interval(self) -> IntervalEnergy:
        """The energy of the windows that ended since the last call."""
        totals, self._totals = self._totals, _Totals()
        if self._source is None or not totals.known or not totals.measured:
            return IntervalEnergy(None, None, self.source_name)
        return IntervalEnergy(totals.busy, totals.idle, self.source_name)

    def _settle(self, measured: int, wall: int) -> None:
        whole = max(wall, self._window_busy, 1)
        attributed = self._charged_early
        for account in self._accounts.values():
            if account.window_nanoseconds:
                share = measured * account.window_nanoseconds // whole
                account.microjoules += share
                account.window_nanoseconds = 0
                attributed += share
                self._totals.busy += share
        idle = measured - attributed - self._idle_debt
        self._idle_debt = max(0, -idle)
        self._totals.idle += max(0, idle)
        self._totals.measured = True
        self._power = measured / whole

    def _lose_window(self) -> None:
        for account in self._accounts.values():
            if account.window_nanoseconds:
                account.known = False
                account.window_nanoseconds = 0
        self._totals.known = False
        self._power = None
