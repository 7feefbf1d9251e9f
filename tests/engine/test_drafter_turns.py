"""Rows with lists of their own share the turns of their drafters."""

import itertools

import pytest

from engine.drafter.turns import Turns

SERVERS = ("lookup", "head", "model")


def turns_of(orders: list[tuple[str, ...]], found: dict[str, set[int]]) -> list[tuple[str, list]]:  # type: ignore[type-arg]
    """All turns, where a drafter in `found` has something for these rows."""
    turns = Turns(orders, SERVERS)
    taken = []
    while (turn := turns.take()) is not None:
        taken.append(turn)
        name, rows = turn
        for index in found.get(name, set()) & set(rows):
            turns.finish(index)
    return taken


def test_rows_with_the_same_list_are_asked_for_together_until_they_have_drafts() -> None:
    assert turns_of([SERVERS] * 3, {"lookup": {1}, "head": {0}}) == [
        ("lookup", [0, 1, 2]),
        ("head", [0, 2]),
        ("model", [2]),
    ]


def test_a_drafter_waits_for_the_rows_that_want_it_later() -> None:
    orders = [("model",), ("lookup", "model"), ("head", "lookup", "model"), ()]
    assert turns_of(orders, {}) == [("head", [2]), ("lookup", [1, 2]), ("model", [0, 1, 2])]


def test_lists_that_contradict_each_other_are_all_kept() -> None:
    orders = [("lookup", "model"), ("model", "lookup")]
    assert turns_of(orders, {}) == [("lookup", [0]), ("model", [0, 1]), ("lookup", [1])]


@pytest.mark.parametrize("seed", range(4))
def test_every_row_meets_its_drafters_in_its_order_and_each_once(seed: int) -> None:
    lists = list(itertools.permutations(SERVERS))
    orders = [lists[(seed * 7 + n * 5) % len(lists)][: 1 + (seed + n) % 3] for n in range(6)]
    met: dict[int, list[str]] = {n: [] for n in range(len(orders))}
    for name, rows in turns_of(orders, {}):
        for index in rows:
            met[index].append(name)
    assert met == {n: list(order) for n, order in enumerate(orders)}
