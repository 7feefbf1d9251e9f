"""What a step returns: plain data that leaves the engine."""

from dataclasses import dataclass

from engine.request import TokenDelta
from engine.stats import RequestStats, StepStats


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outcome of one `Engine.step()`.

    deltas: at most one per request. finished: the requests whose last delta this is, in the
    same order as those deltas. stats is None when the step had no row to compute (only
    cancellations, or nothing at all).
    """

    deltas: tuple[TokenDelta, ...]
    finished: tuple[RequestStats, ...]
    stats: StepStats | None
