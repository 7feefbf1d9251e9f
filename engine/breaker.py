"""Switches speculation off when the auditor finds divergences, and tries it again later."""

from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"  # speculation is allowed
    OPEN = "open"  # it is not
    HALF_OPEN = "half_open"  # it is, and the next audits decide


class SpeculationBreaker:
    """Opens at `max_divergences` among the last `window` audits of speculative requests.

    After cooldown_seconds it lets speculation run again; `num_trials` exact audits close it, one
    divergence opens it anew and doubles the wait, up to max_cooldown_seconds.
    """

    def __init__(
        self,
        *,
        max_divergences: int = 1,
        window: int = 200,
        cooldown_seconds: float = 300.0,
        max_cooldown_seconds: float = 3600.0,
        num_trials: int = 10,
    ) -> None:
        self._max_divergences = max_divergences
        self._window = window
        self._first_cooldown = cooldown_seconds
        self._max_cooldown = max_cooldown_seconds
        self._num_trials = num_trials
        self._cooldown = cooldown_seconds
        self._recent: list[bool] = []
        self._opened_at: float | None = None
        self._num_passed = 0
        self.num_trips = 0

    def state(self, now: float) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        if now - self._opened_at < self._cooldown:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def allows_speculation(self, now: float) -> bool:
        return self.state(now) is not BreakerState.OPEN

    def observe(self, is_divergence: bool, now: float) -> None:
        """Learn from one audit of a request that speculated."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return  # a late audit of what ran before
        if state is BreakerState.HALF_OPEN:
            if is_divergence:
                self._cooldown = min(2 * self._cooldown, self._max_cooldown)
                self._trip(now)
                return
            self._num_passed += 1
            if self._num_passed >= self._num_trials:
                self._opened_at, self._cooldown = None, self._first_cooldown
                self._recent.clear()
            return
        self._recent = [*self._recent, is_divergence][-self._window :]
        if sum(self._recent) >= self._max_divergences:
            self._trip(now)

    def _trip(self, now: float) -> None:
        self._opened_at = now
        self._num_passed = 0
        self._recent.clear()
        self.num_trips += 1
