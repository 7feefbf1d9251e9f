"""Energy: requests + idle = measured, and what nothing measured is None."""

import ctypes
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from telemetry.energy import EnergyMeter, RaplCounter, find_energy_source

SECOND = 1_000_000_000


class ScriptedCounter:
    """Gives the readings that a test lists, then the last one."""

    name = "rapl"

    def __init__(self, *readings: int | None) -> None:
        self._readings = list(readings)

    def read_microjoules(self) -> int | None:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]


def test_a_window_is_split_by_time_and_share() -> None:
    meter = EnergyMeter(ScriptedCounter(0, 1_000_000), 0)
    meter.charge("a", SECOND // 2)
    meter.charge("b", SECOND // 4)
    assert meter.poll(SECOND) == 1_000_000
    assert (meter.finish("a"), meter.finish("b")) == (500_000, 250_000)
    energy = meter.take_interval()
    assert (energy.busy_microjoules, energy.idle_microjoules) == (750_000, 250_000)


def test_a_counter_is_not_read_more_often_than_once_a_second() -> None:
    meter = EnergyMeter(ScriptedCounter(0, 5, 9), 0)
    assert meter.poll(SECOND // 2) is None
    assert meter.poll(SECOND) == 5


def test_many_windows_add_up_to_what_was_measured() -> None:
    readings = [0]
    for index in range(50):
        readings.append(readings[-1] + 777_777 + 31_337 * (index % 7))
    meter = EnergyMeter(ScriptedCounter(*readings), 0)
    spent = 0
    for window in range(50):
        for name in ("a", "b", f"short{window}"):
            meter.charge(name, SECOND // 4 + window)
        if window:
            early = meter.finish(f"short{window}")  # in the middle of a window
            assert early is not None
            spent += early
        meter.poll((window + 1) * SECOND)
    spent += sum(meter.finish(name) or 0 for name in ("a", "b", "short0"))
    energy = meter.take_interval()
    assert energy.busy_microjoules == spent
    assert energy.idle_microjoules is not None
    assert spent + energy.idle_microjoules == readings[-1]


def test_what_was_charged_too_early_is_taken_off_idle_and_never_off_a_neighbour() -> None:
    """A busy window sets the power; in the next one the machine rests, but a request that ended
    in it was charged at the old power."""
    meter = EnergyMeter(ScriptedCounter(0, 1_000_000, 1_100_000, 2_100_000), 0)
    meter.charge("a", SECOND)
    meter.poll(SECOND)
    meter.charge("b", SECOND // 2)
    spent = (meter.finish("a") or 0) + (meter.finish("b") or 0)
    meter.charge("c", SECOND // 4)
    meter.poll(2 * SECOND)
    meter.poll(3 * SECOND)
    assert meter.finish("c") == 25_000
    energy = meter.take_interval()
    assert energy.busy_microjoules == spent + 25_000
    assert energy.idle_microjoules == 2_100_000 - energy.busy_microjoules


def test_without_a_counter_nothing_is_known() -> None:
    meter = EnergyMeter(None, 0)
    meter.charge("a", SECOND)
    assert meter.poll(2 * SECOND) is None
    assert meter.finish("a") is None
    assert meter.take_interval().busy_microjoules is None
    assert meter.source_name == "none"


def test_a_request_before_the_first_window_is_unknown_and_not_zero() -> None:
    meter = EnergyMeter(ScriptedCounter(0, 10), 0)
    meter.charge("a", 1000)
    assert meter.finish("a") is None


def test_a_window_without_an_answer_makes_its_requests_unknown_and_later_ones_known() -> None:
    meter = EnergyMeter(ScriptedCounter(0, None, 0, 4_000_000), 0)
    meter.charge("a", SECOND)
    assert meter.poll(SECOND) is None
    assert not meter.is_answering
    assert meter.poll(2 * SECOND) is None  # the first reading after the gap measures nothing
    assert meter.is_answering
    meter.charge("b", SECOND)
    assert meter.poll(3 * SECOND) == 4_000_000
    assert meter.finish("a") is None
    assert meter.finish("b") == 4_000_000
    assert meter.take_interval().busy_microjoules is None


def _zone(folder: Path, name: str, value: int) -> Path:
    zone = folder / name
    zone.mkdir(parents=True)
    (zone / "energy_uj").write_text(f"{value}\n")
    (zone / "max_energy_range_uj").write_text("1000\n")
    return zone


def test_powercap_counts_packages_once_and_survives_a_wrap(tmp_path: Path) -> None:
    first, second = _zone(tmp_path, "intel-rapl:0", 900), _zone(tmp_path, "intel-rapl:1", 5)
    _zone(tmp_path, "intel-rapl:0:0", 1)  # a part of package 0
    source = find_energy_source("cpu", tmp_path)
    assert isinstance(source, RaplCounter)
    start = source.read_microjoules()
    (first / "energy_uj").write_text("50")
    (second / "energy_uj").write_text("8")
    assert source.read_microjoules() == (start or 0) + 150 + 3


def test_a_machine_without_a_readable_counter_has_no_source(tmp_path: Path) -> None:
    assert find_energy_source("cpu", tmp_path) is None
    zone = _zone(tmp_path, "intel-rapl:0", 1)
    (zone / "energy_uj").unlink()
    assert find_energy_source("cpu", tmp_path) is None


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has an NVIDIA device")
def test_a_machine_without_nvidia_devices_has_no_source() -> None:
    assert find_energy_source("cuda:0") is None


class FakeDriver:
    """The driver's C functions below NVIDIA's own pynvml: two devices, with or without counters.

    pynvml itself is real, so its arguments, error classes and error codes are.
    """

    def __init__(self, pynvml: ModuleType) -> None:
        self._nvml = pynvml
        self.has_counter = True
        self.millijoules = 1_000
        self.milliwatts = 100_000
        self.error = 0

    def fail(self, name: str) -> None:
        """All calls return the error of that name from now on; SUCCESS ends it."""
        error = "SUCCESS" if name == "SUCCESS" else f"ERROR_{name}"
        self.error = int(getattr(self._nvml, f"NVML_{error}"))

    def nvmlInitWithFlags(self, flags: int) -> int:  # noqa: N802 - the driver's name
        return self.error

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return self.error

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 0x1000 + index.value
        return self.error

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, energy: Any) -> int:  # noqa: N802
        if not self.has_counter:
            return int(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        energy._obj.value = self.millijoules + _index(device)
        return self.error

    def nvmlDeviceGetPowerUsage(self, device: Any, power: Any) -> int:  # noqa: N802
        power._obj.value = self.milliwatts
        return self.error


def _index(device: Any) -> int:
    return int(ctypes.cast(device, ctypes.c_void_p).value or 0) - 0x1000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    pynvml = pytest.importorskip("pynvml")
    driver = FakeDriver(pynvml)
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return driver


def test_nvidia_counters_are_summed_over_devices(driver: FakeDriver) -> None:
    source = find_energy_source("cuda:0")
    assert source is not None
    assert source.name == "nvml_counter"
    assert source.read_microjoules() == (1_000 + 1_001) * 1_000
    driver.fail("GPU_IS_LOST")
    assert source.read_microjoules() is None
    driver.fail("SUCCESS")
    driver.millijoules = 2**53  # the counter is 64 bits wide
    assert source.read_microjoules() == (2**54 + 1) * 1_000


def test_power_is_integrated_where_a_device_has_no_counter(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.has_counter = False
    now = [10.0]
    monkeypatch.setattr("telemetry.energy.time.monotonic", lambda: now[0])
    source = find_energy_source("cuda")
    assert source is not None
    assert source.name == "nvml_power_integral"
    start = source.read_microjoules()
    now[0] += 2.0
    driver.milliwatts = 300_000
    # Two devices, on average 200 W each, for two seconds.
    assert source.read_microjoules() == (start or 0) + 800_000_000
    driver.fail("GPU_IS_LOST")
    assert source.read_microjoules() is None


@pytest.mark.parametrize("name", ["DRIVER_NOT_LOADED", "NO_PERMISSION", "LIB_RM_VERSION_MISMATCH"])
def test_a_driver_that_does_not_answer_is_no_source(driver: FakeDriver, name: str) -> None:
    driver.fail(name)
    assert find_energy_source("cuda") is None
