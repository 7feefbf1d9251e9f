"""The suffix automaton against a search by brute force, what a token costs, and its drafts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafter.base import DraftJob
from engine.drafter.suffix import SuffixAutomaton, SuffixDrafter
from engine.live_request import LiveRequest
from tests.engine.driver import request, run, tiny_engine
from tests.engine.test_equality import generated, prompts


def longest_repeat(token_ids: list[int]) -> int:
    """Length of the longest suffix that occurs at an earlier place too; overlaps are allowed."""
    count = len(token_ids)
    for length in range(count - 1, 0, -1):
        suffix = token_ids[count - length :]
        if any(token_ids[start : start + length] == suffix for start in range(count - length)):
            return length
    return 0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_after_every_token_the_match_is_the_longest_earlier_repeat(
    token_ids: list[int], chunk: int
) -> None:
    automaton = SuffixAutomaton()
    for stop in range(chunk, len(token_ids) + chunk, chunk):
        known = token_ids[:stop]
        automaton.catch_up(known)
        length, end = automaton.match_length, automaton.match_end
        assert length == longest_repeat(known)
        if length:
            assert end < len(known)
            assert known[end - length : end] == known[-length:]


@pytest.mark.parametrize("kind", ["random", "few", "one", "loop", "ab"])
def test_a_token_costs_a_constant_amount_of_work_whatever_the_text(kind: str) -> None:
    generator = random.Random(1)
    texts = {
        "random": lambda n: generator.randrange(50_000),
        "few": lambda n: generator.randrange(3),
        "one": lambda n: 7,
        "loop": lambda n: n % 37,
        "ab": lambda n: int((n & -n).bit_length() % 2),
    }
    costs = []
    for count in (2_000, 8_000):
        automaton = SuffixAutomaton()
        automaton.catch_up([texts[kind](n) for n in range(count)])
        assert len(automaton.links) <= 2 * count
        costs.append(automaton.num_steps / count)
    assert costs[0] < 10
    assert costs[1] < 1.2 * costs[0]


def draft(token_ids: list[int], max_drafts: int, min_match: int = 2) -> tuple[int, ...]:
    live = LiveRequest(request("a", token_ids), list(token_ids))
    (found,) = SuffixDrafter(min_match=min_match).propose(
        [DraftJob(live, len(token_ids), max_drafts)]
    )
    return found.token_ids


def test_the_continuation_of_the_longest_match_is_drafted() -> None:
    # 1 2 3 was last followed by 9, but the longer 8 1 2 3 by 4 5.
    assert draft([8, 1, 2, 3, 4, 5, 0, 1, 2, 3, 9, 8, 1, 2, 3], 2) == (4, 5)


def test_a_loop_is_drafted_to_its_full_length() -> None:
    assert draft([5, 6, 7] * 4, 7) == (5, 6, 7, 5, 6, 7, 5)


def test_a_short_match_is_no_reason_to_draft() -> None:
    assert draft([1, 2, 3, 4, 1], 3) == ()
    assert draft([1, 2, 3, 4, 1], 3, min_match=1) == (2, 3, 4)
    assert draft([1], 3) == ()


def test_each_request_has_an_automaton_of_its_own_and_leaves_none_behind() -> None:
    drafter = SuffixDrafter(min_match=2)
    first = LiveRequest(request("a", [1, 2, 3]), [1, 2, 3, 4, 1, 2])
    second = LiveRequest(request("b", [1, 2]), [1, 2])
    found = drafter.propose([DraftJob(first, 6, 2), DraftJob(second, 2, 2)])
    assert [p.token_ids for p in found] == [(3, 4), ()]
    drafter.check_integrity()
    drafter.forget("a")
    drafter.forget("b")
    assert not drafter._automata


def test_it_is_chosen_by_configuration_or_by_a_request_and_changes_no_token() -> None:
    engine = tiny_engine(drafters=("prompt_lookup", "suffix"), max_num_rows=4)
    assert engine.info.drafters == ("prompt_lookup", "suffix")
    items = [
        request(str(n), prompt, max_tokens=30, drafter="suffix")
        for n, prompt in enumerate(prompts(8))
    ]
    outcome = run(engine, items)
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    assert {s.drafter for s in outcome.stats.values()} <= {"", "suffix"}
    assert sum(s.num_accepted_tokens for s in outcome.stats.values()) > 0
