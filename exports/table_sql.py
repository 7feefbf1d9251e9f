"""The fact tables as SQL for engines that take ledgers one export job should not read alone.

They need the ledger's tables `requests`, `request_acceptance`, `capacity_intervals` and
`audit_results`, with instants that know UTC: DuckDB reads them from PostgreSQL (`ATTACH '...' AS
ledger (TYPE postgres); USE ledger.public`) or from Parquet files that were unloaded from it,
ClickHouse after they were landed there (exports.clickhouse). The rows are those of the job,
which tests/exports/test_table_sql.py compares; publication is the job's alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine says what the engines say differently; functions from SQL to SQL.

    place: the place from 1 of an item in a list, 0 or NULL when it is not there. following: a
    column's value in the next row of a window, 0 after the last. bounds: rows (bucket,
    upper_seconds). least_bound: joins each `capped` to the lowest bound that is not below it.
    """

    date_key: Callable[[str], str]
    hour_key: Callable[[str], str]
    place: Callable[[str, str], str]
    round_half_even: Callable[[str], str]
    following: Callable[[str, str], str]
    bounds: Callable[[Sequence[float]], str]
    least_bound: str


def _duckdb_bounds(bounds: Sequence[float]) -> str:
    names = "CAST(n AS BIGINT) AS bucket, CAST(upper AS DOUBLE) AS upper_seconds"
    return f"SELECT {names} FROM (VALUES {_values(bounds)}) AS b(n, upper)"  # noqa: S608 - numbers


def _postgresql_bounds(bounds: Sequence[float]) -> str:
    names = "CAST(n AS BIGINT) AS bucket, CAST(upper AS DOUBLE PRECISION) AS upper_seconds"
    return f"SELECT {names} FROM (VALUES {_values(bounds)}) AS b(n, upper)"  # noqa: S608 - numbers


def _clickhouse_bounds(bounds: Sequence[float]) -> str:
    rows = f"VALUES('bucket Int64, upper_seconds Float64', {_values(bounds)})"
    return f"SELECT bucket, upper_seconds, 1 AS one FROM {rows}"  # noqa: S608 - own numbers


def _values(bounds: Sequence[float]) -> str:
    return ", ".join(f"({bucket}, {upper!r})" for bucket, upper in enumerate(bounds))


DUCKDB = Dialect(
    date_key=lambda instant: f"CAST(strftime({instant}, '%Y%m%d') AS BIGINT)",
    hour_key=lambda instant: f"CAST(extract(hour FROM {instant}) AS BIGINT)",
    place=lambda items, item: f"list_position({items}, {item})",
    round_half_even=lambda number: f"round_even({number}, 0)",
    following=lambda column, window: f"coalesce(lead({column}) OVER ({window}), 0)",
    bounds=_duckdb_bounds,
    least_bound="ASOF JOIN bounds ON capped <= upper_seconds",
)
"""Run it with TimeZone = 'UTC'."""

POSTGRESQL = Dialect(
    date_key=lambda instant: f"CAST(to_char({instant} AT TIME ZONE 'UTC', 'YYYYMMDD') AS BIGINT)",
    hour_key=lambda instant: f"CAST(extract(hour FROM {instant} AT TIME ZONE 'UTC') AS BIGINT)",
    place=lambda items, item: f"array_position(ARRAY{items}, CAST({item} AS text))",
    round_half_even=lambda number: f"round({number})",
    following=lambda column, window: f"coalesce(lead({column}) OVER ({window}), 0)",
    bounds=_postgresql_bounds,
    # width_bucket counts the bounds up to and including the value, by bisection.
    least_bound=(
        "CROSS JOIN (SELECT array_agg(upper_seconds ORDER BY bucket) AS uppers FROM bounds) AS a "
        "CROSS JOIN LATERAL (SELECT width_bucket(capped, uppers) AS below) AS w "
        "JOIN bounds ON bucket = below - CASE WHEN uppers[below] = capped THEN 1 ELSE 0 END"
    ),
)
"""DOUBLE PRECISION rounds half to even, as the job does."""

CLICKHOUSE = Dialect(
    date_key=lambda instant: f"toInt64(toYYYYMMDD({instant}, 'UTC'))",
    hour_key=lambda instant: f"toInt64(toHour({instant}, 'UTC'))",
    place=lambda items, item: f"toInt64(indexOf({items}, {item}))",
    round_half_even=lambda number: f"roundBankers({number})",
    following=lambda column, window: (
        f"leadInFrame({column}) OVER "
        f"({window} ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)"
    ),
    bounds=_clickhouse_bounds,
    least_bound="ASOF JOIN bounds ON measured.one = bounds.one AND capped <= upper_seconds",
)


def fact_statements(dialect: Dialect) -> dict[str, str]:
    """Table -> a SELECT with its columns in their order."""
    return {
        FACT_REQUEST.name: _requests(dialect),
        FACT_ACCEPTANCE.name: _acceptance(dialect),
        FACT_LATENCY_HISTOGRAM.name: _latency(dialect),
        FACT_CAPACITY.name: _capacity(dialect),
        FACT_EQUIVALENCE.name: _equivalence(dialect),
    }


