"""The FOCUS file keeps the rules of FOCUS 1.3 and adds up to what the machine cost.

The rules are those of the specification's columns and attributes (focus.finops.org, version 1.3,
Cost and Usage): presence, null, type, format, allowed values, products of prices and quantities,
and split cost allocation. Every column of the specification is in the file or in NOT_APPLICABLE.
"""

import csv
import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from exports.focus import publish_focus
from exports.focus_columns import COLUMNS
from exports.job import run_export
from exports.manifest import read_manifest
from exports.storage import Target
from tests.exports.ledgers import NOON, LedgerFill, new_ledger

NOW = datetime(2026, 5, 20, 9, 0, tzinfo=UTC)
DAY = date(2026, 3, 28)
MANDATORY = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost"),
    *("EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost", "PricingQuantity"),
    *("PricingUnit", "ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
    "ServiceProviderName",
)
RECOMMENDED = ("AllocatedMethodDetails", "ChargeFrequency", "InvoiceId", "ServiceSubcategory")
NOT_APPLICABLE = {
    "BillingAccountType": "one type of billing account",
    "SubAccountId SubAccountName SubAccountType": "no accounts below the billing account",
    "AvailabilityZone RegionId RegionName": "the price book knows no regions",
    "CapacityReservationId CapacityReservationStatus": "no capacity is reserved of the service",
    "CommitmentDiscountCategory CommitmentDiscountId CommitmentDiscountName "
    "CommitmentDiscountQuantity CommitmentDiscountStatus CommitmentDiscountType "
    "CommitmentDiscountUnit ContractApplied": "nobody commits to use the service",
    "PricingCurrency PricingCurrencyContractedUnitPrice PricingCurrencyEffectiveCost "
    "PricingCurrencyListUnitPrice": "it is priced and billed in one currency",
    "Tags": "machines cannot be tagged",
}
"""Columns that are conditional, and why the condition does not hold."""
NULL_IN_USAGE = ("ChargeClass", "InvoiceId")  # nothing is corrected, nothing is invoiced
DECIMALS = (
    *("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "ListUnitPrice"),
    *("ContractedUnitPrice", "ConsumedQuantity", "PricingQuantity"),
)
INSTANTS = ("BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart")
ALLOWED = {
    "BillingCurrency": {"USD"},
    "ChargeCategory": {"Usage"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"Standard", "Dynamic"},
    "ServiceCategory": {"AI and Machine Learning"},
    "ServiceSubcategory": {"Generative AI"},
    "PricingUnit": {"Hours"},
    "ConsumedUnit": {"Hours"},
}
NULLABLE = (
    *("AllocatedResourceId", "AllocatedResourceName", "AllocatedTags", "ChargeFrequency"),
    *("ResourceName", "ServiceSubcategory", "SkuPriceDetails"),
)
NOT_NULL_IN_USAGE = (
    *("ConsumedQuantity", "ConsumedUnit", "ListUnitPrice", "ContractedUnitPrice", "SkuId"),
    *("SkuPriceId", "SkuMeter", "ResourceId", "ResourceType", "PricingCategory"),
    *("AllocatedMethodId", "AllocatedMethodDetails", "InvoiceIssuerName"),
)
DEFINED = {
    *(*MANDATORY, *RECOMMENDED, *NOT_NULL_IN_USAGE, *NULLABLE),
    *(name for names in NOT_APPLICABLE for name in names.split()),
}
"""All columns that FOCUS 1.3 defines for Cost and Usage."""
OF_THE_ORIGIN = [  # dimensions of the machine's charge, the same in all its parts
    name for name in COLUMNS if name not in DECIMALS and not name.startswith(("x_", "Allocated"))
] + ["AllocatedMethodId", "ListUnitPrice", "ContractedUnitPrice"]

Row = dict[str, str]


def violations(rows: list[Row]) -> list[str]:
    """What breaks a rule, in words."""
    found: list[str] = []

    def check(is_good: bool, words: str) -> None:
        if not is_good:
            found.append(words)

    for name in (*MANDATORY, *RECOMMENDED, *NOT_NULL_IN_USAGE):
        check(name in rows[0], f"{name} is missing")
    for name in rows[0]:
        check(name in DEFINED or re.fullmatch("x_[A-Z][A-Za-z]+", name) is not None, name)
        check(len(name) <= 50, f"{name} is long")
    for row in rows:
        for name in (*MANDATORY, *NOT_NULL_IN_USAGE):
            check(bool(row.get(name)) or name in NULL_IN_USAGE, f"{name} is null")
        for name in NULL_IN_USAGE:
            check(not row.get(name), f"{name} is not null")
        for name in DECIMALS:
            check(Decimal(row[name]) >= 0 and "E" not in row[name], f"{name}={row[name]}")
        for name in INSTANTS:
            datetime.strptime(row[name], "%Y-%m-%dT%H:%M:%SZ")  # noqa: DTZ007 - Z is UTC
        for name, allowed in ALLOWED.items():
            check(row[name] in allowed, f"{name}={row[name]}")
        for name, value in row.items():
            check(value == value.strip() and value.lower() != "null", f"{name}={value!r}")
        check(row["AllocatedTags"] == "" or is_flat(row["AllocatedTags"]), "AllocatedTags")
        check(row["BillingPeriodStart"] <= row["ChargePeriodStart"], "begins before its period")
        check(row["ChargePeriodEnd"] <= row["BillingPeriodEnd"], "ends after its period")
        for cost, price in (
            ("ListCost", "ListUnitPrice"),
            ("ContractedCost", "ContractedUnitPrice"),
        ):
            product = Decimal(row[price]) * Decimal(row["PricingQuantity"])
            check(abs(product - Decimal(row[cost])) < Decimal("1e-15"), f"{cost} is no product")
        check(row["ResourceName"] != row["ResourceId"], "ResourceName repeats ResourceId")
        is_named = bool(row["AllocatedResourceName"])
        check(is_named == bool(row["AllocatedResourceId"]), "AllocatedResourceName")
        check(bool(row["AllocatedResourceId"]) != bool(row["x_UnallocatedReason"]), "unallocated")
        for element in elements(row):
            check({"AllocatedRatio", "UsageUnit", "UsageQuantity"} == set(element), "Elements")
            check(0 < element["AllocatedRatio"] <= 1, f"ratio {element['AllocatedRatio']}")
            check(f"{element['UsageQuantity']:f}" == row["ConsumedQuantity"], "UsageQuantity")
            check(element["UsageUnit"] == row["ConsumedUnit"], "UsageUnit")
    for origin in {(row["ResourceId"], row["ChargePeriodStart"]) for row in rows}:
        parts = [r for r in rows if (r["ResourceId"], r["ChargePeriodStart"]) == origin]
        for name in OF_THE_ORIGIN:
            check(len({row[name] for row in parts}) == 1, f"{name} differs within {origin}")
        ratios = [element["AllocatedRatio"] for row in parts for element in elements(row)]
        check(sum(ratios) == 1, f"ratios of {origin} add up to {sum(ratios)}")
        ids = [row["AllocatedResourceId"] for row in parts if row["AllocatedResourceId"]]
        check(len(set(ids)) == len(ids), "AllocatedResourceId is not unique")
    return found


def elements(row: Row) -> list[dict[str, Any]]:
    details = json.loads(row["AllocatedMethodDetails"], parse_float=Decimal, parse_int=Decimal)
    found: list[dict[str, Any]] = details["Elements"]
    return found


def is_flat(text: str) -> bool:
    return all(isinstance(value, str | int | bool | None) for value in json.loads(text).values())


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    return filled(tmp_path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("focus")
    return published(filled(folder), folder)


def filled(folder: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(folder))
    fill.dimensions()
    fill.request(NOON, cost_nano_usd=1_000_003, cost_rejected_nano_usd=17)
    fill.request(NOON, cost_nano_usd=2_000_000, model_key=2, variant_key=2)
    fill.request(NOON, cost_nano_usd=3, tenant_key=None)
    fill.request(NOON, cost_nano_usd=0, price_key=None)
    fill.request(NOON + timedelta(days=1), cost_nano_usd=5)
    fill.interval(NOON, cost_idle_nano_usd=700_001, cost_lost_nano_usd=11)
    fill.interval(NOON + timedelta(minutes=1), cost_idle_nano_usd=300_000)
    return fill


def publish(folder: Path, days: tuple[date, ...] = ()) -> int:
    target = Target(folder / "out")
    return publish_focus(target, read_manifest(target), days, str(folder / "focus"), "Acme")


def rows_of(folder: Path, day: date) -> list[Row]:
    text = (folder / "focus" / f"focus_cost_and_usage-{day}.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def published(ledger: LedgerFill, folder: Path) -> list[Row]:
    run_export(ledger.url, folder / "out", now=NOW)
    publish(folder)
    return rows_of(folder, DAY)


def test_the_file_keeps_the_rules_of_the_specification(rows: list[Row]) -> None:
    assert len(rows) == 5
    assert violations(rows) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda row: row.update(ServiceName=""), "ServiceName is null"),
        (lambda row: row.update(ListCost="1"), "ListCost is no product"),
        (lambda row: row.update(PricingCategory="Cheap"), "PricingCategory=Cheap"),
        (lambda row: row.update(SkuMeter="Tokens"), "SkuMeter differs"),
        (lambda row: row.update(Cheap="1"), "Cheap"),
        (lambda row: row.update(InvoiceId="7"), "InvoiceId is not null"),
        (lambda row: row.update(ResourceName=" x"), "ResourceName=' x'"),
        (lambda row: row.update(ListUnitPrice="1E-1"), "ListUnitPrice=1E-1"),
        (lambda row: row.update(AllocatedResourceId=""), "AllocatedResourceName"),
        (
            lambda row: row.update(
                AllocatedMethodDetails=row["AllocatedMethodDetails"].replace("0.", "0.1", 1)
            ),
            "add up to",
        ),
    ],
)
def test_a_broken_rule_is_found(spoil: Callable[[Row], None], words: str, rows: list[Row]) -> None:
    spoilt = sorted((dict(row) for row in rows), key=lambda row: -Decimal(row["BilledCost"]))
    assert spoilt[0]["AllocatedResourceId"]
    spoil(spoilt[0])
    found = violations(spoilt)
    assert any(words in violation for violation in found), found


