"""The ledger only grows: corrections are further rows, and migrations keep what is there."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, event, func, inspect, select, table

from telemetry.ledger import models
from telemetry.ledger.records import (
    AuditRecord,
    CapacityRecord,
    DrafterRecord,
    InstanceRecord,
    Outcome,
    Record,
    RequestRecord,
    ShadowRecord,
    Verdict,
)
from telemetry.ledger.recovery import close_orphans
from telemetry.ledger.session import _alembic_config, migrate, open_ledger, schema_revision
from telemetry.ledger.store import LedgerStore
from tests.telemetry.ledger_records import MODEL, PRICE, STARTED_AT, request_record, start_record

HISTORY = ("requests", "request_acceptance", "capacity_intervals", "audit_results")
LATER = STARTED_AT + timedelta(seconds=60)
DRAFTER = DrafterRecord("prompt_lookup")
INTERVAL = CapacityRecord(
    "i1", 0, STARTED_AT, LATER, MODEL, PRICE, 60, 50, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0
)
AUDIT = AuditRecord(
    "a1", "r", None, "i1", LATER, MODEL, DRAFTER, "a", Verdict.EXACT, 9, 0, None, 0.5, 1e-3, 0.1
)
SHADOW = ShadowRecord("s1", "r", "i1", LATER, MODEL, DRAFTER, "a", 5, 9, 4, 0, 0.1)


@pytest.fixture
def changes() -> Iterator[list[str]]:
    """The statements of any database that change or delete rows of the history."""
    found: list[str] = []
    tables = "|".join(HISTORY)
    changing = re.compile(
        rf"\s*(UPDATE\s+|DELETE\s+FROM\s+|TRUNCATE\s+)\"?({tables})\b", re.IGNORECASE
    )

    def look(*arguments: Any) -> None:
        statement = arguments[2]
        if changing.match(statement) or "DO UPDATE" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", look)
    yield found
    event.remove(Engine, "before_cursor_execute", look)


def _server(instance_id: str, **changes: object) -> InstanceRecord:
    record = InstanceRecord(instance_id, "node", "host", "1", STARTED_AT, LATER)
    return replace(record, **changes)  # type: ignore[arg-type]


def _fill(engine: Engine) -> RequestRecord:
    """Every kind of row, twice: requests that are done, superseded, corrected and orphaned."""
    store = LedgerStore(engine)
    done, running = request_record("done"), request_record("running")
    first: list[Record] = [
        _server("i1"), start_record(done), start_record(running), done, INTERVAL, AUDIT, SHADOW,
    ]  # fmt: skip
    for is_again in (False, True):
        store.write(first, may_exist=is_again)
    assert close_orphans(engine, store, node="node", instance_id="i2") == 1
    store.write([running], may_exist=True)  # it had lived on
    return done


def _requests(engine: Engine) -> dict[int, tuple[Any, ...]]:
    with engine.connect() as connection:
        rows = connection.execute(select(models.Request.__table__)).all()
    return {row.ledger_id: tuple(row) for row in rows}


def test_history_is_never_changed_by_whatever_is_written_again_corrected_or_orphaned(
    ledger_url: str, changes: list[str]
) -> None:
    engine = open_ledger(ledger_url)
    done = _fill(engine)
    before = _requests(engine)
    (first_id,) = (i for i, row in before.items() if done.record_id in row)
    corrected = replace(
        done,
        revision=1,
        supersedes_ledger_id=first_id,
        outcome=Outcome.FAILED,
        status_code="DATA_LOSS",
    )
    for is_again in (False, True):
        LedgerStore(engine).write([corrected], may_exist=is_again)
    after = _requests(engine)
    engine.dispose()
    assert {ledger_id: after[ledger_id] for ledger_id in before} == before
    assert len(after) == len(before) + 1 == 4
    assert changes == []


def _counts(engine: Engine) -> dict[str, int]:
    tables = [*HISTORY, "shadow_results", "instances", "prices", "models", "tenants"]
    there = inspect(engine).get_table_names()
    with engine.connect() as connection:
        return {
            name: connection.execute(select(func.count()).select_from(table(name))).scalar_one()
            for name in tables
            if name in there
        }


def _move(engine: Engine, revision: str, *, down: bool) -> None:
    config = _alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(config, revision)


def test_a_ledger_with_rows_goes_back_step_by_step_and_keeps_them(empty_url: str) -> None:
    migrate(empty_url)
    engine = open_ledger(empty_url)
    _fill(engine)
    full, requests = _counts(engine), _requests(engine)
    assert min(full.values()) > 0
    _move(engine, "0002", down=True)
    assert _counts(engine) == full
    _move(engine, "0001", down=True)
    assert _counts(engine) == {k: n for k, n in full.items() if k != "shadow_results"}
    _move(engine, "head", down=False)
    assert _counts(engine) == {**full, "shadow_results": 0}
    assert _requests(engine) == requests
    with engine.connect() as connection:
        column = models.RequestAcceptance.num_accepted_of_length
        assert set(connection.execute(select(column)).scalars()) == {None}
    LedgerStore(engine).write([request_record("later")], may_exist=False)
    assert max(_requests(engine)) > max(requests)
    migrate(empty_url, "base")
    assert schema_revision(engine) is None
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    engine.dispose()
