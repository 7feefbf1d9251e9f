"""A server as a process: signals, exit status."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from service.app import Server
from service.file_watch import FileWatch

EXIT_OK = 0
EXIT_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


async def run_until_signal(
    server: Server,
    grace_seconds: float,
    on_serving: Callable[[Server], None],
    watch: FileWatch | None = None,
) -> int:
    """Listen, load, serve until SIGTERM or SIGINT or a failure; returns the exit status.

    The first signal drains for at most grace_seconds, the second one ends the process at once.
    SIGHUP reads tenants, quotas, prices and the experiment again, and so does a change that
    `watch` sees.
    Raises what listening or loading raises.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _on_signal, number, stopping)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    if watch is not None:
        watch.start()
    try:
        try:
            await server.listen()
            await _load_unless(server, stopping)
        except BaseException:
            await server.stop(0.0)  # probes see the port close, and no task outlives the loop
            raise
        if not stopping.is_set():
            on_serving(server)
        await _first(stopping, server.failed)
        has_failed = server.failed.is_set()
        await server.stop(0.0 if has_failed else grace_seconds)
        return EXIT_FAILED if has_failed else EXIT_OK
    finally:
        if watch is not None:
            await watch.stop()
        for number in (*_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _on_signal(number: signal.Signals, stopping: asyncio.Event) -> None:
    if stopping.is_set():
        _log.warning("second signal: ending at once")
        logging.shutdown()
        os._exit(128 + number)
    _log.info("%s: finishing what is live", number.name)
    stopping.set()


async def _load_unless(server: Server, stopping: asyncio.Event) -> None:
    """Load, but do not make a signal wait for it. Raises what loading raises."""
    loading = asyncio.create_task(server.load())
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        stopped.cancel()
        loading.result()
    else:
        _log.warning("stopped while loading")
        logging.shutdown()
        os._exit(EXIT_OK)  # the loading thread cannot be interrupted and holds nothing yet


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
