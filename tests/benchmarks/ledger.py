"""How fast the ledger takes requests, and whether anything is lost on the way.

    python -m tests.benchmarks.ledger [--requests N] [--kills N] [--out FILE]

Requests with a start record, a row, four acceptance positions and dimensions go through the
writer into a real SQLite file and a real PostgreSQL server (left out where there is none). Then
writers are killed at random moments, and a recorder's costs are reconciled with price x time.
"""

import argparse
import gc
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from telemetry.ledger.journal import Journal
from telemetry.ledger.queries import ledger_stats, reconcile
from telemetry.ledger.records import RequestRecord
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.ledger.writer import LedgerWriter
from telemetry.ledger.writer_status import WriterConfig
from tests.telemetry.ledger_records import request_record, start_record
from tests.telemetry.postgres_server import running_postgres
from tests.telemetry.recording_rig import recording_rig

CHUNK = 10_000


@contextmanager
def _workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        yield Path(name)


LEAST_ROWS_PER_SECOND = {"sqlite_rows_per_second": 5_000, "postgresql_rows_per_second": 10_000}
MOST_MEMORY_MB = 200


def rows_per_second(url: str, folder: Path, num_requests: int) -> float:
    """Requests per second from submit to commit; making the records is not counted."""
    migrate(url)
    engine = open_ledger(url)
    config = WriterConfig(max_batch_records=4_000)
    writer = LedgerWriter(LedgerStore(engine), Journal(folder), config)
    seconds = 0.0
    for first in range(0, num_requests, CHUNK):
        records = [_request(n) for n in range(first, min(first + CHUNK, num_requests))]
        pairs = [(start_record(record), record) for record in records]
        gc.freeze()  # a server never holds ten thousand finished requests for the collector to scan
        started = time.perf_counter()
        for start, record in pairs:
            writer.post(start)
            writer.submit(record)
        if not writer.wait_until_written(600):
            raise RuntimeError("the ledger did not keep up")
        seconds += time.perf_counter() - started
        gc.unfreeze()
    writer.close()
    found = ledger_stats(engine)
    engine.dispose()
    if (found.num_requests, found.num_open) != (num_requests, 0):
        raise RuntimeError(f"wrote {num_requests} requests, found {found}")
    return num_requests / seconds


def _request(number: int) -> RequestRecord:
    return request_record(
        f"r{number}",
        drafted_per_position=(5, 4, 3, 1),
        accepted_per_position=(4, 3, 1, 0),
        accepted_per_length=(1, 2, 2, 3),
    )


def kill_writers(folder: Path, num_kills: int) -> dict[str, int]:
    """See tests.telemetry.killed_writer."""
    url = f"sqlite:///{folder}/kills.db"
    migrate(url)
    module = "tests.telemetry.killed_writer"
    done = subprocess.run(
        [sys.executable, "-m", module, url, str(folder / "kills"), str(num_kills), "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, int] = json.loads(done.stdout)
    return result


def reconcile_cost(folder: Path, num_requests: int = 200) -> int:
    """Nano-USD by which requests + idle differ from price x wall time, over two starts."""
    for _ in range(2):
        with recording_rig(folder, capacity_interval_seconds=0.1) as rig:
            for number in range(num_requests // 2):
                request = rig.begin(f"r{number}")
                rig.run_step(f"r{number}")
                rig.finish(request)
    engine = open_ledger(rig.url, read_only=True)
    money = reconcile(engine)
    engine.dispose()
    return abs(money.charged_nano_usd - money.due_nano_usd) + sum(
        abs(difference) for difference in money.differing.values()
    )


def measure(num_requests: int, num_kills: int) -> dict[str, Any]:
    """All figures of the benchmark."""
    results: dict[str, Any] = {"requests": num_requests}
    with _workplace() as folder, ExitStack() as stack:
        results["sqlite_rows_per_second"] = round(
            rows_per_second(f"sqlite:///{folder}/l.db", folder / "sqlite", num_requests)
        )
        server = stack.enter_context(running_postgres(fsync=True))
        results["postgresql_rows_per_second"] = (
            round(rows_per_second(server.url, folder / "postgresql", num_requests))
            if server
            else None
        )
        # Before anything else grows this process: what writing took at most.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results["peak_memory_mb"] = round(peak / 1024)
        killed = kill_writers(folder, num_kills)
        results.update({name: killed[name] for name in ("kills", "lost", "duplicated")})
        results["acknowledged_before_kill"] = killed["acknowledged"]
        results["cost_reconciliation_nano_usd"] = reconcile_cost(folder)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/bench/ledger.json"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    results = measure(options.requests, options.kills)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    if results["lost"] or results["duplicated"] or results["cost_reconciliation_nano_usd"]:
        raise SystemExit("the ledger lost, doubled or miscounted something")
    for name, least in LEAST_ROWS_PER_SECOND.items():
        if results[name] is not None and results[name] < least:
            raise SystemExit(f"{name}: {results[name]}, wanted are {least}")
    if results["peak_memory_mb"] >= MOST_MEMORY_MB:
        raise SystemExit(f"peak_memory_mb: {results['peak_memory_mb']}, not below {MOST_MEMORY_MB}")


if __name__ == "__main__":
    main()
