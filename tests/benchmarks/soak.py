"""A long run under recorded arrivals and chaos: writes build/bench/soak.json.

    python -m tests.benchmarks.soak [--seconds 1200] [--rate 4]

A `tandem serve` process over a tiny model gets the arrivals of the Azure conversation trace
(Azure 2023, CC-BY-4.0; $TANDEM_DATA/azure_llm_trace_conv.csv, exponential arrivals without it),
their lengths scaled to the model and their mean rate to --rate per second; `arrivals` in the file
says which and by how much. Meanwhile clients are
killed, frozen, cancelled and malformed. Memory is sampled; its slope counts over the last half.
Ends with an error when a request is left over, when rows are missing in the ledger, or when the
server does not stop with status 0.
"""

import argparse
import asyncio
import csv
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from grpc import aio

from service.async_client import AsyncClient
from service.client_calls import TandemError, build_request
from tests.benchmarks.workloads import DATA
from tests.tiny import save_tiny_model

OUT = Path("build/bench/soak.json")
MAX_CONTEXT = 2048
PROMPT_DIVISOR, OUTPUT_DIVISOR = 8, 4  # the trace's prompts have 1,155 tokens on average
_CHAOS_CLIENT = """
import sys
from service.client import Client
request_id = sys.argv[2]
for text in Client(sys.argv[1]).generate("x", max_tokens=1800, request_id=request_id):
    print(".", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int


class Recorded:
    """The trace's requests, without end: it is repeated. Mean `rate` per second."""

    def __init__(self, path: Path, rate: float) -> None:
        with path.open(newline="") as file:
            self._rows = list(csv.DictReader(file))
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in self._rows]
        self._seconds = [instant - times[0] for instant in times]
        self._scale = len(times) / rate / self._seconds[-1]
        self.description: dict[str, object] = {
            "source": path.name,
            "requests_per_second": rate,
            "recorded_requests_per_second": round(len(times) / self._seconds[-1], 3),
            "speed": round(1 / self._scale, 4),  # 1 is as recorded
            "prompt_tokens_divided_by": PROMPT_DIVISOR,
            "output_tokens_divided_by": OUTPUT_DIVISOR,
        }

    def __iter__(self) -> Iterator[Arrival]:
        offset = 0.0
        while True:
            for row, seconds in zip(self._rows, self._seconds, strict=True):
                yield Arrival(
                    offset + seconds * self._scale,
                    max(1, min(1500, int(row["ContextTokens"]) // PROMPT_DIVISOR)),
                    max(1, min(400, int(row["GeneratedTokens"]) // OUTPUT_DIVISOR)),
                )
            offset += self._seconds[-1] * self._scale


class Synthetic:
    """Without a trace: exponential gaps, uniform lengths."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.description: dict[str, object] = {"source": "synthetic", "requests_per_second": rate}

    def __iter__(self) -> Iterator[Arrival]:
        return _synthetic(self._rate)


def arrivals(rate: float) -> Recorded | Synthetic:
    path = DATA / "azure_llm_trace_conv.csv"
    return Recorded(path, rate) if path.is_file() else Synthetic(rate)


def _synthetic(rate: float) -> Iterator[Arrival]:
    draw, now = random.Random(0), 0.0
    while True:
        now += draw.expovariate(rate)
        yield Arrival(now, draw.randrange(1, 200), draw.randrange(1, 80))


class Soak:
    """Load, chaos and memory samples against one server."""

    def __init__(
        self,
        address: str,
        server: psutil.Process,
        seconds: float,
        load: Recorded | Synthetic,
    ) -> None:
        self.codes: Counter[str] = Counter()
        self.chaos: Counter[str] = Counter()
        self.memory: list[tuple[float, float]] = []
        self._address = address
        self._server = server
        self._arrivals = load
        self._draw = random.Random(5)
        self._began_at = time.monotonic()
        self._ends_at = self._began_at + seconds
        self._num = 0

    async def run(self) -> None:
        async with AsyncClient(self._address) as client:
            await asyncio.gather(self._load(client), self._misbehave(client), self._watch())
            await self._wait_until_idle(client)

    async def _load(self, client: AsyncClient) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for arrival in self._arrivals:
            due_at = self._began_at + arrival.at_seconds
            if due_at >= self._ends_at:
                break
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            task = asyncio.create_task(self._one(client, arrival))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _one(self, client: AsyncClient, arrival: Arrival) -> None:
        prompt = [self._draw.randrange(5, 300) for _ in range(arrival.num_prompt_tokens)]
        request = build_request(prompt, max_tokens=arrival.num_output_tokens)
        timeout = self._draw.choice((60.0, 60.0, 60.0, 0.1))
        try:
            await client.generate(request, timeout_seconds=timeout).result()
        except TandemError as error:
            self.codes[error.code.name] += 1
        else:
            self.codes["OK"] += 1

    async def _misbehave(self, client: AsyncClient) -> None:
        while time.monotonic() < self._ends_at:
            await asyncio.sleep(self._draw.uniform(0.5, 3.0))
            kind = self._draw.choice(("kill", "freeze", "cancel", "malformed", "idle"))
            self.chaos[kind] += 1
            self._num += 1
            if kind in ("kill", "freeze"):
                await self._end_process(kind)
            elif kind == "cancel":
                await self._cancel(client)
            elif kind == "malformed":
                await self._malformed()
            else:
                _, writer = await asyncio.open_connection(*self._address.split(":"))
                writer.write(os.urandom(64))
                writer.close()

    async def _end_process(self, kind: str) -> None:
        command = [sys.executable, "-c", _CHAOS_CLIENT, self._address, f"chaos-{self._num}"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        if kind == "freeze":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(4)
        process.kill()
        await process.wait()

    async def _cancel(self, client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("x", max_tokens=1500).result())
        await asyncio.sleep(self._draw.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _malformed(self) -> None:
        async with aio.insecure_channel(self._address) as channel:
            call = channel.unary_stream("/tandem.v1.GenerationService/Generate")
            try:
                async for _ in call(os.urandom(200)):
                    pass
            except aio.AioRpcError:
                return

    async def _watch(self) -> None:
        while time.monotonic() < self._ends_at:
            await asyncio.sleep(1.0)
            mebibytes = self._server.memory_info().rss / 2**20
            self.memory.append((time.monotonic() - self._began_at, mebibytes))

    async def _wait_until_idle(self, client: AsyncClient) -> None:
        for _ in range(600):
            load = await client.load()
            if load.num_running_requests + load.num_waiting_requests == 0:
                if load.num_outstanding_tokens or load.num_free_blocks != load.num_total_blocks:
                    raise SystemExit(f"something was left over: {load}")
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"requests were left over: {load}")

    def slope_mebibytes_per_hour(self) -> float:
        """Least squares over the last half."""
        points = self.memory[len(self.memory) // 2 :]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--rate", type=float, default=4)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = _soak(Path(folder), options.seconds, options.rate)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _soak(folder: Path, seconds: float, rate: float) -> dict[str, object]:
    settings = {
        "TANDEM_TARGET": str(save_tiny_model(folder / "tiny", max_tokens=MAX_CONTEXT)),
        "TANDEM_HOME": str(folder),
        "TANDEM_PORT": "0",
        "TANDEM_KEEPALIVE_SECONDS": "1",
        "TANDEM_KEEPALIVE_TIMEOUT_SECONDS": "1",
        "TANDEM_KV_CACHE_MEMORY": "2e7",  # touched in full within the first minute
        "TANDEM_LOG_LEVEL": "WARNING",
        # torch keeps kernels by shape, 1,024 in each cache; small ones are full early
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
    }
    command = [str(Path(sys.executable).with_name("tandem")), "serve"]
    server = subprocess.Popen(
        command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    line = next(line for line in server.stderr if line.startswith("serving on "))
    log = (folder / "server.log").open("w")
    reader = threading.Thread(target=log.writelines, args=(server.stderr,), daemon=True)
    reader.start()
    load = arrivals(rate)
    soak = Soak(line.split()[-1], psutil.Process(server.pid), seconds, load)
    try:
        asyncio.run(soak.run())
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    finally:
        server.kill()
    if status:
        raise SystemExit(f"the server ended with status {status}")
    with sqlite3.connect(folder / "ledger.db") as ledger:
        rows = dict(ledger.execute("SELECT status_code, count(*) FROM requests GROUP BY 1"))
        open_rows = ledger.execute("SELECT count(*) FROM request_starts").fetchone()[0]
    if rows.get("OK", 0) < soak.codes["OK"] or open_rows:
        raise SystemExit(f"ledger: {rows}, {open_rows} still open; clients saw {soak.codes}")
    return {
        "seconds": seconds,
        "arrivals": load.description,
        "codes": dict(soak.codes),
        "chaos": dict(soak.chaos),
        "ledger_rows": rows,
        "rss_mib": [round(mebibytes) for _, mebibytes in soak.memory[:: len(soak.memory) // 20]],
        "rss_slope_mib_per_hour": soak.slope_mebibytes_per_hour(),
    }


if __name__ == "__main__":
    main()
