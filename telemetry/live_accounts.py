"""The requests that are open and the steps that compute them: accounted for on a thread apart."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from engine.stats import StepStats
from telemetry import names
from telemetry.accounting import Accounting
from telemetry.clock import AnchoredClock
from telemetry.ledger.records import CapacityRecord, PriceRecord, RequestCost
from telemetry.metrics import Metrics
from telemetry.prices import PriceSchedule
from telemetry.recording import OpenRequest
from telemetry.tracing import record_step_span

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 0.02  # what waits longer is paid by the caller of settle
_DRAINS_PER_TICK = 5


class LiveAccounts:
    """Queues steps and accounts for them, on its own thread or in the `settle` that needs them.

    on_tick is called on that thread several times a second, with the monotonic nanoseconds and
    the capacity intervals that ended since the last time.
    """

    def __init__(
        self,
        accounting: Accounting,
        metrics: Metrics,
        clock: AnchoredClock,
        *,
        step_span_every: int,
        on_tick: Callable[[int, list[CapacityRecord]], None],
    ) -> None:
        self._accounting = accounting
        self._metrics = metrics
        self._clock = clock
        self._step_span_every = step_span_every
        self._on_tick = on_tick
        self._steps: deque[StepStats] = deque()
        self._lock = threading.Lock()  # guards the accounts and what is open
        self._open: dict[str, OpenRequest] = {}  # by record id
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Begin to account for steps."""
        self._thread.start()

    @property
    def price(self) -> PriceRecord:
        """The price in force."""
        return self._accounting.price

    def reprice(self, prices: PriceSchedule) -> None:
        """Other prices from now on."""
        with self._lock:
            self._accounting.reprice(prices, self._clock.now_nanoseconds())

    def open(self, request: OpenRequest) -> None:
        """Note an open request: while there is one, time outside steps is not yet idle."""
        with self._lock:
            self._open[request.record_id] = request

    def add_event(self, name: str, attributes: Mapping[str, str]) -> None:
        """Note something on the traces of all open requests."""
        with self._lock:
            self._add_event(name, attributes, "")

    def _add_event(self, name: str, attributes: Mapping[str, str], request_id: str) -> None:
        """On the traces of one request, or of all with an empty id."""
        for request in self._open.values():
            if request.trace is not None and request_id in ("", request.request_id):
                request.trace.add_event(name, attributes)

    def on_step(self, stats: StepStats) -> None:
        """Queue a step; costs its caller nothing."""
        self._steps.append(stats)

    def settle(self, request: OpenRequest) -> tuple[RequestCost, int | None]:
        """Close a request: its cost, and the estimate of it without speculation.

        Raises ValueError when it is not open.
        """
        with self._lock:
            if request.record_id not in self._open:
                raise ValueError(f"request {request.request_id} was finished before")
            self._drain()  # while it is open, so that its last steps can link to it
            del self._open[request.record_id]
            return self._accounting.finish(request.request_id)

    def close(self) -> tuple[int, list[CapacityRecord]]:
        """Stop the thread and end the accounts: the instant, and the last intervals."""
        self._closing.set()
        self._thread.join()
        with self._lock:
            self._drain()
            now = self._clock.now_nanoseconds()
            if self._open:
                _log.error("%d requests were still open when telemetry closed", len(self._open))
            return now, self._accounting.close(now)

    def tick(self) -> None:
        """Account for everything up to now."""
        # The counter is read without the lock: no request waits for a driver.
        is_due = self._accounting.is_energy_due(self._clock.now_nanoseconds())
        reading = self._accounting.read_energy() if is_due else None
        measured = None
        with self._lock:
            self._drain()
            now = self._clock.now_nanoseconds()
            if not self._open:
                self._accounting.pass_idle(now)
                self._metrics.on_idle()
            if is_due:
                measured = self._accounting.end_energy_window(now, reading)
            intervals = self._accounting.take_intervals()
        if self._accounting.has_energy_source:
            self._metrics.on_energy(
                self._accounting.energy_source, measured, self._accounting.energy_answers
            )
        self._on_tick(now, intervals)

    def _run(self) -> None:
        num_drains = 0
        while not self._closing.wait(_DRAIN_SECONDS):
            num_drains += 1
            try:
                if num_drains % _DRAINS_PER_TICK == 0:
                    self.tick()
                elif self._steps:
                    with self._lock:
                        self._drain()
            except Exception:
                _log.error("telemetry tick failed", exc_info=True)

    def _drain(self) -> None:
        last: StepStats | None = None
        while self._steps:
            last = self._steps.popleft()
            self._accounting.on_step(last)
            with never_failing("metrics of a step"):
                self._metrics.on_step(last)
                for request_id in last.preempted_request_ids:
                    self._add_event(names.EVENT_PREEMPTED, {}, request_id)
                for event in last.drafter_events:
                    attributes = {
                        names.ATTR_DRAFTER: event.drafter,
                        names.ATTR_DRAFTER_EVENT: str(event.kind),
                    }
                    self._add_event(names.EVENT_FALL_BACK, attributes, event.request_id)
                if self._step_span_every and last.step_index % self._step_span_every == 0:
                    self._write_step_span(last)
        if last is not None:
            with never_failing("gauges"):
                self._metrics.on_load(last)

    def _write_step_span(self, stats: StepStats) -> None:
        traces = {
            request.request_id: request.trace
            for request in self._open.values()
            if request.trace is not None
        }
        if traces:
            record_step_span(stats, traces, next(iter(traces.values())).tracer)


@contextlib.contextmanager
def never_failing(what: str) -> Iterator[None]:
    """Log what goes wrong with a metric or a span, and go on."""
    try:
        yield
    except Exception:
        _log.error("telemetry failed at %s", what, exc_info=True)
