"""The drafters, and for every request its order of preference: the first that proposes wins.

A drafter that raises is left out for a while and named in `failures`; its rows go on without
it, because a proposal is never worth a request. One whose drafts a request keeps refusing gives
way to the next in the list for that request; the last one stays, since whether drafting pays at
all is for the goodput controller to say. Both are tried again later (engine/drafter/health.py).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.drafter.base import (
    NO_PROPOSAL,
    Drafter,
    DraftJob,
    ForesightDrafter,
    ForwardListener,
    Proposal,
)
from engine.drafter.health import FailureBackOff, RequestMisses
from engine.drafter.turns import Turns
from engine.goodput import DraftSource
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest
from engine.stats import DrafterEvent, DrafterEventKind

_logger = logging.getLogger(__name__)


class DrafterChain:
    """All drafters of an engine; those of by_name_only draft for requests that name them."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        by_name_only: Sequence[Drafter] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters: list[Drafter] = []
        self._by_name_only: set[str] = set()
        self._listeners: list[tuple[Drafter, ForwardListener]] = []
        self._clock = clock
        self._back_offs: dict[str, FailureBackOff] = {}
        self._misses: dict[str, RequestMisses] = {}
        self._events: list[DrafterEvent] = []
        self.failures: dict[str, str] = {}  # of those left out now: why
        for drafter in drafters:
            self._append(drafter)
        for drafter in by_name_only:
            self.add(drafter)

    def add(self, drafter: Drafter) -> None:
        """A further one, last in the order, for requests that name it."""
        self._by_name_only.add(drafter.name)
        self._append(drafter)

    def remove(self, name: str) -> None:
        """Take out one that drafts by name only, with what it kept of any request."""
        self._drafters = [d for d in self._drafters if d.name != name]
        self._listeners = [(d, hears) for d, hears in self._listeners if d.name != name]
        self._by_name_only.remove(name)
        self._back_offs.pop(name)
        self.failures.pop(name, None)

    def is_by_name_only(self, name: str) -> bool:
        return name in self._by_name_only

    def _append(self, drafter: Drafter) -> None:
        self._drafters.append(drafter)
        self._back_offs[drafter.name] = FailureBackOff()
        if isinstance(drafter, ForwardListener):
            self._listeners.append((drafter, drafter))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self._drafters)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        proposals = [NO_PROPOSAL] * len(jobs)
        now = self._clock()
        by_name = self._by_name()
        turns = Turns([self._order(job.live) for job in jobs], self.names)
        while (turn := turns.take()) is not None:
            name, rows = turn
            drafter = by_name[name]
            if not self._back_offs[name].allows(now):
                continue
            rows = [index for index in rows if self._still_helps(jobs[index], drafter)]
            if not rows:
                continue
            try:
                found = drafter.propose([jobs[index] for index in rows])
            except Exception as error:
                self._fail(drafter, error, [jobs[index].live for index in rows])
                continue
            if self._back_offs[name].succeed():
                del self.failures[name]
                self._events.append(DrafterEvent(name, DrafterEventKind.RECOVERED))
            for index, proposal in zip(rows, found, strict=True):
                spent = proposals[index].num_positions + proposal.num_positions
                proposals[index] = replace(proposal, num_positions=spent)
                if proposal.token_ids:
                    turns.finish(index)
        return proposals

    def foresee(self, live: LiveRequest) -> DraftSource | None:
        """Who would draft for a row now; None if nobody. Nothing is tried, nothing counted."""
        now, by_name = self._clock(), self._by_name()
        for name in self._order(live):
            if not self._back_offs[name].allows(now) or self._is_given_up(live, name):
                continue
            drafter = by_name[name]
            if not isinstance(drafter, ForesightDrafter):
                return DraftSource(name, is_free=False)
            try:
                if drafter.will_propose(live):
                    return DraftSource(name, is_free=True)
            except Exception as error:
                self._fail(drafter, error, [live])
        return None

    def after_forward(self, rows: Sequence[tuple[LiveRequest, ForwardRow]]) -> None:
        """Let the drafters that read the target's states have those of a forward."""
        for drafter, listener in self._listeners:
            if drafter.name in self.failures:
                continue
            try:
                listener.after_forward(rows)
            except Exception as error:
                self._fail(drafter, error, [live for live, _ in rows])

    def observe(self, live: LiveRequest, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Learn from one verification of a drafter's drafts."""
        if not num_drafts or not self._later(live, drafter):
            return
        misses = self._misses.setdefault(live.request_id, RequestMisses())
        if misses.of(drafter).observe(num_accepted):
            kind = DrafterEventKind.FELL_SHORT
            self._events.append(DrafterEvent(drafter, kind, live.request_id))

    def take_events(self) -> tuple[DrafterEvent, ...]:
        """What happened since this was last called."""
        events, self._events = tuple(self._events), []
        return events

    def _fail(self, drafter: Drafter, error: Exception, lives: Sequence[LiveRequest]) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.failures[drafter.name] = reason
        self._back_offs[drafter.name].fail(self._clock())
        self._events.append(DrafterEvent(drafter.name, DrafterEventKind.FAILED, reason=reason))
        _logger.error("drafter %s failed and is left out for a while", drafter.name, exc_info=error)
        # What it kept of these requests may be half done; it begins anew when it is tried again.
        for live in lives:
            with contextlib.suppress(Exception):
                drafter.forget(live.request_id)

    def _still_helps(self, job: DraftJob, drafter: Drafter) -> bool:
        misses = self._misses.get(job.live.request_id)
        if misses is None or not job.max_drafts or not self._later(job.live, drafter.name):
            return True
        return misses.of(drafter.name).allows()

    def _is_given_up(self, live: LiveRequest, name: str) -> bool:
        misses = self._misses.get(live.request_id)
        return (
            misses is not None and self._later(live, name) and misses.of(name).num_rounds_left > 0
        )

    def _later(self, live: LiveRequest, name: str) -> bool:
        """Whether the request may go on with a drafter further down its list."""
        return any(n not in self.failures for n in _after(name, self._order(live)))

    def forget(self, request_id: str) -> None:
        self._misses.pop(request_id, None)
        for drafter in self._drafters:
            drafter.forget(request_id)

    def check_integrity(self) -> None:
        for drafter in self._drafters:
            drafter.check_integrity()

    def _order(self, live: LiveRequest) -> Sequence[str]:
        """Who may draft for a request, first choice first: as it names them, or as the server
        prefers."""
        if not live.speculates:
            return ()
        named = live.request.speculation.named_drafters
        if named is None:
            return [d.name for d in self._drafters if d.name not in self._by_name_only]
        known = self.names
        return [name for name in named if name in known]

    def _by_name(self) -> dict[str, Drafter]:
        return {drafter.name: drafter for drafter in self._drafters}


def _after(name: str, names: Sequence[str]) -> Sequence[str]:
    return names[names.index(name) + 1 :] if name in names else ()
