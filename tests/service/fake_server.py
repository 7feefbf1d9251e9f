"""A server process with a fake engine, for tests that need signals: prints its port and serves.

With the argument `crash` it sends itself a request in which the engine dies.
"""

import asyncio
import sys

from service.app import Parts, Server
from service.async_client import AsyncClient
from service.client_calls import TandemError
from service.process import run_until_signal
from service.security import OpenAccess
from service.settings import ServiceSettings
from tests.fakes import FakeEngine, FakeRecording
from tests.tiny_tokenizer import tiny_tokenizer


def _fail(recording: object) -> None:
    raise ValueError("a file that cannot be used")


async def main(crash: bool) -> int:
    settings = ServiceSettings(port=0)
    engine = FakeEngine(step_seconds=0.02)
    parts = Parts(
        build_engine=lambda: engine,
        load_tokenizer=tiny_tokenizer,
        open_recording=lambda info: FakeRecording(),
        close_telemetry=lambda: None,
        authenticator=OpenAccess(),
        reloads={"broken": _fail, "prices": lambda recording: print("reloaded", flush=True)},
    )
    server = Server(settings, parts, "tiny")
    tasks: list[asyncio.Task[None]] = []

    async def provoke() -> None:
        engine.crash = True
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            try:
                await client.generate("x").result()
            except TandemError:
                return

    def serving(ready: Server) -> None:
        print(ready.port, flush=True)
        if crash:
            tasks.append(asyncio.create_task(provoke()))

    return await run_until_signal(server, settings.grace_seconds, serving)


if __name__ == "__main__":
    sys.exit(asyncio.run(main("crash" in sys.argv)))
