"""A server inside this process, on loopback, for one caller."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from service.app import Server
from service.assembly import assemble, set_up_logs
from service.settings import ServiceSettings


@contextmanager
def private_server(settings: ServiceSettings) -> Iterator[str]:
    """The address of a loaded server, which stops at the end. Raises what starting it raises."""
    set_up_logs(settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="private-server", daemon=True)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(_start(settings), loop).result()
        try:
            yield f"{settings.host}:{server.port}"
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(settings: ServiceSettings) -> Server:
    server = assemble(settings)
    await server.listen()
    try:
        await server.load()
    except BaseException:
        await server.stop(0.0)
        raise
    return server
