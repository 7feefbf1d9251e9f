"""Notices that a file has changed, so that nobody has to send a signal."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from service.settings import ServiceSettings

_log = logging.getLogger(__name__)

_Version = tuple[int, int, int, int] | None


class FileWatch:
    """Calls on_change, on the event loop, once what one of the paths leads to has changed.

    It asks every interval_seconds instead of being told: a mounted ConfigMap changes by a symbolic
    link to another folder, which leaves the watched name and its folder as they were, and a
    network file system tells nobody. A file that appears or goes has changed, too.
    """

    def __init__(
        self, paths: Sequence[Path], on_change: Callable[[], None], interval_seconds: float
    ) -> None:
        self._paths = tuple(paths)
        self._on_change = on_change
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Changes from now on count."""
        seen = [_version(path) for path in self._paths]
        self._task = asyncio.create_task(self._run(seen))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, seen: list[_Version]) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            # In a thread: a disk over the network may take its time.
            found = [await asyncio.to_thread(_version, path) for path in self._paths]
            changed = [
                p for p, old, new in zip(self._paths, seen, found, strict=True) if old != new
            ]
            seen = found
            if changed:
                _log.info("changed: %s", ", ".join(str(path) for path in changed))
                try:
                    self._on_change()
                except Exception:
                    _log.exception("the change was not taken over")


def watch_of(settings: ServiceSettings, on_change: Callable[[], None]) -> FileWatch | None:
    """Over the files that SIGHUP reads again; None where there are none, or none shall be."""
    known = (settings.access_file, settings.price_book, settings.experiment_file)
    paths = [path for path in known if path is not None]
    if not paths or settings.reload_seconds == 0:
        return None
    return FileWatch(paths, on_change, settings.reload_seconds)


def _version(path: Path) -> _Version:
    """None while nothing is there, or while it cannot be reached."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
