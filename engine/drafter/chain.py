"""The drafters in their order of preference: the first that proposes for a row wins.

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
        self._append(drafter)
        self._by_name_only.add(drafter.name)

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
        for drafter in self._drafters:
            if not self._back_offs[drafter.name].allows(now):
                continue
            open_jobs = [
                index
                for index, job in enumerate(jobs)
                if not proposals[index].token_ids
                and self._may_use(job.live, drafter)
                and self._still_helps(job, drafter)
            ]
            if not open_jobs:
                continue
            try:
                found = drafter.propose([jobs[index] for index in open_jobs])
            except Exception as error:
                self._fail(drafter, error, [jobs[index].live for index in open_jobs])
                continue
            if self._back_offs[drafter.name].succeed():
                del self.failures[drafter.name]
                self._events.append(DrafterEvent(drafter.name, DrafterEventKind.RECOVERED))
            for index, proposal in zip(open_jobs, found, strict=True):
                spent = proposals[index].num_positions + proposal.num_positions
                proposals[index] = replace(proposal, num_positions=spent)
        return proposals

    def foresee(self, live: LiveRequest) -> DraftSource | None:
        """Who would draft for a row now; None if nobody. Nothing is tried, nothing counted."""
        now = self._clock()
        for drafter in self._drafters:
            if not (self._may_use(live, drafter) and self._back_offs[drafter.name].allows(now)):
                continue
            if self._is_given_up(live, drafter.name):
                continue
            if not isinstance(drafter, ForesightDrafter):
                return DraftSource(drafter.name, is_free=False)
            try:
                if drafter.will_propose(live):
                    return DraftSource(drafter.name, is_free=True)
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
        """Whether the request may go on with a drafter further down the list."""
        usable = [d.name for d in self._drafters if self._may_use(live, d)]
        return any(n not in self.failures for n in _after(name, usable))

    def forget(self, request_id: str) -> None:
        self._misses.pop(request_id, None)
        for drafter in self._drafters:
            drafter.forget(request_id)

    def check_integrity(self) -> None:
        for drafter in self._drafters:
            drafter.check_integrity()

    def _may_use(self, live: LiveRequest, drafter: Drafter) -> bool:
        named = live.request.speculation.named_drafters
        if named is None:
            return live.speculates and drafter.name not in self._by_name_only
        return live.speculates and drafter.name in named


def _after(name: str, names: Sequence[str]) -> Sequence[str]:
    return names[names.index(name) + 1 :] if name in names else ()
