"""The requests that the engine holds, and the way of their deltas to whoever waits for them.

Used on the event loop alone. A request is live from its registration until the engine reports
its end, which may be later than its client's.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.request import FinishReason, TokenDelta
from engine.stats import RequestStats, StepStats
from engine.step import StepOutput
from service.orders import Charge


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known once a request has ended."""

    stats: RequestStats
    charge: Charge


@dataclass(frozen=True, slots=True)
class Arrival:
    """A delta, with the ending when it is the last."""

    delta: TokenDelta
    ending: Ending | None = None


class ReaderTooSlowError(Exception):
    """More arrivals are waiting than the reader may leave unread."""


class ArrivalQueue:
    """Arrivals on their way to one reader. The engine's side never waits.

    A reader that falls more than max_unread behind gets ReaderTooSlowError instead of the rest.
    """

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._arrivals: deque[Arrival] = deque()
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def has_overflowed(self) -> bool:
        return isinstance(self._failure, ReaderTooSlowError)

    def put(self, arrival: Arrival) -> bool:
        """False when with this one the reader has fallen too far behind.

        Once the queue has failed nothing more is kept.
        """
        if self._failure is not None:
            return True
        if len(self._arrivals) >= self._max_unread:
            self.fail(ReaderTooSlowError(str(self._max_unread)))
            return False
        self._arrivals.append(arrival)
        self._changed.set()
        return True

    def fail(self, failure: Exception) -> None:
        """End the queue; what is unread is dropped."""
        self._failure = self._failure or failure
        self._arrivals.clear()
        self._changed.set()

    def take_all(self) -> list[Arrival]:
        """What is there now, without waiting."""
        taken = list(self._arrivals)
        self._arrivals.clear()
        return taken

    async def get(self) -> Arrival:
        """The next arrival. Raises what `fail` was given."""
        while not self._arrivals:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._arrivals.popleft()


class Owner(Protocol):
    """Who answers for a live request; exactly one of the two is called, once."""

    @property
    def queue(self) -> ArrivalQueue: ...

    def ended(self, stats: RequestStats) -> Charge:
        """The engine has reported the end."""
        ...

    def lost(self, error: str) -> None:
        """The engine is gone and will report nothing."""
        ...


class LiveRequests:
    """Routes each step's output.

    on_step sees the statistics of every step. cancel ends a request in the engine.
    """

    def __init__(
        self,
        on_step: Callable[[StepStats], None],
        cancel: Callable[[str, FinishReason], None],
    ) -> None:
        self._on_step = on_step
        self._cancel = cancel
        self._live: dict[str, Owner] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def add(self, request_id: str, owner: Owner) -> None:
        """Register before the engine is given the request."""
        self._live[request_id] = owner
        self._empty.clear()

    def discard(self, request_id: str) -> None:
        """Forget a request that the engine has refused."""
        self._live.pop(request_id, None)
        if not self._live:
            self._empty.set()

    def deliver(self, output: StepOutput) -> None:
        """Account for a step and hand its deltas on."""
        if output.stats is not None:
            self._on_step(output.stats)
        endings: dict[str, Ending] = {}
        for stats in output.finished:
            owner = self._live.get(stats.request_id)
            if owner is not None:
                endings[stats.request_id] = Ending(stats, owner.ended(stats))
        for delta in output.deltas:
            owner = self._live.get(delta.request_id)
            if owner is None:
                continue
            ending = endings.get(delta.request_id)
            if not owner.queue.put(Arrival(delta, ending)) and ending is None:
                self._cancel(delta.request_id, FinishReason.CANCELLED)
        for request_id in endings:
            self.discard(request_id)

    def fail_all(self, failure: Exception) -> None:
        """The engine is gone: every reader gets the failure."""
        for owner in tuple(self._live.values()):
            owner.lost(str(failure))
            owner.queue.fail(failure)
        self._live.clear()
        self._empty.set()
