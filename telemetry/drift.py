"""Notices that a drafter is accepted less than it used to be: traffic has moved away from what it
was trained on, or the target has changed under it.

Two exponentially weighted averages of the acceptance length: one forgets within about half an
hour, the other within about a day. A recent one that stays more than `max_drop` below the usual
one for an hour is told once, with what to do, and again only after it has recovered.
"""

import logging
import math
import threading
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Average:
    """Accepted drafts and verify steps, older ones weighing less. Instants in seconds."""

    memory_seconds: float
    accepted: float = 0.0
    steps: float = 0.0
    at: float = -math.inf

    def add(self, num_accepted: int, num_steps: int, now: float) -> None:
        kept = math.exp(-max(0.0, now - self.at) / self.memory_seconds)
        self.accepted = self.accepted * kept + num_accepted
        self.steps = self.steps * kept + num_steps
        self.at = max(self.at, now)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.steps


@dataclass(slots=True)
class _State:
    recent: _Average
    usual: _Average
    below_since: float | None = None
    is_told: bool = False


@dataclass(slots=True)
class AcceptanceDrift:
    """Of all drafters of a server. Thread-safe.

    min_steps: verify steps, weighted, that the recent average needs before it counts; the usual
    one needs eight times as many.
    """

    max_drop: float = 0.05
    patience_seconds: float = 3600.0
    recent_seconds: float = 1800.0
    usual_seconds: float = 86_400.0
    min_steps: float = 500.0
    _states: dict[str, _State] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, drafter: str, num_accepted: int, num_steps: int, now: float) -> float:
        """One finished request; the drop, relative, 0 while it is not known or there is none."""
        with self._lock:
            state = self._states.get(drafter)
            if state is None:
                averages = _Average(self.recent_seconds), _Average(self.usual_seconds)
                state = self._states[drafter] = _State(*averages)
            for average in (state.recent, state.usual):
                average.add(num_accepted, num_steps, now)
            if state.recent.steps < self.min_steps or state.usual.steps < 8 * self.min_steps:
                return 0.0
            drop = 1 - state.recent.acceptance_length / state.usual.acceptance_length
            self._tell(drafter, state, drop, now)
        return max(0.0, drop)

    def _tell(self, drafter: str, state: _State, drop: float, now: float) -> None:
        if drop <= self.max_drop:
            state.below_since = None
            state.is_told = state.is_told and drop > self.max_drop / 2
            return
        if state.below_since is None:
            state.below_since = now
        if state.is_told or now - state.below_since < self.patience_seconds:
            return
        state.is_told = True
        _log.warning(
            "acceptance length of drafter %s has been more than %.0f %% below its usual %.2f for "
            "%.0f minutes, it is %.2f now; to retrain it: tandem train run --target TARGET with "
            "recent requests as data.prompts, tandem train compare with the head in use, then "
            "tandem drafter register and promote",
            drafter,
            100 * self.max_drop,
            state.usual.acceptance_length,
            (now - state.below_since) / 60,
            state.recent.acceptance_length,
        )
