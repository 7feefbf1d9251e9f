"""The fact tables as SQL for DuckDB, for ledgers that one export job should not read alone.

DuckDB computes on all cores and spills to disk. It needs the ledger's tables `requests`,
`request_acceptance`, `capacity_intervals` and `audit_results` in its search path, for example
from PostgreSQL (`ATTACH '...' AS ledger (TYPE postgres); USE ledger.public`) or from Parquet
files that were unloaded from it; instants are TIMESTAMPTZ. The rows are those of the job, which
tests/exports/test_duck_tables.py compares; publication is the job's alone.
"""

from exports.columns import UNKNOWN_KEY
from exports.dimensions import FINISH_REASONS, KEYS_PER_OUTCOME, OUTCOMES
from exports.facts import (
    FACT_ACCEPTANCE,
    FACT_CAPACITY,
    FACT_EQUIVALENCE,
    FACT_LATENCY_HISTOGRAM,
    FACT_REQUEST,
    LATENCY_BOUNDS_SECONDS,
    LATENCY_METRICS,
)

_SLICE = "date_key, hour_key, model_key, drafter_key, variant_key, tenant_key"


def fact_statements() -> dict[str, str]:
    """Table -> a SELECT with its columns in their order. Run them with TimeZone = 'UTC'."""
    return {
        FACT_REQUEST.name: _requests(),
        FACT_ACCEPTANCE.name: _acceptance(),
        FACT_LATENCY_HISTOGRAM.name: _latency(),
        FACT_CAPACITY.name: _capacity(),
        FACT_EQUIVALENCE.name: _equivalence(),
    }


def _keys(instant: str) -> dict[str, str]:
    return {
        "date_key": f"CAST(strftime({instant}, '%Y%m%d') AS BIGINT)",
        "hour_key": f"CAST(extract(hour FROM {instant}) AS BIGINT)",
        **{
            f"{name}_key": f"coalesce({name}_key, {UNKNOWN_KEY})"
            for name in ("model", "drafter", "variant", "tenant", "price")
        },
    }


def _outcome_key() -> str:
    outcomes = ", ".join(f"'{outcome}'" for outcome in OUTCOMES)
    reasons = ", ".join(f"'{reason}'" for reason in FINISH_REASONS)
    place = f"nullif(list_position([{outcomes}], outcome), 0)"
    reason = f"nullif(list_position([{reasons}], coalesce(finish_reason, 'none')), 0) - 1"
    return f"CAST(coalesce({place} * {KEYS_PER_OUTCOME} + {reason}, {UNKNOWN_KEY}) AS BIGINT)"


def _requests() -> str:
    keys = _keys("finished_at") | {"outcome_key": _outcome_key()}
    columns = ", ".join(
        f"{keys[column.name]} AS {column.name}" if column.name in keys else column.name
        for column in FACT_REQUEST.columns
    )
    superseded = "SELECT supersedes_ledger_id FROM requests WHERE supersedes_ledger_id IS NOT NULL"
    return f"SELECT {columns} FROM requests WHERE ledger_id NOT IN ({superseded})"  # noqa: S608


def _acceptance() -> str:
    window = "OVER (PARTITION BY request_ledger_id ORDER BY position)"
    return f"""WITH current AS ({_requests()}), ends AS (
    SELECT *,
        num_drafted - coalesce(lead(num_drafted) {window}, 0) AS num_steps_drafted,
        num_accepted - coalesce(lead(num_accepted) {window}, 0) AS num_steps_accepted
    FROM request_acceptance
), positions AS (
    SELECT request_ledger_id, position + 1 AS position, num_drafted, num_accepted,
        num_steps_drafted, num_steps_accepted
    FROM ends
    UNION ALL
    SELECT request_ledger_id, 0, 0, 0, 0, num_drafted - num_accepted FROM ends WHERE position = 0
)
SELECT {_SLICE}, position,
    CAST(sum(num_drafted) AS BIGINT) AS num_draft_tokens,
    CAST(sum(num_accepted) AS BIGINT) AS num_accepted_tokens,
    CAST(sum(num_steps_drafted) AS BIGINT) AS num_steps_drafted,
    CAST(sum(num_steps_accepted) AS BIGINT) AS num_steps_accepted
FROM positions JOIN current ON request_ledger_id = ledger_id
GROUP BY ALL"""  # noqa: S608 - own names


def _latency() -> str:
    bounds = ", ".join(f"({n}, {upper!r})" for n, upper in enumerate(LATENCY_BOUNDS_SECONDS))
    values = " UNION ALL ".join(
        f"SELECT {_SLICE}, '{metric}' AS metric, {metric}_seconds AS seconds FROM current "  # noqa: S608
        f"WHERE {metric}_seconds IS NOT NULL"
        for metric in LATENCY_METRICS
    )
    last = LATENCY_BOUNDS_SECONDS[-1]
    return f"""WITH current AS ({_requests()}),
bounds(bucket, upper_seconds) AS (
    SELECT CAST(n AS BIGINT), CAST(upper AS DOUBLE) FROM (VALUES {bounds}) AS b(n, upper)
),
measured AS (SELECT *, least(seconds, {last!r}) AS capped FROM ({values}))
SELECT {_SLICE}, metric, bucket, upper_seconds,
    count(*) AS num_requests,
    CAST(sum(CAST(round_even(seconds * 1e6, 0) AS BIGINT)) AS BIGINT) AS sum_microseconds
FROM measured ASOF JOIN bounds ON capped <= upper_seconds
GROUP BY ALL"""  # noqa: S608 - own names


def _capacity() -> str:
    keys = _keys("started_at")
    columns = ", ".join(
        f"{keys[column.name]} AS {column.name}" if column.name in keys else column.name
        for column in FACT_CAPACITY.columns
    )
    return f"SELECT {columns} FROM capacity_intervals"  # noqa: S608


def _equivalence() -> str:
    keys = _keys("audited_at")
    names = ("date_key", "hour_key", "model_key", "drafter_key", "variant_key")
    columns = ", ".join(f"{keys[name]} AS {name}" for name in names)
    return f"""SELECT {columns}, verdict, coalesce(guarantee, 'unknown') AS guarantee,
    count(*) AS num_requests,
    CAST(sum(num_checked_tokens) AS BIGINT) AS num_checked_tokens,
    CAST(sum(num_mismatched_tokens) AS BIGINT) AS num_mismatched_tokens
FROM audit_results GROUP BY ALL"""  # noqa: S608 - own names
