"""The target's hidden states that a request's head has not read yet."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class PendingFeatures:
    """Captured states [n, 3H] of consecutive positions, the last `limit` of them.

    A forward computes drafts too, and some of them are rejected: the next forward of the
    request begins where the committed tokens end, and what lies beyond is dropped then.
    """

    limit: int
    _chunks: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def hear(self, start: int, captured: torch.Tensor) -> None:
        """Positions start.. of a forward that was just run."""
        self._cut(start)
        if self._chunks and self.stop < start:
            self._chunks.clear()  # a gap: a reused prefix, or tokens that nobody captured
        self._chunks.append((start, captured[-self.limit :].clone()))
        if len(captured) > self.limit:
            self._chunks[-1] = (start + len(captured) - self.limit, self._chunks[-1][1])
        while len(self._chunks) > 1 and self.stop - self._chunks[1][0] >= self.limit:
            del self._chunks[0]

    @property
    def start(self) -> int:
        return self._chunks[0][0] if self._chunks else 0

    @property
    def stop(self) -> int:
        if not self._chunks:
            return 0
        start, captured = self._chunks[-1]
        return start + len(captured)

    def take(self, stop: int) -> tuple[int, torch.Tensor] | None:
        """(first position, states) of all positions before `stop`, which must all have been
        heard, the last at least; they are forgotten. None if they were not."""
        self._cut(stop)
        if not self._chunks or self.stop != stop:
            return None
        start = self.start
        captured = torch.cat([chunk for _, chunk in self._chunks])
        self._chunks.clear()
        return start, captured

    def _cut(self, stop: int) -> None:
        """Forget positions from `stop` on."""
        while self._chunks:
            start, captured = self._chunks[-1]
            if start + len(captured) <= stop:
                return
            del self._chunks[-1]
            if start < stop:
                self._chunks.append((start, captured[: stop - start]))
