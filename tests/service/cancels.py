"""Streams that are cancelled at random moments, and what a server still holds afterwards."""

import asyncio
import random
from contextlib import aclosing

from engine.engine import Engine
from service.app import Server
from service.async_client import AsyncClient
from service.client_calls import build_request
from service.pb import generation_pb2 as pb

MAX_SECONDS = 0.05


async def cancel_at_random(client: AsyncClient, num_cancels: int, *, num_at_once: int) -> None:
    """Open and cancel so many streams, half of them of two completions.

    A third is cancelled by the clock, before or soon after the server has it, whatever comes; the
    others after so many messages.
    """
    draw = random.Random(2)
    gate = asyncio.Semaphore(num_at_once)

    async def one() -> None:
        async with gate:
            prompt = [draw.randrange(5, 300) for _ in range(draw.randrange(1, 40))]
            request = build_request(prompt, max_tokens=400, ignore_eos=True)
            request.n = draw.choice((1, 2))
            num_messages = draw.choice((0, 0, 1, 2, 5, 15))
            if num_messages:
                await _read(client, request, num_messages)
                return
            reading = asyncio.ensure_future(_read(client, request, 10**9))
            await asyncio.sleep(draw.random() * MAX_SECONDS)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    await asyncio.gather(*(one() for _ in range(num_cancels)))


async def _read(client: AsyncClient, request: pb.GenerateRequest, num_messages: int) -> None:
    stream = client.generate(request)
    async with aclosing(stream.events()) as events:
        async for _ in events:
            num_messages -= 1
            if num_messages == 0:
                return


def leftovers(server: Server, num_idle_tasks: int) -> dict[str, int]:
    """What is held, by kind; nothing of an idle server, which has so many tasks.

    Raises RuntimeError when the engine's stores do not add up.
    """
    engine, admission = server._engine._engine, server.serving().admission
    assert isinstance(engine, Engine)
    load = engine.load()
    if not engine.has_work():
        engine.check_integrity()
    return {
        "rows": load.num_running,
        "waiting_rows": load.num_waiting,
        "blocks": load.num_total_blocks - load.num_free_blocks,
        "live_requests": server.num_live_requests,
        "admitted_requests": admission.num_live,
        "admitted_tokens": admission.num_live_tokens,
        "tenants": len(admission._tenants),
        "open_calls": len(server._open_calls),
        "engine_commands": len(server._engine._inbox),
        "tasks": len(asyncio.all_tasks()) - num_idle_tasks,
    }


async def what_stays(server: Server, num_idle_tasks: int) -> dict[str, int]:
    """The leftovers, once they are none or half a minute has passed."""
    for _ in range(600):
        if not any(leftovers(server, num_idle_tasks).values()):
            break
        await asyncio.sleep(0.05)
    return leftovers(server, num_idle_tasks)
