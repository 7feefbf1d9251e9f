"""Tokens per second through gRPC over those of the engine alone, for tests.benchmarks.service.

The engine alone, `tandem serve` and the client are a process each, loaded once. The same greedy
requests run through one and the other in turn while the rest sleeps; nothing is drafted, so that
both take the same steps, of which every one is a message for every stream: the most messages per
token that there are. The ratio is taken between neighbours in time.

`python -m tests.benchmarks.service_overhead` is the engine's process: for every line that it
reads it runs the requests once and prints its tokens per second.
"""

import asyncio
import os
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
from typing import Any

from engine.engine import Engine
from engine.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from service.assembly import warm_up
from service.async_client import AsyncClient
from service.client_calls import build_request
from service.models import ModelError, default_home, resolve_model
from service.settings import ServiceSettings
from tests.ports import free_port
from tests.tiny import save_tiny_model

NUM_STREAMS = 16
NUM_PAIRS = 20
TANDEM = Path(sys.executable).with_name("tandem")


def overhead() -> dict[str, Any]:
    """Figures for service.json; needs the pulled model, or says that it took a tiny one."""
    with tempfile.TemporaryDirectory(prefix="tandem-overhead-") as folder:
        home = Path(folder)
        try:
            target, num_tokens = resolve_model("smollm2-135m-instruct", default_home()), 96
        except ModelError:
            target, num_tokens = str(save_tiny_model(home / "tiny", max_tokens=2048)), 400
        variables = {
            "TANDEM_TARGET": target,
            "TANDEM_HOME": folder,
            "TANDEM_PORT": str(free_port()),
            "TANDEM_MAX_NUM_ROWS": str(NUM_STREAMS),
            "TANDEM_AUDIT_SHARE": "0",  # audits run while the server idles
            "NUM_TOKENS": str(num_tokens),
        }
        # The engine first: what it measures of the machine, the server finds.
        with _engine(variables) as engine, _server(variables) as address:
            alone, through = asyncio.run(_alternate(engine, address, num_tokens))
    ratios = [t / a for a, t in zip(alone, through, strict=True)]
    return {
        "through_grpc_over_engine": statistics.median(ratios),
        "overhead": {
            "model": Path(target).name,
            "streams": NUM_STREAMS,
            "quartiles": statistics.quantiles(ratios, n=4),
            "of_medians": statistics.median(through) / statistics.median(alone),
            "engine_tokens_per_second": alone,
            "grpc_tokens_per_second": through,
        },
    }


async def _alternate(
    engine: "subprocess.Popen[str]", address: str, num_tokens: int
) -> tuple[list[float], list[float]]:
    alone: list[float] = []
    through: list[float] = []
    async with AsyncClient(address) as client:
        await _through(client, num_tokens)
        for pair in range(NUM_PAIRS):
            if pair % 2:
                through.append(await _through(client, num_tokens))
            alone.append(_alone(engine))
            if not pair % 2:
                through.append(await _through(client, num_tokens))
    return alone, through


def _alone(engine: "subprocess.Popen[str]") -> float:
    if engine.stdin is None or engine.stdout is None:
        raise RuntimeError("the engine's process has no pipes")
    engine.stdin.write("run\n")
    engine.stdin.flush()
    return float(engine.stdout.readline())


async def _through(client: AsyncClient, num_tokens: int) -> float:
    requests = [
        build_request(p, max_tokens=num_tokens, temperature=0, ignore_eos=True, speculation=False)
        for p in _prompts()
    ]
    began_at = time.monotonic()
    results = await asyncio.gather(*(client.generate(request).result() for request in requests))
    return sum(len(result.token_ids) for result in results) / (time.monotonic() - began_at)


def _prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 300) for _ in range(24)] for _ in range(NUM_STREAMS)]


@contextmanager
def _engine(variables: dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.service_overhead"],
        env={**_outside(), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _alone(process)
        yield process
    finally:
        process.communicate()


@contextmanager
def _server(variables: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen([TANDEM, "serve"], env={**_outside(), **variables})
    address = f"127.0.0.1:{variables['TANDEM_PORT']}"
    try:
        asyncio.run(_wait_for(address, process))
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def _wait_for(address: str, process: "subprocess.Popen[bytes]") -> None:
    async with AsyncClient(address) as client:
        while True:
            try:
                await client.model()
                return
            except Exception:
                if process.poll() is not None:
                    raise
                await asyncio.sleep(0.2)


def _outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}


def _run_once(engine: Engine, num_tokens: int) -> float:
    for index, prompt in enumerate(_prompts()):
        engine.submit(
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0),
                stopping=StoppingParams(max_tokens=num_tokens, ignore_eos=True),
                speculation=SpeculationParams(mode=SpeculationMode.OFF),
                arrived_at=time.monotonic(),
            )
        )
    began_at, num_emitted = time.monotonic(), 0
    while engine.has_work():
        num_emitted += sum(len(delta.token_ids) for delta in engine.step().deltas)
    return num_emitted / (time.monotonic() - began_at)


def main() -> None:
    settings = ServiceSettings()
    engine = Engine.from_config(settings.engine_config(settings.target, None))
    warm_up(engine)
    for _ in sys.stdin:
        print(_run_once(engine, int(os.environ["NUM_TOKENS"])), flush=True)


if __name__ == "__main__":
    main()
