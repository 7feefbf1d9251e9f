"""The other processes of the service benchmark: a server with a fake engine, and reading clients.

    python -m tests.benchmarks.service_peers server ROWS STEP_SECONDS
    python -m tests.benchmarks.service_peers client ADDRESS STREAMS TOKENS

A server prints its port. A client reads so many streams to their end and prints a line of JSON.
"""

import asyncio
import json
import sys
import time
from dataclasses import replace

from engine.request import TokenDelta
from engine.step import StepOutput
from service.app import Parts, Server
from service.async_client import AsyncClient
from service.client_calls import build_request
from service.process import run_until_signal
from service.security import OpenAccess
from service.settings import ServiceSettings
from tests.fakes import FAKE_INFO, FakeEngine, FakeRecording
from tests.tiny import tiny_tokenizer


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
    found = asyncio.run(read_streams(arguments[1], int(arguments[2]), int(arguments[3])))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
