"""Keeps a sample of prompts on disk to train drafters with: off unless asked for, by operators.

Files are what `tandem train data` reads: one JSON object a line with `messages` or `prompt`. There
is one a day, for its owner alone, and old ones are removed. A prompt is redacted before anything
is written, and one whose redaction fails is not kept at all. Requests never wait: a full queue or
disk costs prompts, which are counted.
"""

import errno
import json
import logging
import os
import queue
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from service.orders import ChatPrompt, GenerationOrder, TextPrompt, TokenPrompt
from service.redaction import Redact
from telemetry.capture_counts import count_captured

_FILE = re.compile(r"prompts-(\d{4}-\d{2}-\d{2})\.jsonl")
_MAX_WAITING = 1024
_CLOSE_SECONDS = 5.0
_CHECK_SECONDS = 600.0  # between looks at what day it is

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureCounts:
    """num_dropped: the writer was behind. num_left_out: redaction wanted, or could not be done.
    num_failed: the disk."""

    num_written: int = 0
    num_dropped: int = 0
    num_left_out: int = 0
    num_failed: int = 0


class PromptCapture:
    """offer() is called on the event loop; a thread of its own does everything else.

    share: of the requests that may be kept. retention_days: that a day's file is kept beyond it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        share: float,
        retention_days: int,
        redact: Redact | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        max_waiting: int = _MAX_WAITING,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        """Raises OSError where the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._share = share
        self._retention = timedelta(days=retention_days)
        self._redact = redact
        self._check_seconds = check_seconds
        self._clock = clock
        self._random = random.SystemRandom()
        self._waiting: queue.Queue[TextPrompt | ChatPrompt | None] = queue.Queue(max_waiting)
        self._day: date | None = None
        self._lock = threading.Lock()
        self._counts = CaptureCounts()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> CaptureCounts:
        return self._counts

    def offer(self, order: GenerationOrder, *, is_allowed: bool) -> None:
        """Keep this prompt, perhaps. Only what a conversation can be made of is: no token ids, no
        tools, no turn of the assistant's to be continued, nothing twice when a stream resumes."""
        prompt = order.prompt
        if not is_allowed or order.resume_token_ids or isinstance(prompt, TokenPrompt):
            return
        if isinstance(prompt, ChatPrompt) and (prompt.tools or prompt.continue_last_message):
            return
        if self._random.random() >= self._share:
            return
        try:
            self._waiting.put_nowait(prompt)
        except queue.Full:
            self._count(num_dropped=1)

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        try:
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            _log.error("captured prompts are lost: their disk does not keep up")
        self._thread.join(_CLOSE_SECONDS)
        _log.info("captured prompts: %s", self._counts)

    # The thread's.

    def _run(self) -> None:
        self._remove_old(self._clock().date())
        while True:
            try:
                prompt = self._waiting.get(timeout=self._check_seconds)
            except queue.Empty:
                today = self._clock().date()  # old files go, whether new prompts come or not
                if today != self._day:
                    self._remove_old(today)
                continue
            if prompt is None:
                return
            line = self._line(prompt)
            if line is None:
                self._count(num_left_out=1)
                continue
            try:
                self._write(line)
            except OSError as error:
                self._count(num_failed=1)
                _log.error("a captured prompt could not be written: %s", error.strerror)
            else:
                self._count(num_written=1)

    def _line(self, prompt: TextPrompt | ChatPrompt) -> bytes | None:
        try:
            if isinstance(prompt, TextPrompt):
                content: dict[str, object] = {"prompt": self._redacted(prompt.text)}
            else:
                content = {
                    "messages": [
                        {
                            "role": str(message["role"]),
                            "content": self._redacted(str(message["content"])),
                        }
                        for message in prompt.messages
                    ]
                }
        except _LeftOutError:
            return None
        except Exception as error:
            # Its message may quote the text.
            _log.error("a prompt was not captured: redaction raised %s", type(error).__name__)
            return None
        line = json.dumps({**content, "source": "captured"}, ensure_ascii=False)
        return line.encode("utf-8", errors="replace") + b"\n"

    def _redacted(self, text: str) -> str:
        if self._redact is None:
            return text
        found = self._redact(text)
        if found is None or not found.strip():
            raise _LeftOutError
        if not isinstance(found, str):
            raise TypeError("redaction must give a text")
        return found

    def _write(self, line: bytes) -> None:
        """In one call, so that servers that share a folder do not mix their lines."""
        today = self._clock().date()
        if today != self._day:
            self._remove_old(today)
        path = self._folder / f"prompts-{today.isoformat()}.jsonl"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.fchmod(handle, 0o600)
            if os.write(handle, line) != len(line):
                raise OSError(errno.ENOSPC, "the disk took a part of a line")
        finally:
            os.close(handle)

    def _remove_old(self, today: date) -> None:
        self._day = today
        for path in self._folder.glob("prompts-*.jsonl"):
            match = _FILE.fullmatch(path.name)
            try:
                if match and date.fromisoformat(match[1]) < today - self._retention:
                    path.unlink(missing_ok=True)
            except (OSError, ValueError) as error:  # no such day is somebody else's file
                _log.error("%s could not be removed: %s", path.name, error)

    def _count(self, **more: int) -> None:
        with self._lock:
            added = {name: getattr(self._counts, name) + n for name, n in more.items()}
            self._counts = replace(self._counts, **added)
        for name, number in more.items():
            count_captured(name.removeprefix("num_"), number)
        if "num_dropped" in more and self._counts.num_dropped == 1:
            _log.warning("prompts come faster than they are captured; some are left out")


class _LeftOutError(Exception):
    """Redaction keeps nothing of a prompt."""
