"""What gRPC costs: writes build/bench/service.json.

    python -m tests.benchmarks.service [--only NAME]

through_grpc_over_engine  tokens per second through the service over those of the engine alone,
                          16 streams of the pulled model; see tests.benchmarks.service_overhead
messages_per_second       200 concurrent streams with a fake engine, two client processes
added_latency_p99_ms      from the end of a step to the client's hands, 16 streams at 25 steps/s
cancel_storm              10,000 streams of a real engine, over a tiny model, cancelled at random
                          moments, and what the server holds then: rows, blocks, tasks, ...
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.async_client import AsyncClient
from service.client_calls import TandemError
from tests.benchmarks.service_overhead import NUM_STREAMS, overhead
from tests.service.cancels import cancel_at_random

OUT = Path("build/bench/service.json")
_PEERS = [sys.executable, "-m", "tests.benchmarks.service_peers"]


@contextmanager
def fake_server(num_rows: int, step_seconds: float) -> Iterator[str]:
    with _server("server", str(num_rows), str(step_seconds)) as (address, _):
        yield address


@contextmanager
def _server(*arguments: str) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    process = subprocess.Popen(
        [*_PEERS, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def _ask(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def _read(
    address: str, num_processes: int, num_streams: int, num_tokens: int
) -> list[dict[str, Any]]:
    command = [*_PEERS, "client", address, str(num_streams // num_processes), str(num_tokens)]
    readers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)
    ]
    return [json.loads(reader.communicate()[0]) for reader in readers]


def throughput() -> dict[str, object]:
    with fake_server(200, 0.0) as address:
        found = _read(address, 2, 200, 1200)
    rate = sum(part["messages"] / part["seconds"] for part in found)
    return {"messages_per_second": rate}


def latency() -> dict[str, object]:
    with fake_server(NUM_STREAMS, 0.04) as address:
        found = _read(address, 1, NUM_STREAMS, 600)
    delays = sorted(found[0]["delays"])
    return {
        "added_latency_p99_ms": delays[int(len(delays) * 0.99)],
        "added_latency_p50_ms": delays[len(delays) // 2],
    }


def cancel_storm(num_cancels: int = 10_000) -> dict[str, object]:
    async def storm(address: str) -> None:
        async with AsyncClient(address) as client:
            await cancel_at_random(client, num_cancels, num_at_once=100)

    with (
        tempfile.TemporaryDirectory(prefix="tandem-storm-") as folder,
        _server("whole", "32", folder) as (address, process),
    ):
        _ask(process)
        try:
            asyncio.run(storm(address))
        except TandemError as error:
            raise SystemExit(f"the storm broke the server: {error}") from error
        left = json.loads(_ask(process))
        process.send_signal(signal.SIGTERM)
        process.communicate()
        if process.returncode:
            raise SystemExit(f"the server ended with status {process.returncode}")
        with sqlite3.connect(Path(folder) / "ledger.db") as ledger:
            rows = dict(ledger.execute("SELECT outcome, count(*) FROM requests GROUP BY 1"))
            [left["open_ledger_rows"]] = ledger.execute(
                "SELECT count(*) FROM request_starts"
            ).fetchone()
    leaked = sum(left.values())
    return {
        "cancel_storm": {
            "cancels": num_cancels,
            "leaked": leaked,
            "left": left,
            "ledger_rows": rows,
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["overhead", "throughput", "latency", "cancel_storm"])
    only = parser.parse_args().only
    OUT.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = json.loads(OUT.read_text()) if only and OUT.exists() else {}
    results["machine"] = {"processor": platform.machine(), "cores": os.cpu_count()}
    parts = {
        "overhead": overhead,
        "throughput": throughput,
        "latency": latency,
        "cancel_storm": cancel_storm,
    }
    for name, measure in parts.items():
        if only in (None, name):
            found = measure()
            print(name, json.dumps(found))
            results.update(found)
    OUT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