def _keys(dialect: Dialect, instant: str) -> dict[str, str]:
    return {
        "date_key": dialect.date_key(instant),
        "hour_key": dialect.hour_key(instant),
        **{
            f"{name}_key": f"coalesce({name}_key, {UNKNOWN_KEY})"
            for name in ("model", "drafter", "variant", "tenant", "price")
        },
    }


def _outcome_key(dialect: Dialect) -> str:
    outcomes = ", ".join(f"'{outcome}'" for outcome in OUTCOMES)
    reasons = ", ".join(f"'{reason}'" for reason in FINISH_REASONS)
    place = f"nullif({dialect.place(f'[{outcomes}]', 'outcome')}, 0)"
    item = "coalesce(finish_reason, 'none')"
    reason = f"nullif({dialect.place(f'[{reasons}]', item)}, 0) - 1"
    return f"CAST(coalesce({place} * {KEYS_PER_OUTCOME} + {reason}, {UNKNOWN_KEY}) AS BIGINT)"


def _requests(dialect: Dialect) -> str:
    keys = _keys(dialect, "finished_at") | {"outcome_key": _outcome_key(dialect)}
    columns = ", ".join(
        f"{keys[column.name]} AS {column.name}" if column.name in keys else column.name
        for column in FACT_REQUEST.columns
    )
    superseded = "SELECT supersedes_ledger_id FROM requests WHERE supersedes_ledger_id IS NOT NULL"
    return f"SELECT {columns} FROM requests WHERE ledger_id NOT IN ({superseded})"  # noqa: S608


def _acceptance(dialect: Dialect) -> str:
    window = "PARTITION BY request_ledger_id ORDER BY position"
    return f"""WITH current AS ({_requests(dialect)}), ends AS (
    SELECT *,
        num_drafted - {dialect.following("num_drafted", window)} AS num_steps_drafted,
        num_accepted - {dialect.following("num_accepted", window)} AS num_steps_accepted
    FROM request_acceptance
), positions AS (
    SELECT request_ledger_id, position + 1 AS position, num_drafted, num_accepted,
        num_steps_drafted, num_steps_accepted, num_accepted_of_length AS of_length
    FROM ends
    UNION ALL
    SELECT request_ledger_id, 0, 0, 0, 0, num_drafted - num_accepted, 0
    FROM ends WHERE position = 0
)
SELECT {_SLICE}, position,
    CAST(sum(num_drafted) AS BIGINT) AS num_draft_tokens,
    CAST(sum(num_accepted) AS BIGINT) AS num_accepted_tokens,
    CAST(sum(num_steps_drafted) AS BIGINT) AS num_steps_drafted,
    CAST(sum(num_steps_accepted) AS BIGINT) AS num_steps_accepted,
    CASE WHEN count(of_length) = count(*) THEN CAST(sum(coalesce(of_length, 0)) AS BIGINT) END
        AS num_accepted_of_length
FROM positions JOIN current ON request_ledger_id = ledger_id
GROUP BY {_ordinals(7)}"""  # noqa: S608 - own names


def _latency(dialect: Dialect) -> str:
    values = " UNION ALL ".join(
        f"SELECT {_SLICE}, '{metric}' AS metric, {metric}_seconds AS seconds FROM current "  # noqa: S608
        f"WHERE {metric}_seconds IS NOT NULL"
        for metric in LATENCY_METRICS
    )
    last = LATENCY_BOUNDS_SECONDS[-1]
    microseconds = f"CAST({dialect.round_half_even('seconds * 1e6')} AS BIGINT)"
    return f"""WITH current AS ({_requests(dialect)}),
bounds AS ({dialect.bounds(LATENCY_BOUNDS_SECONDS)}),
measured AS (
    SELECT *, 1 AS one, least(seconds, {last!r}) AS capped FROM ({values}) AS v
)
SELECT {_SLICE}, metric, bucket, upper_seconds,
    CAST(count(*) AS BIGINT) AS num_requests,
    CAST(sum({microseconds}) AS BIGINT) AS sum_microseconds
FROM measured {dialect.least_bound}
GROUP BY {_ordinals(9)}"""  # noqa: S608 - own names


def _capacity(dialect: Dialect) -> str:
    keys = _keys(dialect, "started_at")
    columns = ", ".join(
        f"{keys[column.name]} AS {column.name}" if column.name in keys else column.name
        for column in FACT_CAPACITY.columns
    )
    return f"SELECT {columns} FROM capacity_intervals"  # noqa: S608


def _equivalence(dialect: Dialect) -> str:
    keys = _keys(dialect, "audited_at")
    names = ("date_key", "hour_key", "model_key", "drafter_key", "variant_key")
    columns = ", ".join(f"{keys[name]} AS {name}" for name in names)
    return f"""SELECT {columns}, verdict, coalesce(guarantee, 'unknown') AS guarantee,
    CAST(count(*) AS BIGINT) AS num_requests,
    CAST(sum(num_checked_tokens) AS BIGINT) AS num_checked_tokens,
    CAST(sum(num_mismatched_tokens) AS BIGINT) AS num_mismatched_tokens
FROM audit_results GROUP BY {_ordinals(7)}"""  # noqa: S608 - own names


def _ordinals(count: int) -> str:
    # By place: a name would mean the ledger's column in one engine and the result's in another.
    return ", ".join(str(place) for place in range(1, count + 1))