def test_every_column_of_the_specification_is_there_or_not_applicable(rows: list[Row]) -> None:
    ours = {name for name in rows[0] if not name.startswith("x_")}
    left_out = {name for names in NOT_APPLICABLE for name in names.split()}
    assert len(DEFINED) == 65  # FOCUS 1.3 adds eight to the 57 of FOCUS 1.2
    assert ours | left_out == DEFINED
    assert not ours & left_out


def test_charges_add_up_to_requests_and_idle_and_lost_time(rows: list[Row]) -> None:
    nano = {
        row["AllocatedResourceName"] or row["x_UnallocatedReason"]: Decimal(row["BilledCost"])
        * 10**9
        for row in rows
    }
    assert nano == {
        "t-1, model-1, default": 1_000_003,
        "t-1, model-2, candidate": 2_000_000,
        "unknown, model-1, default": 3,
        "idle": 1_000_001,
        "lost": 11,
    }
    [charged] = [row for row in rows if row["AllocatedResourceName"] == "t-1, model-1, default"]
    assert (charged["x_RequestCount"], charged["x_OutputTokens"]) == ("1", "20")
    assert Decimal(charged["x_RejectedDraftCost"]) * 10**9 == 17


def test_a_day_of_a_compacted_month_is_found_and_replaced_whole(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    ledger.request(NOON + timedelta(days=40), cost_nano_usd=9)  # March is closed
    first = published(ledger, tmp_path)
    assert any("month=" in file.name for file in Target(tmp_path / "out").files())
    assert len(first) == 5
    ledger.request(NOON, cost_nano_usd=4)
    again = published(ledger, tmp_path)
    difference = sum(Decimal(row["BilledCost"]) for row in again) - sum(
        Decimal(row["BilledCost"]) for row in first
    )
    assert difference * 10**9 == 4


def test_days_that_a_run_did_not_get_to_are_made_up_for_by_the_next(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    def export() -> None:
        run_export(ledger.url, tmp_path / "out", now=NOW)

    export()
    assert publish(tmp_path) == 2
    assert publish(tmp_path) == 0
    assert publish(tmp_path, days=(DAY,)) == 1
    ledger.request(NOON, cost_nano_usd=4)
    export()  # it published the tables and was killed before the files
    assert publish(tmp_path) == 1
    before = rows_of(tmp_path, DAY)
    for _ in range(2):  # two of which one wrote no files: what changed is not known any more
        ledger.request(NOON, cost_nano_usd=5)
        export()
    assert publish(tmp_path) == 2
    assert sum(Decimal(row["BilledCost"]) for row in rows_of(tmp_path, DAY)) * 10**9 == (
        sum(Decimal(row["BilledCost"]) for row in before) * 10**9 + 10
    )
