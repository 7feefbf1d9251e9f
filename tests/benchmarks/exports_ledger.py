"""A large ledger made inside the database: rows that vary as those of real traffic do.

Requests finish one after the other over whole days. Ids are random digits; lengths, latencies,
costs and energy differ from row to row; the tenants' shares, models, variants and outcomes are
uneven; nine requests in ten drafted and have acceptance at four positions. Each minute has a
capacity interval and each hundredth request an audit.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text

from telemetry.ledger.session import migrate, open_ledger
from tests.exports.ledgers import NOON, SEEN, LedgerFill, request_row

NUM_TENANTS = 8
MIDNIGHT_MICROSECONDS = int((NOON - timedelta(hours=12, minutes=30)).timestamp()) * 1_000_000
DAY_MICROSECONDS = 86_400_000_000
MINUTES_PER_DAY = 1_440
CHUNK_ROWS = 250_000

NUMBERS = """
{series},
hashes AS (
    SELECT n, n * 2654435761 % 4294967296 AS a, n * 2246822519 % 4294967296 AS b,
        n * 3266489917 % 4294967296 AS c
    FROM s
), lengths AS (
    SELECT *, 20 + b / 64 % 1500 AS prompt, 1 + a / 64 % 400 AS output,
        CASE WHEN c % 10 = 0 THEN 0 ELSE (1 + a / 64 % 400) * 7 / 20 END AS verified,
        0.02 + c / 64 % 9973 / 9000.0 AS ttft, 0.005 + b / 128 % 9949 / 300000.0 AS tpot
    FROM hashes
), t AS (
    SELECT *, ttft + tpot * (output - 1) AS e2e,
        verified + verified * 7 / 8 + verified * 6 / 8 + verified * 5 / 8 AS drafted,
        verified * 5 / 8 + verified * 4 / 8 + verified * 3 / 8 + verified * 2 / 8 AS accepted,
        {midnight} + (n - 1) * {pause} + a % 1000 AS finished
    FROM lengths
)
"""
"""Requests `t`. a, b and c are three hashes of n; `finished` and `pause` are in microseconds."""

ACCEPTANCE = """
INSERT INTO request_acceptance
SELECT ledger_id, position, finished_on, num_verify_steps * (8 - position) / 8,
    num_verify_steps * (5 - position) / 8,
    CASE WHEN position = 3 THEN num_accepted_tokens ELSE 0 END
