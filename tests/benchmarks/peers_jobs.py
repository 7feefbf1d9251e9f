"""What a peer is asked to do and what it answers: plain data, sent as lines of JSON.

Nothing is imported but the standard library: a peer may run in an environment of its own.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that a peer decodes greedily, at most num_rows at a time.

    max_tokens: exactly as many tokens are generated per prompt; end of sequence is ignored.
    tenants: prompts of one tenant may share cached prefixes, others must not.
    arrivals: seconds after the start at which each request arrives, ascending; None: all are
      there from the start (a closed loop of num_rows clients).
    shares_prefixes: tenants come back in a later job with what they sent and more.
    """

    mode: str  # "plain" or "speculative"
    num_rows: int
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    tenants: tuple[str, ...]
    arrivals: tuple[float, ...] | None = None
    shares_prefixes: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.max_tokens) == len(self.tenants) > 0:
            raise ValueError("prompts, max_tokens and tenants must have one entry per request")
        if self.arrivals is not None and list(self.arrivals) != sorted(self.arrivals):
            raise ValueError("arrivals must ascend")
        if self.arrivals is not None and len(self.arrivals) != len(self.prompts):
            raise ValueError("arrivals must have one entry per request")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Job":
        return cls(
            value["mode"],
            value["num_rows"],
            tuple(map(tuple, value["prompts"])),
            tuple(value["max_tokens"]),
            tuple(value["tenants"]),
            tuple(value["arrivals"]) if value["arrivals"] is not None else None,
            value["shares_prefixes"],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def arrived_at(self, index: int) -> float:
        return 0.0 if self.arrivals is None else self.arrivals[index]


@dataclass(frozen=True, slots=True)
class Served:
    """One request; times are seconds after the job's start. first_at and finished_at are when
    the client could have seen the first and the last token."""

    token_ids: tuple[int, ...]
    sent_at: float
    first_at: float
    finished_at: float

    @property
    def ttft_seconds(self) -> float:
        return self.first_at - self.sent_at

    @property
    def tpot_seconds(self) -> float | None:
        """None for a single token: there is no time between tokens."""
        if len(self.token_ids) < 2:
            return None
        return (self.finished_at - self.first_at) / (len(self.token_ids) - 1)


class RefusedError(Exception):
    """The peer cannot do this job at all; the message is the reason that is reported."""
