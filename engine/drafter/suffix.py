"""Suffix matching: what followed the longest earlier repeat of how this request's text ends.

Where prompt lookup knows n-grams up to a length, a suffix automaton knows every substring of the
request's own prompt and output, and the longest suffix that occurred before is one of its links:
no search, however long the match. It is grown token by token (Blumer et al. 1985): at most two
states and three transitions per token, a constant number of steps on average.

The automaton belongs to one request and is never shared, as in engine/drafter/prompt_lookup.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.drafter.base import NO_PROPOSAL, DraftJob, Proposal
from engine.live_request import LiveRequest

_ROOT = 0
_NOWHERE = -1


@dataclass(slots=True)
class SuffixAutomaton:
    """All substrings of the tokens so far. Lists are by state; state 0 is the empty string.

    A state stands for substrings that end at the same places: lengths is that of the longest,
    links leads to the longest suffix that ends at more places, ends is a place where they end.
    """

    transitions: list[dict[int, int]] = field(default_factory=lambda: [{}])
    links: list[int] = field(default_factory=lambda: [_NOWHERE])
    lengths: list[int] = field(default_factory=lambda: [0])
    ends: list[int] = field(default_factory=lambda: [0])
    newest: int = _ROOT  # the state of the whole text
    match_length: int = 0
    match_end: int = 0  # the tokens before this index end like the whole text
    num_steps: int = 0  # of work, for those who want to know what a token costs

    @property
    def num_tokens(self) -> int:
        return self.lengths[self.newest]

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Append the tokens that are not in it yet."""
        for index in range(self.num_tokens, len(token_ids)):
            self._append(token_ids[index], index + 1)

    def _append(self, token_id: int, end: int) -> None:
        state = self._add({}, _ROOT, end, end)
        last, self.newest = self.newest, state
        while last != _NOWHERE and token_id not in self.transitions[last]:
            self.transitions[last][token_id] = state
            last = self.links[last]
            self.num_steps += 1
        if last != _NOWHERE:
            self.links[state] = self._suffix_state(last, token_id)
        match = self.links[state]
        self.match_length, self.match_end = self.lengths[match], self.ends[match]
        self.ends[match] = end  # the next time the text ends like this, this is the latest place

    def _suffix_state(self, last: int, token_id: int) -> int:
        """The state of the longest suffix that occurred before, split off if it needs its own."""
        found = self.transitions[last][token_id]
        length = self.lengths[last] + 1
        if self.lengths[found] == length:
            return found
        clone = self._add(
            dict(self.transitions[found]), self.links[found], length, self.ends[found]
        )
        self.num_steps += len(self.transitions[clone])
        self.links[found] = clone
        while last != _NOWHERE and self.transitions[last].get(token_id) == found:
            self.transitions[last][token_id] = clone
            last = self.links[last]
            self.num_steps += 1
        return clone

    def _add(self, transitions: dict[int, int], link: int, length: int, end: int) -> int:
        self.transitions.append(transitions)
        self.links.append(link)
        self.lengths.append(length)
        self.ends.append(end)
        self.num_steps += 1
        return len(self.links) - 1


class SuffixDrafter:
    """Deterministic and model-free."""

    name = "suffix"

    def __init__(self, *, min_match: int) -> None:
        self._min_match = min_match
        self._automata: dict[str, SuffixAutomaton] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [self._propose(job) if job.max_drafts else NO_PROPOSAL for job in jobs]

    def will_propose(self, live: LiveRequest) -> bool:
        return self._caught_up(live).match_length >= self._min_match

    def _caught_up(self, live: LiveRequest) -> SuffixAutomaton:
        automaton = self._automata.setdefault(live.request_id, SuffixAutomaton())
        automaton.catch_up(live.token_ids)
        return automaton

    def _propose(self, job: DraftJob) -> Proposal:
        token_ids = job.live.token_ids
        automaton = self._caught_up(job.live)
        if automaton.match_length < self._min_match:
            return NO_PROPOSAL
        # What follows the match may reach the newest token: a loop then goes on with itself.
        start = automaton.match_end
        period = len(token_ids) - start
        drafts = tuple(token_ids[start + offset % period] for offset in range(job.max_drafts))
        return Proposal(drafts, drafter=self.name)

    def forget(self, request_id: str) -> None:
        self._automata.pop(request_id, None)

    def check_integrity(self) -> None:
        for request_id, automaton in self._automata.items():
            if automaton.match_end >= automaton.num_tokens > 0:
                raise RuntimeError(f"{request_id}: the text's end is taken for its own repeat")
