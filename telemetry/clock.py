"""Turning monotonic instants into UTC ones, the same way everywhere in a process."""

import time
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AnchoredClock:
    """Maps `time.monotonic()` to UTC by one reading of both clocks.

    One anchor for the life of a process: intervals stay contiguous and durations true when the
    wall clock is set, at the price of an offset until the next start.
    """

    def __init__(self) -> None:
        self._offset_nanoseconds = time.time_ns() - time.monotonic_ns()

    def now_nanoseconds(self) -> int:
        """The monotonic clock."""
        return time.monotonic_ns()

    def utc(self, monotonic_nanoseconds: int) -> datetime:
        """UTC to the microsecond."""
        microseconds = (monotonic_nanoseconds + self._offset_nanoseconds) // 1000
        return _EPOCH + timedelta(microseconds=microseconds)

    def utc_of(self, instant: float) -> datetime:
        """UTC of a `time.monotonic()` instant in seconds."""
        return self.utc(int(instant * 1e9))

    def monotonic_nanoseconds(self, instant: datetime) -> int:
        """The inverse of `utc`."""
        microseconds = (instant - _EPOCH) // timedelta(microseconds=1)
        return microseconds * 1000 - self._offset_nanoseconds
