"""Reading ahead: the next batch is fetched while the last one is worked on."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1


class Prefetch(Generic[T]):
    """Runs an iterator in a thread, `depth` items ahead; what it raises is raised here.

    Close it, by `with`, to end the thread when the items are not all taken.
    """

    def __init__(self, items: Iterator[T], depth: int = 2) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        while True:
            is_item, value = self._ready.get()
            if is_item:
                yield value  # type: ignore[misc] # an item is a T
            elif value is None:
                return
            else:
                assert isinstance(value, BaseException)  # noqa: S101 - narrows the type
                raise value

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put((True, item)):
                    return
            self._put((False, None))
        except BaseException as error:
            self._put((False, error))

    def _put(self, entry: tuple[bool, T | BaseException | None]) -> bool:
        while not self._is_closed.is_set():
            try:
                self._ready.put(entry, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False
