"""How fast the ledger becomes tables: `make bench-exports` -> build/bench/exports.json.

Fills a ledger (SQLite, or PostgreSQL with --postgres URL of an empty database), exports all of
it, and reconciles the result against the ledger. The rate is request rows per second from the
first question to the published manifest, into all tables, acceptance by position included.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import Connection, Engine, text

from exports.manifest import read_manifest
from exports.storage import Target
from telemetry.ledger.session import migrate, open_ledger
from tests.exports.ledgers import NOON, LedgerFill, request_row

NUM_POSITIONS = 4
DAY_MICROSECONDS = 86_400_000_000


def fill(url: str, num_rows: int, num_days: int) -> None:
    """Copies of one request over the days, varied enough to fill every bucket and key."""
    migrate(url)
    ledger = LedgerFill(url)
    ledger.dimensions()
    engine = open_ledger(url)
    row = request_row(1, NOON) | {
        "num_verify_steps": 8,
        "num_draft_tokens": 20,
        "num_accepted_tokens": 12,
        "drafter_key": 1,
    }
    with engine.begin() as connection:
        _fill_requests(engine, connection, row, num_rows, num_days)
        connection.execute(
            text(
                "INSERT INTO request_acceptance "
                "SELECT r.ledger_id, p.n, r.finished_on, 8 - p.n, 6 - p.n - r.ledger_id % 2 "
                "FROM requests r CROSS JOIN (SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2 "
                "UNION ALL SELECT 3) p ORDER BY 1, 2"
            )
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    engine.dispose()


def _fill_requests(
    engine: Engine, connection: Connection, row: dict[str, object], num_rows: int, num_days: int
) -> None:
    is_sqlite = engine.dialect.name == "sqlite"
    first = int(NOON.timestamp() * 1e6)
    moment = f"({first} + (n * {num_days} / {num_rows}) * {DAY_MICROSECONDS} + n % 40000 * 1000000)"
    if is_sqlite:
        instant, day = moment, f"date({moment} / 1000000, 'unixepoch')"
        more = f"SELECT n + 1 FROM s WHERE n < {num_rows}"  # noqa: S608 - own numbers
        series = f"WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL {more})"
        hexed = "printf('%032x', n)"
    else:
        instant = f"to_timestamp({moment} / 1000000.0)"
        day = f"({instant} AT TIME ZONE 'UTC')::date"
        series = f"WITH s(n) AS (SELECT generate_series(1, {num_rows}::bigint))"
        hexed = "lpad(to_hex(n), 32, '0')"
    varied = {
        "ledger_id": "n",
        "record_id": hexed,
        "request_id": "'request-' || n",
        "recorded_at": instant,
        "started_at": instant,
        "finished_at": instant,
        "finished_on": day,
        "model_key": "1 + n % 2",
        "variant_key": "1 + n / 2 % 2",
        "ttft_seconds": "0.05 + n % 997 / 500.0",
        "tpot_seconds": "0.005 + n % 101 / 2000.0",
        "e2e_seconds": "0.5 + n % 4999 / 500.0",
        "num_output_tokens": "1 + n % 500",
        "cost_nano_usd": "1000 + n % 7919",
    }
    values = {**{name: _literal(value) for name, value in row.items()}, **varied}
    names, expressions = ", ".join(values), ", ".join(values.values())
    statement = f"INSERT INTO requests ({names}) {series} SELECT {expressions} FROM s"  # noqa: S608
    connection.execute(text(statement))


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, dict):
        return "'{}'"
    return f"'{value}'" if not isinstance(value, int | float) else repr(value)


def measure(url: str, out: Path) -> dict[str, object]:
    """Export in a process of its own, so that its memory is its own."""
    began = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from datetime import timedelta;"
            "from exports.job import ExportOptions, run_export;"
            "run_export(sys.argv[1], sys.argv[2], ExportOptions(lag=timedelta(0)))",
            *(url, str(out)),
        ],
        check=True,
    )
    seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the largest process: the export itself, or one of the two that read for it.
    peak = usage.ru_maxrss
    manifest = read_manifest(Target(out))
    num_rows = manifest.num_rows("fact_request")
    with open_ledger(url).connect() as connection:
        [[in_ledger]] = connection.execute(text("SELECT count(*) FROM requests"))
    return {
        "rows": num_rows,
        "seconds": round(seconds, 3),
        "rows_per_second": round(num_rows / seconds),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_memory_mb": round(peak / 1024),
        "reconciled": num_rows == in_ledger,  # tokens and cost: checked before publishing
        "bytes": sum(file.num_bytes for files in manifest.tables.values() for file in files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument("--postgres", help="URL of an empty database; SQLite without it")
    parser.add_argument("--out", type=Path, default=Path("build/bench/exports.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        url = arguments.postgres or f"sqlite:///{folder}/ledger.db"
        fill(url, arguments.rows, arguments.days)
        result = measure(url, Path(folder) / "out")
    result |= {"source": url.split(":")[0], "days": arguments.days}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
