"""Which conversations are trained on and which are held out."""

from engine.training.feature_cache import CachedRow
from engine.training.material import held_out


def rows(count: int, source: str = "a") -> list[CachedRow]:
    return [CachedRow(f"{source}:{i}", source, 0.0, 0, 0, 20, 8) for i in range(count)]


def test_few_conversations_still_hold_one_out() -> None:
    for count in (2, 3, 8):
        kept, out = held_out(rows(count), 1e-9)
        assert (len(kept), len(out)) == (count - 1, 1)


def test_both_sides_are_chosen_by_key_alone() -> None:
    kept, out = held_out(rows(500), 0.1)
    assert {row.key for row in kept}.isdisjoint(row.key for row in out)
    assert 20 < len(out) < 90
    assert held_out(rows(500)[::-1], 0.1)[1] == out[::-1]


def test_no_source_gives_more_than_its_share() -> None:
    kept, _ = held_out([*rows(300), *rows(100, "b")], 0.05, max_source_share=0.3)
    counts = {source: sum(row.source == source for row in kept) for source in "ab"}
    assert counts["a"] <= 0.3 * 400
    assert counts["b"] > 85
