"""What a forward costs, by the number of tokens in it: measured at start, kept per machine."""

import bisect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_TOKENS_MEASURED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class CostTable:
    """seconds[i] is the time of a forward of num_tokens[i] tokens; grows with the tokens.

    Between measured points the time is interpolated, beyond the last it goes on with the
    last slope.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.num_tokens) != len(self.seconds) or not self.num_tokens:
            raise ValueError("a cost table needs one time per number of tokens")
        if list(self.num_tokens) != sorted(set(self.num_tokens)) or self.num_tokens[0] < 1:
            raise ValueError("num_tokens must grow from at least 1")
        if any(
            later < earlier for earlier, later in zip(self.seconds, self.seconds[1:], strict=False)
        ):
            raise ValueError("seconds must not fall when tokens are added")
        if self.seconds[0] < 0:
            raise ValueError("seconds must not be negative")

    @classmethod
    def from_samples(cls, samples: Sequence[tuple[int, float]]) -> "CostTable":
        """From (num_tokens, seconds); a time below that of fewer tokens is noise and raised."""
        ordered = sorted(samples)
        times: list[float] = []
        for _, seconds in ordered:
            times.append(max(seconds, times[-1]) if times else seconds)
        return cls(tuple(tokens for tokens, _ in ordered), tuple(times))

    def forward_seconds(self, num_tokens: int) -> float:
        points, times = self.num_tokens, self.seconds
        if num_tokens <= points[0] or len(points) == 1:
            return times[0]
        right = min(bisect.bisect_left(points, num_tokens), len(points) - 1)
        left = right - 1
        slope = (times[right] - times[left]) / (points[right] - points[left])
        return times[left] + slope * (num_tokens - points[left])


def load_or_measure(path: Path | None, measure: Callable[[], CostTable]) -> CostTable:
    """The table kept at `path`, or a fresh one, which is then kept there.

    A file that cannot be read or written costs a measurement, never a start.
    """
    if path is not None:
        try:
            kept = json.loads(path.read_text())
            return CostTable(tuple(kept["num_tokens"]), tuple(kept["seconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
    table = measure()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}")
            content = {"num_tokens": table.num_tokens, "seconds": table.seconds}
            part.write_text(json.dumps(content))
            part.replace(path)
        except OSError:
            pass
    return table
