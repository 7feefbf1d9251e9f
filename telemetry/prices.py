"""The price book: what an hour of a machine costs, when, and how it was bought.

A price book is a TOML file:

    version = "2026-11"
    [[price]]
    machine_type = "gpu-h200"
    purchase = "on_demand"            # or spot, reserved, owned
    per_hour = "3.95"                 # a string: decimals are kept exactly
    currency = "USD"
    usd_per_unit = "1"                # only for other currencies
    embodied_per_hour = "0.12"        # optional part of per_hour for manufacture
    valid_from = 2026-01-01T00:00:00Z
    valid_to = 2027-01-01T00:00:00Z   # optional, exclusive

`tandem ledger stats` adds up the embodied part of all time; exports show it beside the price.
The ledger keeps an entry under the book's version and a digest of what it says: an entry that
is edited under the same version is another price, and rows of the past keep theirs.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from telemetry.ledger.records import PriceRecord

NANO_USD_PER_USD = 1_000_000_000
_MAX_VERSION_CHARACTERS = 48  # with the digest the ledger's column is full
_MAX_MACHINE_TYPE_CHARACTERS = 128
_PURCHASES = ("on_demand", "spot", "reserved", "owned", "assumed")
_CURRENCY = re.compile("[A-Z]{3}")


class PriceBookError(ValueError):
    """A price book that cannot be used; the message names the entry and the field."""


@dataclass(frozen=True, slots=True)
class PriceSchedule:
    """The prices of one machine type and kind of purchase, oldest first, without overlaps."""

    prices: tuple[PriceRecord, ...]

    def __post_init__(self) -> None:
        if not self.prices:
            raise PriceBookError("no price for this machine type and purchase")
        for earlier, later in zip(self.prices, self.prices[1:], strict=False):
            if earlier.valid_to is None or earlier.valid_to != later.valid_from:
                raise PriceBookError(
                    f"prices of {earlier.machine_type}/{earlier.purchase} leave a gap or overlap "
                    f"at {later.valid_from.isoformat()}"
                )

    def at(self, instant: datetime) -> PriceRecord:
        """The price in force. Before the first validity the first price, after the last the
        last: a machine that runs is never free of charge because a book is out of date."""
        for price in self.prices:
            if price.valid_to is None or instant < price.valid_to:
                return price
        return self.prices[-1]

    def next_change(self, instant: datetime) -> datetime | None:
        """When the price in force ends; None when no other follows."""
        for price in self.prices[:-1]:
            if price.valid_to is not None and instant < price.valid_to:
                return price.valid_to
        return None


def fixed_price(usd_per_hour: str, machine_type: str = "default") -> PriceSchedule:
    """One price for all times, for a machine that has no price book; marked as assumed."""
    return PriceSchedule(
        (
            _with_digest(
                PriceRecord(
                    book_version="fixed",
                    machine_type=machine_type,
                    purchase="assumed",
                    currency="USD",
                    nano_usd_per_hour=_nano_usd(usd_per_hour, Decimal(1), "per_hour"),
                    embodied_nano_usd_per_hour=0,
                    valid_from=datetime(1970, 1, 1, tzinfo=UTC),
                )
            ),
        )
    )


def read_price_book(path: Path) -> tuple[PriceRecord, ...]:
    """All entries of a price book. Raises PriceBookError, or OSError when it cannot be read."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PriceBookError(f"{path}: {error}") from error
    version = document.get("version")
    if not isinstance(version, str) or not version:
        raise PriceBookError(f"{path}: version: must be a text")
    if len(version) > _MAX_VERSION_CHARACTERS:
        raise PriceBookError(
            f"{path}: version: has {len(version)} characters, at most {_MAX_VERSION_CHARACTERS}"
        )
    entries = document.get("price", [])
    return tuple(_price(version, entry, f"{path}: price[{i}]") for i, entry in enumerate(entries))


def schedule_of(
    prices: Iterable[PriceRecord], machine_type: str, purchase: str = "on_demand"
) -> PriceSchedule:
    """The schedule of one machine type and kind of purchase.

    Raises PriceBookError when there is none, or when its validities overlap or leave gaps.
    """
    chosen = (p for p in prices if (p.machine_type, p.purchase) == (machine_type, purchase))
    return PriceSchedule(tuple(sorted(chosen, key=lambda price: price.valid_from)))


def _price(version: str, entry: dict[str, Any], where: str) -> PriceRecord:
    purchase = entry.get("purchase", "on_demand")
    if purchase not in _PURCHASES:
        raise PriceBookError(f"{where}.purchase: {purchase!r} is none of {_PURCHASES}")
    machine_type = entry.get("machine_type")
    if not isinstance(machine_type, str) or not machine_type:
        raise PriceBookError(f"{where}.machine_type: must be a text")
    if len(machine_type) > _MAX_MACHINE_TYPE_CHARACTERS:
        raise PriceBookError(
            f"{where}.machine_type: has {len(machine_type)} characters, "
            f"at most {_MAX_MACHINE_TYPE_CHARACTERS}"
        )
    currency = entry.get("currency", "USD")
    if not isinstance(currency, str) or not _CURRENCY.fullmatch(currency):
        raise PriceBookError(f"{where}.currency: {currency!r} is no code of three capitals")
    if currency != "USD" and "usd_per_unit" not in entry:
        raise PriceBookError(f"{where}.usd_per_unit: needed for {currency}")
    rate = _decimal(entry.get("usd_per_unit", "1"), f"{where}.usd_per_unit")
    per_hour = _nano_usd(entry.get("per_hour"), rate, f"{where}.per_hour")
    embodied = _nano_usd(entry.get("embodied_per_hour", "0"), rate, f"{where}.embodied_per_hour")
    if embodied > per_hour:
        raise PriceBookError(f"{where}.embodied_per_hour: is more than per_hour")
    return _with_digest(
        PriceRecord(
            book_version=version,
            machine_type=machine_type,
            purchase=purchase,
            currency=currency,
            nano_usd_per_hour=per_hour,
            embodied_nano_usd_per_hour=embodied,
            valid_from=_instant(entry.get("valid_from"), f"{where}.valid_from"),
            valid_to=(
                _instant(entry["valid_to"], f"{where}.valid_to") if "valid_to" in entry else None
            ),
        )
    )


def _with_digest(price: PriceRecord) -> PriceRecord:
    digest = hashlib.sha256(repr(price).encode()).hexdigest()[:12]
    return replace(price, book_version=f"{price.book_version}@{digest}")


def _instant(value: object, where: str) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise PriceBookError(f"{where}: must be an instant with a time zone, got {value!r}")
    return value.astimezone(UTC)


def _decimal(value: object, where: str) -> Decimal:
    if isinstance(value, float):
        raise PriceBookError(f"{where}: write the number in quotes, so that it stays exact")
    try:
        number = Decimal(str(value))
    except InvalidOperation as error:
        raise PriceBookError(f"{where}: {value!r} is not a number") from error
    if not number.is_finite() or number < 0:
        raise PriceBookError(f"{where}: must not be negative, got {value!r}")
    return number


def _nano_usd(value: object, usd_per_unit: Decimal, where: str) -> int:
    return int((_decimal(value, where) * usd_per_unit * NANO_USD_PER_USD).to_integral_value())
