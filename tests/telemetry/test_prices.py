"""The price book: exact decimals, validities, and messages that name the entry."""

from pathlib import Path

import pytest

from telemetry.prices import PriceBookError, fixed_price, read_price_book, schedule_of

BOOK = """
version = "2026-11"
[[price]]
machine_type = "gpu"
per_hour = "3.951234567"
embodied_per_hour = "0.12"
valid_from = 2026-01-01T00:00:00Z
valid_to = 2026-07-01T00:00:00Z
[[price]]
machine_type = "gpu"
per_hour = "4"
valid_from = 2026-07-01T02:00:00+02:00
[[price]]
machine_type = "gpu"
purchase = "spot"
per_hour = "1.10"
currency = "EUR"
usd_per_unit = "1.1"
valid_from = 2026-01-01T00:00:00Z
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return path


def test_a_book_keeps_every_digit_and_every_price(tmp_path: Path) -> None:
    prices = read_price_book(_write(tmp_path, BOOK))
    on_demand = schedule_of(prices, "gpu")
    assert [p.nano_usd_per_hour for p in on_demand.prices] == [3_951_234_567, 4_000_000_000]
    assert on_demand.prices[0].embodied_nano_usd_per_hour == 120_000_000
    assert on_demand.next_change(on_demand.prices[0].valid_from) == on_demand.prices[1].valid_from
    assert schedule_of(prices, "gpu", "spot").prices[0].nano_usd_per_hour == 1_210_000_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"3.951234567"', "3.95", r"price\[0\].per_hour: write the number in quotes"),
        ('"4"', '"-4"', r"price\[1\].per_hour: must not be negative"),
        ('"4"', '"four"', r"price\[1\].per_hour: 'four' is not a number"),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00", r"price\[0\].valid_from: .* time zone"),
        ('usd_per_unit = "1.1"\n', "", r"price\[2\].usd_per_unit: needed for EUR"),
        ('"spot"', '"stolen"', r"price\[2\].purchase"),
        ('"0.12"', '"9.9"', r"price\[0\].embodied_per_hour: is more"),
        ('version = "2026-11"', "", "version"),
        ("2026-11", "x" * 49, "version: has 49 characters, at most 48"),
        ('"gpu"', f'"{"x" * 129}"', r"price\[0\].machine_type: has 129 characters"),
        ('"EUR"', '"euros"', r"price\[2\].currency: 'euros' is no code"),
        ("[[price]]", "[[price", "prices.toml"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(PriceBookError, match=message):
        read_price_book(_write(tmp_path, BOOK.replace(old, new, 1)))


def test_an_entry_edited_under_the_same_version_is_another_price(tmp_path: Path) -> None:
    before = read_price_book(_write(tmp_path, BOOK))
    after = read_price_book(_write(tmp_path, BOOK.replace('"4"', '"5"')))
    same = [a.book_version == b.book_version for a, b in zip(before, after, strict=True)]
    assert same == [True, False, True]
    assert all(price.book_version.startswith("2026-11@") for price in after)
    assert fixed_price("1").prices[0].book_version != fixed_price("2").prices[0].book_version


def test_an_unknown_machine_has_no_price(tmp_path: Path) -> None:
    with pytest.raises(PriceBookError, match="no price"):
        schedule_of(read_price_book(_write(tmp_path, BOOK)), "cpu")
