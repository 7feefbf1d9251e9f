"""What gRPC costs: writes build/bench/service.json.

    python -m tests.benchmarks.service [--only NAME]

through_grpc_over_engine  tokens per second through the service over those of the engine alone,
                          16 streams of the pulled model (or of a tiny one, and it says so)
messages_per_second       200 concurrent streams with a fake engine, two client processes
added_latency_p99_ms      from the end of a step to the client's hands, 16 streams at 25 steps/s
cancel_storm              10,000 streams cancelled at random moments, and what was left of them
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams, StoppingParams
from service.assembly import assemble, warm_up
from service.async_client import AsyncClient
from service.client_calls import TandemError, build_request
from service.models import ModelError, default_home, resolve_model
from service.settings import ServiceSettings
from tests.tiny import save_tiny_model

OUT = Path("build/bench/service.json")
NUM_STREAMS = 16
_PEERS = [sys.executable, "-m", "tests.benchmarks.service_peers"]


def _settings(folder: Path) -> tuple[ServiceSettings, bool]:
    """Settings for the pulled model where there is one; whether it is the real one."""
    try:
        target, is_real = resolve_model("smollm2-135m-instruct", default_home()), True
    except ModelError:
        target, is_real = str(save_tiny_model(folder / "tiny", max_tokens=2048)), False
    return ServiceSettings(target=target, port=0, home=folder, max_num_rows=NUM_STREAMS), is_real


def _prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 300) for _ in range(24)] for _ in range(NUM_STREAMS)]


def engine_alone(settings: ServiceSettings, num_tokens: int) -> float:
    """Tokens per second of the engine in a plain loop."""
    engine = Engine.from_config(settings.engine_config(settings.target, None))
    warm_up(engine)
    for index, prompt in enumerate(_prompts()):
        engine.submit(
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0),
                stopping=StoppingParams(max_tokens=num_tokens, ignore_eos=True),
                arrived_at=time.monotonic(),
            )
        )
    began_at, num_emitted = time.monotonic(), 0
    while engine.has_work():
        num_emitted += sum(len(delta.token_ids) for delta in engine.step().deltas)
    return num_emitted / (time.monotonic() - began_at)


async def through_grpc(settings: ServiceSettings, num_tokens: int) -> float:
    """The same requests as 16 streams; server and client share this process, the worst case."""
    server = assemble(settings)
    await server.listen()
    await server.load()
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            await client.model()
            began_at = time.monotonic()
            requests = [build_request(p, max_tokens=num_tokens, temperature=0) for p in _prompts()]
            for request in requests:
                request.stopping.ignore_eos = True
            results = await asyncio.gather(*(client.generate(r).result() for r in requests))
            seconds = time.monotonic() - began_at
        return sum(len(result.token_ids) for result in results) / seconds
    finally:
        await server.stop(0.0)


def overhead(folder: Path) -> dict[str, object]:
    """Runs in turn; the ratio is the median over pairs, so that a busy moment counts once."""
    settings, is_real = _settings(folder)
    num_tokens = 48 if is_real else 400
    alone, through = [], []
    for _ in range(5):
        alone.append(engine_alone(settings, num_tokens))
        through.append(asyncio.run(through_grpc(settings, num_tokens)))
    ratios = [t / a for a, t in zip(alone, through, strict=True)]
    return {
        "through_grpc_over_engine": statistics.median(ratios),
        "overhead": {
            "model": Path(settings.target).name,
            "streams": NUM_STREAMS,
            "engine_tokens_per_second": alone,
            "grpc_tokens_per_second": through,
        },
    }


@contextmanager
def fake_server(num_rows: int, step_seconds: float) -> Iterator[str]:
    command = [*_PEERS, "server", str(num_rows), str(step_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def _read(address: str, num_processes: int, num_streams: int, num_tokens: int) -> list[dict]:
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
    draw = random.Random(2)

    async def storm(address: str) -> int:
        async with AsyncClient(address) as client:
            await client.model()
            gate = asyncio.Semaphore(100)

            async def one() -> None:
                async with gate:
                    stream = client.generate([5], max_tokens=4000)
                    task = asyncio.ensure_future(stream.result())
                    await asyncio.sleep(draw.random() * 0.05)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            await asyncio.gather(*(one() for _ in range(num_cancels)))
            for _ in range(200):
                load = await client.load()
                leaked = load.num_running_requests + load.num_waiting_requests
                if leaked == 0 and load.num_outstanding_tokens == 0:
                    return 0
                await asyncio.sleep(0.05)
            return leaked

    with fake_server(64, 0.001) as address:
        try:
            leaked = asyncio.run(storm(address))
        except TandemError as error:
            raise SystemExit(f"the storm broke the server: {error}") from error
    return {"cancel_storm": {"cancels": num_cancels, "leaked": leaked}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["overhead", "throughput", "latency", "cancel_storm"])
    only = parser.parse_args().only
    OUT.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = json.loads(OUT.read_text()) if only and OUT.exists() else {}
    results["machine"] = {"processor": platform.machine(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "overhead": lambda: overhead(Path(folder)),
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
