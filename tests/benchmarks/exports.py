"""How fast the ledger becomes tables: `make bench-exports` -> build/bench/exports.json.

Fills a ledger in SQLite, exports all of it, and reconciles the result against the ledger. The
rate is request rows per second from the first question to the published manifest, into all
tables, acceptance by position included.

`--source postgresql` takes a PostgreSQL server of its own instead (or the one that
--postgres names). There the question is memory: the same dates are exported with a third of the
rows and with all, and it ends with an error when a COPY stream that is three times as long takes
more of it. The figures lie under `postgresql` in the same file, beside those of SQLite.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import create_engine, make_url, text

from exports.manifest import read_manifest
from exports.storage import Target
from telemetry.ledger.session import open_ledger
from tests.benchmarks.exports_ledger import fill
from tests.telemetry.postgres_server import running_postgres

SAMPLE_SECONDS = 0.5  # reading the memory of processes takes time of theirs


GROWTH = 3  # in rows per date
MAX_MEMORY_GROWTH = 1.25  # a stream that is held whole at some place makes it 2 and more


def measure(url: str, out: Path, num_workers: int) -> dict[str, Any]:
    """Export in a process of its own; its memory is that of all processes together."""
    began = time.perf_counter()
    export = psutil.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from datetime import timedelta;"
            # As where Tandem alone is installed: the tests' packages bring pandas with them.
            "from exports.without_pandas import hide_pandas; hide_pandas();"
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


def measure_memory(url: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The larger export's figures, and the peaks of both."""
    sizes = (arguments.rows // GROWTH, arguments.rows)
    found = []
    for num_rows in sizes:
        with _database(url, num_rows) as database:
            fill(database, num_rows, arguments.days)
            found.append(measure(database, folder / str(num_rows), arguments.workers))
    small, large = (run["peak_memory_mb"] for run in found)
    return found[-1] | {
        "peak_memory_mb_by_rows": {str(run["rows"]): run["peak_memory_mb"] for run in found},
        "memory_growth": round(large / small, 3),
        "reconciled": all(run["reconciled"] for run in found),
    }


@contextmanager
def _database(url: str, num_rows: int) -> Iterator[str]:
    """An empty database of the server that `url` names, dropped afterwards."""
    name = f"tandem_bench_{num_rows}"
    admin = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
        try:
            yield make_url(url).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def measure_postgresql(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """On the server of --postgres, or on one that is started for this."""
    if arguments.postgres:
        return measure_memory(arguments.postgres, folder, arguments)
    with running_postgres() as server:
        if server is None:
            raise SystemExit("there is no PostgreSQL: install Debian's `postgresql`")
        return measure_memory(server.url, folder, arguments)


def measure_sqlite(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    url = f"sqlite:///{folder}/ledger.db"
    fill(url, arguments.rows, arguments.days)
    return measure(url, folder / "out", arguments.workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--source", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--postgres", help="URL of a server where databases may be created")
    parser.add_argument("--out", type=Path, default=Path("build/bench/exports.json"))
    arguments = parser.parse_args()
    run = measure_sqlite if arguments.source == "sqlite" else measure_postgresql
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        result = run(Path(folder), arguments)
    result |= {
        "source": arguments.source,
        "days": arguments.days,
        "workers": arguments.workers,
        "load_average": round(os.getloadavg()[0], 2),  # of others too: want a quiet machine
    }
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.source == "postgresql":
        result = before | {"postgresql": result}
    elif "postgresql" in before:
        result["postgresql"] = before["postgresql"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    growth = result["postgresql"]["memory_growth"] if arguments.source == "postgresql" else 1
    if growth > MAX_MEMORY_GROWTH:
        raise SystemExit(f"memory grew {growth} times with {GROWTH} times the rows of a date")


if __name__ == "__main__":
    main()
