"""Released columns stay as they are; the data dictionary says what is exported."""

import json
from pathlib import Path

import pytest

from exports.columns import SCHEMA_VERSION
from exports.dictionary import README, readme_with_dictionary
from exports.dimensions import FINISH_REASONS, OUTCOMES
from exports.facts import LATENCY_BOUNDS_SECONDS
from exports.schemas import TABLES

CONTRACT = json.loads(Path(__file__).with_name("contract.json").read_text("utf-8"))


def test_the_contract_is_that_of_the_schema_version() -> None:
    assert CONTRACT["schema_version"] == SCHEMA_VERSION
    assert set(CONTRACT["tables"]) <= set(TABLES)


@pytest.mark.parametrize("table", CONTRACT["tables"])
def test_released_columns_keep_name_place_type_and_null_rule(table: str) -> None:
    released = CONTRACT["tables"][table]
    current = [[c.name, str(c.type), bool(c.null_when)] for c in TABLES[table].columns]
    assert current[: len(released)] == released, (
        "a dashboard reads these: add columns at the end, and only then to contract.json"
    )


def test_every_column_is_in_the_contract() -> None:
    columns = {name: len(table.columns) for name, table in TABLES.items()}
    assert columns == {name: len(c) for name, c in CONTRACT["tables"].items()}


def test_fixed_keys_and_bounds_keep_their_meaning() -> None:
    assert [str(name) for name in OUTCOMES[: len(CONTRACT["outcomes"])]] == CONTRACT["outcomes"]
    reasons = CONTRACT["finish_reasons"]
    assert list(FINISH_REASONS[: len(reasons)]) == reasons
    assert list(LATENCY_BOUNDS_SECONDS) == CONTRACT["latency_bounds_seconds"]


def test_every_finish_reason_and_outcome_of_the_ledger_has_a_key() -> None:
    from engine.request import FinishReason
    from telemetry.ledger.records import Outcome

    assert {str(reason) for reason in FinishReason} <= set(FINISH_REASONS)
    assert set(Outcome) == set(OUTCOMES)


def test_the_data_dictionary_is_current() -> None:
    readme = README.read_text("utf-8")
    assert readme_with_dictionary(readme) == readme, "run python -m exports.dictionary"


def test_every_column_says_what_it_is() -> None:
    for table in TABLES.values():
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names)
        for column in table.columns:
            assert column.unit, column
            assert column.meaning, column
