"""The other processes of the service benchmark: servers, and reading clients.

    python -m tests.benchmarks.service_peers server ROWS STEP_SECONDS     a fake engine
    python -m tests.benchmarks.service_peers whole ROWS FOLDER            all of it, a tiny model
    python -m tests.benchmarks.service_peers client ADDRESS STREAMS TOKENS

A server prints its port. The whole one then reads lines: at the first it prints the number of its
tasks, at every other one what it still holds, as a line of JSON, once that is nothing or half a
minute has passed. A client reads so many streams to their end and prints a line of JSON.
"""

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from engine.request import TokenDelta
from engine.step import StepOutput
from service.app import Parts, Server
from service.assembly import assemble
from service.async_client import AsyncClient
from service.client_calls import build_request
from service.process import run_until_signal
from service.security import OpenAccess
from service.settings import ServiceSettings
from tests.fakes import FAKE_INFO, FakeEngine, FakeRecording
from tests.service.cancels import what_stays
from tests.tiny import save_tiny_model, tiny_tokenizer


class StampingEngine(FakeEngine):
    """Its text is the monotonic time in nanoseconds at which the step was done."""

    def step(self) -> StepOutput:
        output = super().step()
        stamp = f"{time.monotonic_ns()} "
        stamped = tuple(_with_text(delta, stamp) for delta in output.deltas)
        return replace(output, deltas=stamped)


def _with_text(delta: TokenDelta, text: str) -> TokenDelta:
    return replace(delta, text=text)


async def serve(num_rows: int, step_seconds: float) -> int:
    info = replace(FAKE_INFO, max_model_tokens=10**7)
    engine = StampingEngine(
        info=info, num_rows=num_rows, tokens_per_step=4, step_seconds=step_seconds
    )
    settings = ServiceSettings(
        port=0,
        max_num_rows=num_rows,
        max_unread_messages=100_000,
        max_waiting_requests=20_000,
        max_waiting_tokens=10**12,
    )
    parts = Parts(
        build_engine=lambda: engine,
        load_tokenizer=tiny_tokenizer,
        open_recording=lambda info: FakeRecording(),
        close_telemetry=lambda: None,
        authenticator=OpenAccess(),
    )
    server = Server(settings, parts, "fake")
    return await run_until_signal(server, 0.0, lambda ready: print(ready.port, flush=True))


async def serve_whole(num_rows: int, folder: Path) -> int:
    settings = ServiceSettings(
        target=str(save_tiny_model(folder / "tiny", max_tokens=2048)),
        home=folder,
        port=0,
        max_num_rows=num_rows,
        kv_cache_memory=2e7,
        max_waiting_requests=20_000,
        audit_share=0,
    )
    server = assemble(settings)
    answers: list[asyncio.Task[None]] = []

    async def answer() -> None:
        num_idle_tasks: int | None = None
        while await asyncio.to_thread(sys.stdin.readline):
            if num_idle_tasks is None:
                num_idle_tasks = len(asyncio.all_tasks())
                print(num_idle_tasks, flush=True)
                continue
            print(json.dumps(await what_stays(server, num_idle_tasks)), flush=True)

    def serving(ready: Server) -> None:
        print(ready.port, flush=True)
        answers.append(asyncio.create_task(answer()))

    return await run_until_signal(server, 0.0, serving)


async def read_streams(address: str, num_streams: int, num_tokens: int) -> dict[str, object]:
    """Messages per second over all streams, and how late each message was, in milliseconds."""
    delays: list[float] = []
    first_at, last_at, num_messages = time.monotonic(), 0.0, 0

    async with AsyncClient(address) as client:

        async def read() -> None:
            nonlocal last_at, num_messages
            request = build_request([5], max_tokens=num_tokens, stop=["never"])
            async for event in client.generate(request).events():
                now = time.monotonic_ns()
                num_messages += 1
                if event.delta.text:
                    delays.append((now - int(event.delta.text.split()[-1])) / 1e6)
            last_at = time.monotonic()

        await asyncio.gather(*(read() for _ in range(num_streams)))
    return {"messages": num_messages, "seconds": last_at - first_at, "delays": delays}


def main(arguments: list[str]) -> int:
    if arguments[0] == "server":
        return asyncio.run(serve(int(arguments[1]), float(arguments[2])))
    if arguments[0] == "whole":
        return asyncio.run(serve_whole(int(arguments[1]), Path(arguments[2])))
    found = asyncio.run(read_streams(arguments[1], int(arguments[2]), int(arguments[3])))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
