"""The cost of a day as a FOCUS 1.3 file, for tools that hold all of a company's costs.

FOCUS is the FinOps Open Cost and Usage Specification (focus.finops.org). A machine's hours of a
day are its origin charge. It is split as the specification's *data generator-calculated split cost
allocation* wants it: a charge per tenant, model and variant for what its requests were charged,
and charges without an allocated resource for idle and lost time. All that describes the machine
is the same in all of them, costs and hours add up to the origin's, and so do the ratios, to 1.
A request's cost belongs to the day on which it finished.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from exports.columns import UNKNOWN_KEY
from exports.dimensions import date_key
from exports.errors import TargetError
from exports.facts import FACT_CAPACITY, FACT_REQUEST
from exports.focus_columns import COLUMNS
from exports.manifest import Manifest
from exports.schemas import DIM_MODEL, DIM_PRICE, DIM_TENANT, DIM_VARIANT
from exports.storage import Target

ALLOCATION_METHOD = "step-positions-v1"  # documented in exports/README.md, as FOCUS asks
SERVICE = "Tandem"
GENERATION_NAME = "focus_generation.json"  # beside the files: the export that they were made from
_NANO = Decimal(10) ** 9
_RATIO_UNITS = 10**12
_DYNAMIC = "spot"  # the other purchases have a rate that was agreed on: FOCUS calls it Standard
_KEYS = ("price_key", "tenant_key", "model_key", "variant_key")
_SUMMED = (
    "cost_nano_usd",
    "cost_rejected_nano_usd",
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_output_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
)


@dataclass(frozen=True, slots=True)
class Charge:
    """A part of a machine's day. `values` are the columns that are this part's own."""

    cost_nano_usd: int
    values: dict[str, str]


def publish_focus(
    target: Target, manifest: Manifest, days: Iterable[date], folder: str, account: str
) -> int:
    """Write a CSV file per day under `folder`; returns their number.

    Written are the days that changed since the generation that the folder holds, or all when that
    is not known, and `days` in any case: what a run did not get to, the next one does.
    account: who runs the service, and so bills, provides and publishes it. A day that is written
    again replaces its file whole. Raises TargetError when a file cannot be read or written.
    """
    out = Target(folder)
    names = _Names(target, manifest)
    changed = manifest.changed_since(_generation(out))
    if changed is None:
        changed = tuple(manifest.dates(FACT_REQUEST.name, FACT_CAPACITY.name))
    written = 0
    for day in sorted({*days, *changed}):
        rows = list(_day_rows(target, manifest, names, day, account))
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        out.replace(f"focus_cost_and_usage-{day}.csv", text.getvalue().encode())
        written += 1
    out.replace(GENERATION_NAME, json.dumps({"generation": manifest.generation}).encode() + b"\n")
    return written


def _generation(out: Target) -> int | None:
    content = out.read(GENERATION_NAME)
    try:
        return None if content is None else int(json.loads(content)["generation"])
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{GENERATION_NAME} cannot be understood: {error!r}") from error


class _Names:
    """The dimensions, by key."""

    def __init__(self, target: Target, manifest: Manifest) -> None:
        def by_key(name: str) -> dict[int, dict[str, Any]]:
            rows = [row for t in _tables(target, manifest, name, None) for row in t.to_pylist()]
            return {row[next(iter(row))]: row for row in rows}

        self.prices = by_key(DIM_PRICE.name)
        self.tenants = by_key(DIM_TENANT.name)
        self.models = by_key(DIM_MODEL.name)
        self.variants = by_key(DIM_VARIANT.name)


def _day_rows(
    target: Target, manifest: Manifest, names: _Names, day: date, account: str
) -> Iterator[dict[str, str]]:
    charges: dict[int, list[Charge]] = {}
    for group in _requests(target, manifest, day):
        charges.setdefault(group["price_key"], []).append(_allocated(group, names))
    for price_key, reason, cost in _unallocated(target, manifest, day):
        charges.setdefault(price_key, []).append(Charge(cost, {"x_UnallocatedReason": reason}))
    # What has no price cost nothing: there is no charge to split.
    for price_key in sorted(charges.keys() - {UNKNOWN_KEY}):
        parts = [charge for charge in charges[price_key] if charge.cost_nano_usd]
        common = _machine(names.prices[price_key], day, account)
        ratios = _ratios([charge.cost_nano_usd for charge in parts])
        for charge, ratio in zip(parts, ratios, strict=True):
            per_hour = names.prices[price_key]["nano_usd_per_hour"]
            yield common | _share(charge.cost_nano_usd, ratio, per_hour) | charge.values


def _share(cost_nano_usd: int, ratio: Decimal, nano_usd_per_hour: int) -> dict[str, str]:
    hours = Decimal(cost_nano_usd) / Decimal(nano_usd_per_hour)
    # As text, because json writes a small float with an exponent.
    element = (
        f'"AllocatedRatio": {_text(ratio)}, "UsageUnit": "Hours", "UsageQuantity": {_text(hours)}'
    )
    cost = _text(Decimal(cost_nano_usd) / _NANO)
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        "ConsumedQuantity": _text(hours),
        "PricingQuantity": _text(hours),
        "AllocatedMethodDetails": f'{{"Elements": [{{{element}}}]}}',
    }


def _requests(target: Target, manifest: Manifest, day: date) -> list[dict[str, Any]]:
    parts = [
        table.select([*_KEYS, *_SUMMED])
        for table in _tables(target, manifest, FACT_REQUEST.name, day)
    ]
    if not parts:
        return []
    rows = pa.concat_tables(parts).group_by(list(_KEYS), use_threads=False)
    summed = rows.aggregate([([], "count_all"), *((name, "sum") for name in _SUMMED)])
    groups: list[dict[str, Any]] = summed.sort_by([(k, "ascending") for k in _KEYS]).to_pylist()
    return groups


def _allocated(group: dict[str, Any], names: _Names) -> Charge:
    tenant = names.tenants[group["tenant_key"]]["tenant"]
    model = names.models[group["model_key"]]["model"]
    variant = names.variants[group["variant_key"]]["variant"]
    rejected = Decimal(group["cost_rejected_nano_usd_sum"]) / _NANO
    values = {
        "AllocatedResourceId": f"{tenant}/{group['model_key']}/{variant}",
        "AllocatedResourceName": f"{tenant}, {model}, {variant}",
        "AllocatedTags": json.dumps(
            {"tandem/tenant": tenant, "tandem/model": model, "tandem/variant": variant}
        ),
        "x_RequestCount": str(group["count_all"]),
        "x_InputTokens": str(group["num_prompt_tokens_sum"]),
        "x_CachedInputTokens": str(group["num_cached_prompt_tokens_sum"]),
        "x_OutputTokens": str(group["num_output_tokens_sum"]),
        "x_DraftTokens": str(group["num_draft_tokens_sum"]),
        "x_AcceptedTokens": str(group["num_accepted_tokens_sum"]),
        "x_RejectedDraftCost": _text(rejected),
    }
    return Charge(group["cost_nano_usd_sum"], values)


def _unallocated(target: Target, manifest: Manifest, day: date) -> Iterator[tuple[int, str, int]]:
    costs: dict[tuple[int, str], int] = {}
    for table in _tables(target, manifest, FACT_CAPACITY.name, day):
        for row in table.select(
            ["price_key", "cost_idle_nano_usd", "cost_lost_nano_usd"]
        ).to_pylist():
            for reason in ("idle", "lost"):
                key = (row["price_key"], reason)
                costs[key] = costs.get(key, 0) + row[f"cost_{reason}_nano_usd"]
    for (price_key, reason), cost in sorted(costs.items()):
        yield price_key, reason, cost


def _machine(price: dict[str, Any], day: date, account: str) -> dict[str, str]:
    month = day.replace(day=1)
    following = (month + timedelta(days=32)).replace(day=1)
    per_hour = _text(Decimal(price["nano_usd_per_hour"]) / _NANO)
    machine, purchase = price["machine_type"], price["purchase"]
    owner = ("HostProviderName", "InvoiceIssuerName", "ProviderName", "PublisherName")
    return {
        **dict.fromkeys((*owner, "ServiceProviderName"), account),
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": "USD",
        "BillingPeriodStart": _midnight(month),
        "BillingPeriodEnd": _midnight(following),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"Hours of {machine} ({purchase}) for language model inference",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _midnight(day),
        "ChargePeriodEnd": _midnight(day + timedelta(days=1)),
        "ConsumedUnit": "Hours",
        "ContractedUnitPrice": per_hour,
        "ListUnitPrice": per_hour,
        "PricingCategory": "Dynamic" if purchase == _DYNAMIC else "Standard",
        "PricingUnit": "Hours",
        "ResourceId": f"{machine}/{purchase}",
        "ResourceName": machine,
        "ResourceType": "Inference Server",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": SERVICE,
        "ServiceSubcategory": "Generative AI",
        "SkuId": machine,
        "SkuMeter": "Server Hours",
        "SkuPriceId": f"{price['book_version']}/{price['price_key']}",
        "AllocatedMethodId": ALLOCATION_METHOD,
    }


def _ratios(costs: Sequence[int]) -> list[Decimal]:
    # By largest remainder, so that they add up to 1 and not to nearly 1.
    total = sum(costs)
    parts = [divmod(cost * _RATIO_UNITS, total) for cost in costs]
    units = [whole for whole, _ in parts]
    by_rest = sorted(range(len(parts)), key=lambda place: -parts[place][1])
    for place in by_rest[: _RATIO_UNITS - sum(units)]:
        units[place] += 1
    return [Decimal(number) / _RATIO_UNITS for number in units]


def _tables(target: Target, manifest: Manifest, name: str, day: date | None) -> Iterator[pa.Table]:
    for file in manifest.tables.get(name, ()):
        if day is not None and day not in file.days:
            continue
        with target.open(file.path) as source:
            rows = parquet.read_table(source)
        yield rows if day is None else rows.filter(pc.equal(rows["date_key"], date_key(day)))


def _midnight(day: date) -> str:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _text(number: Decimal) -> str:
    return f"{number:f}"
