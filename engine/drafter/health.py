"""When a drafter is left out: after a failure for a while, after misses for some verifications.

A failure (an exception, values that are not finite) concerns a drafter and everybody: it is left
out for a time that doubles with every failure that follows a retry. A miss concerns a drafter and
one request: drafts of which not one was accepted. After several in a row the request goes on with
the next drafter of the list, and this one is probed again later, ever more rarely.
"""

from dataclasses import dataclass, field

_FIRST_PAUSE_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 3600.0
_MISSES_TO_FALL_BACK = 4
_FIRST_PAUSE_ROUNDS = 8
_MAX_PAUSE_ROUNDS = 128


@dataclass(slots=True)
class FailureBackOff:
    """The failures of one drafter."""

    pause_seconds: float = _FIRST_PAUSE_SECONDS
    failed_at: float | None = None

    def fail(self, now: float) -> None:
        if self.failed_at is not None:
            self.pause_seconds = min(2 * self.pause_seconds, _MAX_PAUSE_SECONDS)
        self.failed_at = now

    def succeed(self) -> bool:
        """Whether this ends a series of failures."""
        has_recovered = self.failed_at is not None
        self.failed_at, self.pause_seconds = None, _FIRST_PAUSE_SECONDS
        return has_recovered

    def allows(self, now: float) -> bool:
        return self.failed_at is None or now - self.failed_at >= self.pause_seconds


@dataclass(slots=True)
class MissBackOff:
    """The misses of one drafter in one request; rounds are those in which it could have drafted."""

    num_misses: int = 0
    num_rounds_left: int = 0
    pause_rounds: int = _FIRST_PAUSE_ROUNDS

    def observe(self, num_accepted: int) -> bool:
        """Learn from one verification of its drafts; whether it is left out from now on."""
        if num_accepted:
            self.num_misses, self.pause_rounds = 0, _FIRST_PAUSE_ROUNDS
            return False
        self.num_misses += 1
        if self.num_misses < _MISSES_TO_FALL_BACK:
            return False
        self.num_misses -= 1  # a probe that misses is enough for the next pause
        self.num_rounds_left = self.pause_rounds
        self.pause_rounds = min(2 * self.pause_rounds, _MAX_PAUSE_ROUNDS)
        return True

    def allows(self) -> bool:
        """Whether it may draft in this round; asked once per round."""
        if self.num_rounds_left == 0:
            return True
        self.num_rounds_left -= 1
        return False


@dataclass(slots=True)
class RequestMisses:
    """What is known of the drafters in one request."""

    by_drafter: dict[str, MissBackOff] = field(default_factory=dict)

    def of(self, drafter: str) -> MissBackOff:
        return self.by_drafter.setdefault(drafter, MissBackOff())
