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

import psutil
from sqlalchemy import text

from exports.manifest import read_manifest
from exports.storage import Target
from telemetry.ledger.session import open_ledger
from tests.benchmarks.exports_ledger import fill

SAMPLE_SECONDS = 0.5  # reading the memory of processes takes time of theirs


def measure(url: str, out: Path, num_workers: int) -> dict[str, object]:
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
