"""With coalescing, the sizes and times of messages do not depend on what was accepted."""

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.request import FinishReason, TokenDelta
from service.coalescing import TokenGroups, merge
from tests.fakes import FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import read_all, text_request


def deltas_of(sizes: list[int]) -> list[TokenDelta]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    deltas = [
        TokenDelta("r", start, tuple(range(start, start + size)))
        for start, size in zip(starts, sizes, strict=True)
    ]
    end = TokenDelta("r", sum(sizes), (), finish_reason=FinishReason.LENGTH)
    return [*deltas, end]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5))
def test_groups_have_one_size_and_lose_nothing(sizes: list[int], size: int) -> None:
    groups = TokenGroups(size)
    sent = [part for delta in deltas_of(sizes) for part in groups.push(delta)]
    assert [token for part in sent for token in part.token_ids] == list(range(sum(sizes)))
    assert all(len(part.token_ids) == size for part in sent[:-1])
    assert len(sent[-1].token_ids) <= size
    assert [part.finish_reason for part in sent[:-1]] == [None] * (len(sent) - 1)
    assert sent[-1].finish_reason is FinishReason.LENGTH
    for before, after in pairwise(sent):
        assert after.first_token_index == before.first_token_index + size


def test_merging_keeps_order_and_ending() -> None:
    merged = merge(deltas_of([2, 3]))
    assert merged.token_ids == (0, 1, 2, 3, 4)
    assert merged.first_token_index == 0
    assert merged.finish_reason is FinishReason.LENGTH


async def test_stream_of_groups_joins_to_the_same_text() -> None:
    async with running_server() as running:
        plain = await read_all(running, text_request())
    async with running_server(coalesce_tokens=4) as running:
        grouped = await read_all(running, text_request())
    assert [len(event.delta.token_ids) for event in grouped[1:-1]] == [4, 4, 2]
    assert "".join(e.delta.text for e in grouped) == "".join(e.delta.text for e in plain)


async def test_time_slots_gather_what_comes_between_them() -> None:
    engine = FakeEngine(step_seconds=0.005)
    async with running_server(engine, coalesce_seconds=0.1) as running:
        request = text_request()
        request.stopping.max_tokens = 120  # 40 steps, 0.2 seconds at the least
        began_at = time.monotonic()
        events = await read_all(running, request)
        num_slots = (time.monotonic() - began_at) / 0.1
    deltas = [event.delta for event in events[1:-1]]
    assert len(deltas) <= num_slots + 1
    assert len(deltas) < 40
    assert sum(len(delta.token_ids) for delta in deltas) == 120


def test_full_group_goes_out_at_once() -> None:
    groups = TokenGroups(2)
    sent = [[part.token_ids for part in groups.push(delta)] for delta in deltas_of([1, 1, 3])]
    assert sent == [[], [(0, 1)], [(2, 3)], [(4,)]]
