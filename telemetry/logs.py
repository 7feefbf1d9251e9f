"""Logs as JSON lines with trace ids: rate-limited, without content and without secrets.

Nobody waits for a line to be written: where whoever reads standard error has stopped, lines are
lost and counted, and the server goes on.

Only what a call names as a field gets in: `log.info("refused", extra={"fields": {...}})`. Field
names that could carry content or credentials are replaced, whatever they hold. Of an exception
that may quote a request, `extra={"hides_messages": True}` keeps the kind and the frames alone.
"""

import contextlib
import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import IO, Any

from opentelemetry import trace

REDACTED = "[redacted]"
_SENSITIVE_WORDS = frozenset(
    {
        "authorization",
        "content",
        "cookie",
        "credential",
        "credentials",
        "messages",
        "output",
        "password",
        "prompt",
        "secret",
        "text",
        "token",
    }
)
_MAX_VALUE_CHARACTERS = 2_000
_MAX_WAITING_LINES = 4_096
_MAX_CHAINED_ERRORS = 8
_FLUSH_SECONDS = 2.0


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, trace_id, span_id, fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        """Never fails: a value that is no JSON is written as text."""
        document: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _short(record.getMessage()),
        }
        document.update(_trace_ids(record))
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            document["fields"] = {
                str(name): REDACTED if _is_sensitive(str(name)) else _short(value)
                for name, value in fields.items()
            }
        if suppressed := getattr(record, "suppressed", 0):
            document["suppressed"] = suppressed
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            document["error"] = {
                "type": type(error).__name__,
                "stack": _short(record.exc_text or self.formatException(record.exc_info)),
            }
        return json.dumps(document, ensure_ascii=False, default=str)


class RateLimit(logging.Filter):
    """Lets a call site through `burst` times per `period_seconds`; the next line that passes says
    how many were left out. Critical records always pass."""

    def __init__(
        self,
        burst: int = 20,
        period_seconds: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._burst = burst
        self._period = period_seconds
        self._now = now
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, int], list[float]] = {}  # started at, passed, suppressed

    def filter(self, record: logging.LogRecord) -> bool:
        """Call sites are bounded by the code, so the table is."""
        if record.levelno >= logging.CRITICAL:
            return True
        site = (record.pathname, record.lineno)
        with self._lock:
            now = self._now()
            window = self._windows.setdefault(site, [now, 0, 0])
            if now - window[0] >= self._period:
                record.suppressed = int(window[2])
                window[:] = [now, 0, 0]
            if window[1] >= self._burst:
                window[2] += 1
                return False
            window[1] += 1
            return True


class _Handler(logging.Handler):
    """Writes to a given stream at once, or to whatever standard error is at the time, by a thread
    of its own: a pipe that nobody reads blocks who writes to it."""

    def __init__(self, stream: IO[str] | None, max_waiting: int = _MAX_WAITING_LINES) -> None:
        super().__init__()
        self._given = stream
        self._waiting: queue.Queue[str] = queue.Queue(max_waiting)
        self._num_lost = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.exc_info and getattr(record, "hides_messages", False):
                record.exc_text = _without_messages(record.exc_info[1])
            line = self.format(record)
            if self._given is not None:
                self._given.write(line + "\n")
                self._given.flush()
                return
        except Exception:
            self.handleError(record)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait for the lines before this, but for a dead reader not long."""
        patience_until = time.monotonic() + _FLUSH_SECONDS
        while self._waiting.unfinished_tasks and time.monotonic() < patience_until:
            time.sleep(0.005)

    def _write_all(self) -> None:
        while True:
            line = self._waiting.get()
            lost, self._num_lost = self._num_lost, 0
            if lost:
                line += "\n" + self.format(_lost_lines(lost))
            # Without standard error there is nobody to tell.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
            self._waiting.task_done()


def _lost_lines(count: int) -> logging.LogRecord:
    text = "%d lines of this log are lost: they were not read in time"
    return logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, (count,), None)


def configure_logging(
    level: str = "INFO",
    *,
    as_json: bool = True,
    stream: IO[str] | None = None,
    filters: Iterable[logging.Filter] = (),
) -> None:
    """Send the process's log to `stream` (default: standard error), as lines of JSON or of text.

    A second call replaces the first. `filters` see every record before it is written and may add
    a `trace_id`. Raises ValueError for an unknown level.
    """
    handler = _Handler(stream)
    handler.addFilter(RateLimit())
    for item in filters:
        handler.addFilter(item)
    if as_json:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [*(h for h in root.handlers if not isinstance(h, _Handler)), handler]


def _trace_ids(record: logging.LogRecord) -> dict[str, str]:
    """Those that the call gave (`extra={"trace_id": ...}`), else those of the current span."""
    given = getattr(record, "trace_id", None)
    if given:
        return {"trace_id": str(given)}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {
        "trace_id": format(context.trace_id, "032x"),
        "span_id": format(context.span_id, "016x"),
    }


def _without_messages(error: BaseException | None) -> str:
    """The kinds and the frames of an exception and of those that led to it, the first one first."""
    parts: list[str] = []
    while error is not None and len(parts) < _MAX_CHAINED_ERRORS:
        parts.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(reversed(parts))


def _is_sensitive(name: str) -> bool:
    words = set(name.lower().replace("-", "_").replace(".", "_").split("_"))
    return bool(words & _SENSITIVE_WORDS) and not words & {"num", "count"}


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_VALUE_CHARACTERS:
        return value[:_MAX_VALUE_CHARACTERS] + "..."
    return value