FROM requests CROSS JOIN (
    SELECT 0 AS position UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3
) p
WHERE num_verify_steps > 0 AND ledger_id BETWEEN :first AND :last
ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the databases spell differently. `{}` is an expression."""

    series: str  # numbers {} to {} as n
    instant: str  # of microseconds
    day: str  # of microseconds
    hexed: str  # eight digits of a number
    json: str


SQLITE = Dialect(
    series="WITH RECURSIVE s(n) AS (SELECT {} UNION ALL SELECT n + 1 FROM s WHERE n < {})",
    instant="({})",
    day="date(({}) / 1000000, 'unixepoch')",
    hexed="printf('%08x', {})",
    json="'{}'",
)
POSTGRESQL = Dialect(
    series="WITH s(n) AS (SELECT generate_series({}, {}::bigint))",
    instant="to_timestamp(({}) / 1000000.0)",
    day="(to_timestamp(({}) / 1000000.0) AT TIME ZONE 'UTC')::date",
    hexed="lpad(to_hex({}), 8, '0')",
    json="'{}'",
)


def fill(url: str, num_rows: int, num_days: int) -> None:
    """Make the ledger at `url`, which must be an empty database."""
    migrate(url)
    LedgerFill(url).dimensions()
    engine = _hasty_engine(url)
    dialect = SQLITE if engine.dialect.name == "sqlite" else POSTGRESQL
    with engine.begin() as connection:
        _fill_tenants(connection, dialect)
    pause = num_days * DAY_MICROSECONDS // num_rows
    for first in range(1, num_rows + 1, CHUNK_ROWS):  # a transaction of all would be written twice
        last = min(first + CHUNK_ROWS - 1, num_rows)
        with engine.begin() as connection:
            _fill_requests(connection, dialect, (first, last), pause)
            connection.execute(text(ACCEPTANCE), {"first": first, "last": last})
    with engine.begin() as connection:
        _fill_intervals(connection, dialect, num_days * MINUTES_PER_DAY)
        connection.execute(
            text(
                "INSERT INTO audit_results (audit_uid, request_id, instance_id, recorded_at, "
                "audited_at, model_key, drafter_key, variant_key, verdict, guarantee, "
                "num_checked_tokens, num_mismatched_tokens, audit_seconds) "
                "SELECT record_id, request_id, instance_id, recorded_at, recorded_at, model_key, "
                "drafter_key, variant_key, 'exact', guarantee, num_output_tokens, 0, 0.1 "
                "FROM requests WHERE ledger_id % 100 = 0"
            )
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    engine.dispose()


def _hasty_engine(url: str) -> Engine:
    """Without the protection from power loss: a ledger that is made up can be made up again."""
    if make_url(url).get_backend_name() != "sqlite":
        return open_ledger(url)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _(connection: Any, _: object) -> None:
        for pragma in ("synchronous=OFF", "cache_size=-200000"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _fill_tenants(connection: Connection, dialect: Dialect) -> None:
    seen = dialect.instant.format(int(SEEN.timestamp() * 1e6))
    for key in range(2, NUM_TENANTS + 1):
        connection.execute(
            text(f"INSERT INTO tenants VALUES ({key}, 't-{key}', 'k1', {seen})")  # noqa: S608
        )


def _fill_requests(
    connection: Connection, dialect: Dialect, rows: tuple[int, int], pause: int
) -> None:
    numbers = NUMBERS.format(
        series=dialect.series.format(*rows),
        midnight=MIDNIGHT_MICROSECONDS,
        pause=pause,
    )
    instant = dialect.instant.format
    row = request_row(1, NOON)
    fixed = {name: _literal(value) for name, value in row.items()}
    random_id = " || ".join(dialect.hexed.format(name) for name in ("a", "b", "c", "n"))
    varied = {
        "ledger_id": "n",
        "record_id": random_id,
        "request_id": random_id,
        "trace_id": " || ".join(dialect.hexed.format(name) for name in ("c", "n", "b", "a")),
        "recorded_at": instant("finished + 200000"),
        "started_at": instant("finished - CAST(e2e * 1000000 AS BIGINT)"),
        "finished_at": instant("finished"),
        "finished_on": dialect.day.format("finished"),
        "model_key": "CASE WHEN b % 4 = 0 THEN 2 ELSE 1 END",
        "drafter_key": "CASE WHEN verified > 0 THEN 1 END",
        "variant_key": "CASE WHEN c % 8 = 1 THEN 2 ELSE 1 END",
        "tenant_key": f"1 + (a % {NUM_TENANTS}) * (b / 8 % {NUM_TENANTS}) / {NUM_TENANTS}",
        "outcome": "CASE WHEN a % 25 = 0 THEN 'cancelled' ELSE 'completed' END",
        "finish_reason": "CASE WHEN a % 25 = 0 THEN 'cancelled' WHEN b % 3 = 0 THEN 'length' "
        "ELSE 'stop_token' END",
        "temperature": "CASE WHEN c % 3 = 0 THEN 0.7 ELSE 0.0 END",
        "queue_seconds": "c / 32 % 9967 / 40000.0",
        "ttft_seconds": "ttft",
        "tpot_seconds": "CASE WHEN output > 1 THEN tpot END",
        "e2e_seconds": "e2e",
        "mean_step_latency_seconds": "CASE WHEN output > 1 THEN tpot * 2.2 END",
        "num_prompt_tokens": "prompt",
        "num_cached_prompt_tokens": "CASE WHEN c % 3 = 0 THEN prompt / 64 * 64 ELSE 0 END",
        "num_output_tokens": "output",
        "num_prefill_positions": "CASE WHEN c % 3 = 0 THEN prompt % 64 ELSE prompt END",
        "num_steps": "output - accepted + 1",
        "num_plain_steps": "output - accepted - verified",
        "num_verify_steps": "verified",
        "num_draft_tokens": "drafted",
        "num_accepted_tokens": "accepted",
        "num_emitted_accepted_tokens": "accepted",
        "cost_nano_usd": "prompt * 911 + (output + drafted) * 3307",
        "cost_prefill_nano_usd": "prompt * 911",
        "cost_decode_nano_usd": "output * 3307",
        "cost_draft_nano_usd": "drafted * 3307",
        "cost_rejected_nano_usd": "(drafted - accepted) * 3307",
        "busy_nanoseconds": "(prompt + output + drafted) * 41017 + a % 1000",
        "estimated_cost_without_speculation_nano_usd": "prompt * 911 + output * 7919",
        "energy_microjoules": "prompt * 3001 + (output + drafted) * 9001 + b % 1000",
        "energy_source": "'rapl'",
        "labels": dialect.json,
    }
    values = {**fixed, **varied}
    names, expressions = ", ".join(values), ", ".join(values.values())
    statement = f"INSERT INTO requests ({names}) {numbers} SELECT {expressions} FROM t"  # noqa: S608
    connection.exec_driver_sql(statement.replace("%", "%%") if dialect is POSTGRESQL else statement)


def _fill_intervals(connection: Connection, dialect: Dialect, num_minutes: int) -> None:
    begin = f"{MIDNIGHT_MICROSECONDS} + (n - 1) * 60000000"
    values = {
        "instance_id": "'i-1'",
        "interval_index": "n",
        "recorded_at": dialect.instant.format(f"{begin} + 60000000"),
        "started_at": dialect.instant.format(begin),
        "finished_at": dialect.instant.format(f"{begin} + 60000000"),
        "model_key": "1",
        "price_key": "1",
        "wall_nanoseconds": "60000000000",
        "busy_nanoseconds": "40000000000 + n % 1000",
        "idle_nanoseconds": "20000000000 - n % 1000",
        "lost_nanoseconds": "0",
        **dict.fromkeys(
            ("num_steps", "num_prefill_positions", "num_decode_positions", "num_draft_positions"),
            "500 + n % 100",
        ),
        "num_emitted_tokens": "900 + n % 100",
        "max_num_running": "n % 32",
        "max_num_waiting": "n % 8",
        "cost_busy_nano_usd": "1111111 + n % 1000",
        "cost_idle_nano_usd": "555555",
        "cost_lost_nano_usd": "0",
        "energy_source": "'none'",
    }
    names, expressions = ", ".join(values), ", ".join(values.values())
    series = dialect.series.format(1, num_minutes)
    statement = f"INSERT INTO capacity_intervals ({names}) {series} SELECT {expressions} FROM s"  # noqa: S608
    connection.exec_driver_sql(statement.replace("%", "%%") if dialect is POSTGRESQL else statement)


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    return f"'{value}'" if not isinstance(value, int | float) else repr(value)
