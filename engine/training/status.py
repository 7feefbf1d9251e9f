"""What a long command says: one line that changes, and events as JSON lines."""

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from engine.training import atomic_files

_MIN_GAP_SECONDS = 0.5


class StatusLog:
    """One status line on a terminal (a line now and then elsewhere), events in a file.

    progress.json holds the latest event whole, for whoever watches.
    """

    def __init__(self, folder: Path, *, is_main: bool = True, stream: TextIO | None = None) -> None:
        self._folder = folder
        self._is_main = is_main
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown_at = float("-inf")
        folder.mkdir(parents=True, exist_ok=True)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl; instants are seconds since the epoch."""
        if not self._is_main:
            return
        entry = {"event": kind, "at": round(time.time(), 3), **fields}
        with (self._folder / "events.jsonl").open("a") as handle:
            handle.write(json.dumps(entry) + "\n")
        atomic_files.write_json(self._folder / "progress.json", entry)

    def line(self, text: str, *, is_final: bool = False) -> None:
        """Show where the work stands."""
        now = time.monotonic()
        gap = _MIN_GAP_SECONDS if self._is_terminal else 20.0
        if not self._is_main or (not is_final and now - self._shown_at < gap):
            return
        self._shown_at = now
        end = "\n" if is_final or not self._is_terminal else ""
        start = "\r\x1b[2K" if self._is_terminal else ""
        self._stream.write(f"{start}{text}{end}")
        self._stream.flush()


def duration(seconds: float) -> str:
    """As people read it: 45s, 12m, 1h05m."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = int(seconds // 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
