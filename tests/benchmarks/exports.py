"""How fast the ledger becomes tables: `make bench-exports` -> build/bench/exports.json.

Fills a ledger (SQLite, or PostgreSQL with --postgres URL of an empty database), exports all of
it, and reconciles the result against the ledger. The rate is request rows per second from the
first question to the published manifest, into all tables, acceptance by position included.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text

from exports.manifest import read_manifest
from exports.storage import Target
from telemetry.ledger.session import migrate, open_ledger
from tests.exports.ledgers import NOON, LedgerFill, request_row

NUM_POSITIONS = 4
DAY_MICROSECONDS = 86_400_000_000
SAMPLE_SECONDS = 0.05


def fill(url: str, num_rows: int, num_days: int) -> None:
    """Copies of one request over the days, varied enough to fill every bucket and key."""
    migrate(url)
    ledger = LedgerFill(url)
    ledger.dimensions()
    engine = _hasty_engine(url)
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


def measure(url: str, out: Path, num_workers: int) -> dict[str, object]:
    """Export in a process of its own; its memory is that of all processes together."""
    began = time.perf_counter()
    export = psutil.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from datetime import timedelta;"
            "from exports.job import ExportOptions, run_export;"
            "options = ExportOptions(lag=timedelta(0), num_workers=int(sys.argv[3]));"
            "run_export(sys.argv[1], sys.argv[2], options)",
            *(url, str(out), str(num_workers)),
        ]
    )
    memory: list[int] = []
    while export.poll() is None:
        memory.append(_memory_bytes(export))
        time.sleep(SAMPLE_SECONDS)
    seconds = time.perf_counter() - began
    if export.returncode:
        raise RuntimeError(f"the export ended with {export.returncode}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    manifest = read_manifest(Target(out))
    num_rows = manifest.num_rows("fact_request")
    with open_ledger(url).connect() as connection:
        [[in_ledger]] = connection.execute(text("SELECT count(*) FROM requests"))
    return {
        "rows": num_rows,
        "seconds": round(seconds, 3),
        "rows_per_second": round(num_rows / seconds),
        "cpu_seconds": round(cpu_seconds, 3),
        "rows_per_cpu_second": round(num_rows / cpu_seconds),
        "peak_memory_mb": round(max(memory) / 2**20),
        "peak_memory_mb_by_fifth": _peaks(memory),
        "reconciled": num_rows == in_ledger,  # tokens and cost: checked before publishing
        "bytes": sum(file.num_bytes for files in manifest.tables.values() for file in files),
    }


def _memory_bytes(export: psutil.Process) -> int:
    # Shared pages, which are mapped code for the most part, count for each of the processes.
    total = 0
    for process in [export, *export.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _peaks(memory: list[int]) -> list[int]:
    """The highest reading in each fifth of the run: equal ones do not grow with the rows."""
    bounds = [len(memory) * part // 5 for part in range(6)]
    parts = [memory[first:last] for first, last in itertools.pairwise(bounds)]
    return [round(max(part, default=0) / 2**20) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--postgres", help="URL of an empty database; SQLite without it")
    parser.add_argument("--out", type=Path, default=Path("build/bench/exports.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        url = arguments.postgres or f"sqlite:///{folder}/ledger.db"
        fill(url, arguments.rows, arguments.days)
        result = measure(url, Path(folder) / "out", arguments.workers)
    result |= {
        "source": url.split(":")[0],
        "days": arguments.days,
        "workers": arguments.workers,
        "load_average": round(os.getloadavg()[0], 2),  # of others too: want a quiet machine
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
