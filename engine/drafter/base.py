"""The contract of a drafter.

A drafter may propose anything: the acceptance rules make the output the target's own.
What a drafter keeps per request (an index, a cache) catches up with the request's committed
tokens when it is asked, so rounds without drafting cost it nothing and lose it nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One row to propose for. end is how many committed tokens the target will have computed
    after this step; max_drafts is 0 for rows that only want the drafter to keep up. A drafter
    that can tell how likely a draft is to be reached may stop before one below min_reach: it
    would cost more time than it saves."""

    live: LiveRequest
    end: int
    max_drafts: int
    min_reach: float = 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one row, in order.

    draft_probs [K, V] float32 is the distribution each was drawn from, or None when the
    drafter is deterministic (all its weight is on the token). num_positions counts token
    positions that a model computed to make it.
    """

    token_ids: tuple[int, ...] = ()
    draft_probs: torch.Tensor | None = None
    num_positions: int = 0
    drafter: str = ""


NO_PROPOSAL = Proposal()


class Drafter(Protocol):
    """A strategy: propose, and forget what was kept for a finished request."""

    @property
    def name(self) -> str: ...

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """One proposal per job, at most max_drafts tokens each; may be empty."""
        ...

    def forget(self, request_id: str) -> None: ...

    def check_integrity(self) -> None: ...


@runtime_checkable
class ForesightDrafter(Protocol):
    """A drafter that runs no model, and so can say beforehand whether it has anything."""

    def will_propose(self, live: LiveRequest) -> bool: ...


@runtime_checkable
class ForwardListener(Protocol):
    """A drafter that reads what the target computes."""

    def after_forward(self, rows: Sequence[tuple[LiveRequest, ForwardRow]]) -> None:
        """Called after every forward of the target with the rows in it, drafts included,
        before anything is accepted."""
        ...
