"""Prompt lookup: what followed the last time these tokens appeared in this very request.

The index belongs to one request and is never shared, so nothing of one tenant's text can
show in another's timing. Adding a token costs a constant amount of work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.drafter.base import NO_PROPOSAL, DraftJob, Proposal
from engine.live_request import LiveRequest


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of one request was last continued.

    An n-gram is indexed when its continuation is known, so the newest n-grams are not in it.
    """

    min_ngram: int
    max_ngram: int
    num_indexed: int = 0
    continuation: dict[tuple[int, ...], int] = field(default_factory=dict)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that end before the newest token."""
        for end in range(self.num_indexed, len(token_ids)):
            for length in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self.continuation[tuple(token_ids[end - length : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids))

    def lookup(self, token_ids: Sequence[int], max_drafts: int) -> tuple[int, ...]:
        """What followed the longest indexed n-gram that the tokens end with.

        A continuation that reaches the newest token goes on with itself: a loop of any
        period is drafted to its full length.
        """
        for length in range(min(self.max_ngram, len(token_ids)), self.min_ngram - 1, -1):
            start = self.continuation.get(tuple(token_ids[-length:]))
            if start is not None:
                period = len(token_ids) - start
                return tuple(token_ids[start + offset % period] for offset in range(max_drafts))
        return ()


class PromptLookupDrafter:
    """Deterministic and model-free."""

    name = "prompt_lookup"

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [self._propose(job) if job.max_drafts else NO_PROPOSAL for job in jobs]

    def will_propose(self, live: LiveRequest) -> bool:
        return bool(self._lookup(live, 1))

    def _propose(self, job: DraftJob) -> Proposal:
        return Proposal(self._lookup(job.live, job.max_drafts), drafter=self.name)

    def _lookup(self, live: LiveRequest, max_drafts: int) -> tuple[int, ...]:
        index = self._indexes.get(live.request_id)
        if index is None:
            index = NgramIndex(self._min_ngram, self._max_ngram)
            self._indexes[live.request_id] = index
        index.catch_up(live.token_ids)
        return index.lookup(live.token_ids, max_drafts)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def check_integrity(self) -> None:
        """Nothing can go out of step: the index holds positions of append-only tokens."""
