"""The FOCUS file under the FinOps Foundation's own validator, which `make test-exports` installs.

It knows the rules of version 1.2. Version 1.3 keeps them and adds eight columns: see test_focus.py.
"""

import re
import subprocess
from pathlib import Path

import pytest

from exports.focus import publish_focus
from exports.job import run_export
from exports.manifest import read_manifest
from exports.storage import Target
from tests.exports.test_focus import DAY, NOW, filled

VALIDATOR = Path(__file__).parents[2] / "build" / "focus-validator"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VALIDATOR.is_dir(), reason="the validator of FOCUS is not installed"),
]

APPLICABLE = (
    *("ACCOUNT_NAMING_SUPPORTED", "MULTIPLE_PRICING_CATEGORIES_SUPPORTED"),
    *("NEGOTIATED_PRICING_SUPPORTED", "PUBLIC_PRICE_LIST_SUPPORTED", "UNIT_PRICING_SUPPORTED"),
    *("USAGE_MEASUREMENT_SUPPORTED", "BILLING_BASED_ON_PROVISIONED_RESOURCES_SUPPORTED"),
    "RESOURCE_TYPE_ASSIGNMENT_SUPPORTED",
)
MISJUDGED = (
    # These read CommitmentDiscountStatus, which has no place in the file.
    *(f"ConsumedQuantity-C-00{number}-C" for number in (0, 3, 4, 5, 6)),
    # These need a second currency, too; the presence of columns has ids of the data set.
    *("PricingCurrency", *(f"CostAndUsage-D-0{number}-C" for number in range(46, 57))),
    # This is about charges with an invoice; the validator cannot tell which those are.
    "InvoiceId-C-005-C",
)
"""Beginnings of the ids of rules whose conditions the validator does not evaluate."""


def failures(file: Path) -> dict[str, str]:
    """The rules that the validator finds broken, with their text."""
    [package] = VALIDATOR.glob("lib/python3*/site-packages")
    done = subprocess.run(
        [
            *(VALIDATOR / "bin" / "focus-validator", "--block-download"),
            *("--data-file", file, "--validate-version", "1.2.0.1"),
            *("--applicability-criteria", ",".join(APPLICABLE)),
        ],
        cwd=package,  # it reads its tables by relative paths
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.findall(r"(\S+): PASS", done.stdout)
    assert len(passed) > 100, done.stdout[-2000:] + done.stderr[-2000:]
    found = re.findall(r"^- (\S+): violations=.*\n  MustSatisfy: (.*)$", done.stdout, re.MULTILINE)
    return {rule: words for rule, words in found if not rule.startswith(MISJUDGED)}


def test_the_validator_of_the_specification_finds_nothing(tmp_path: Path) -> None:
    file = focus_file(tmp_path)
    assert failures(file) == {}
    # And it does look: a wrong word, a missing column and a null are found.
    text = file.read_text()
    for before, after, rule in (
        ("Usage-Based", "Sometimes", "ChargeFrequency"),
        ("BilledCost,", "x_BilledCost,", "BilledCost"),
        (",USD,", ",,", "BillingCurrency"),
        ("AI and Machine Learning", "Magic", "ServiceCategory"),
    ):
        broken = tmp_path / "broken.csv"
        broken.write_text(text.replace(before, after))
        assert any(rule in name for name in failures(broken)), rule


def focus_file(folder: Path) -> Path:
    run_export(filled(folder).url, folder / "out", now=NOW)
    target = Target(folder / "out")
    publish_focus(target, read_manifest(target), (DAY,), str(folder / "focus"), "Acme")
    return folder / "focus" / f"focus_cost_and_usage-{DAY}.csv"
