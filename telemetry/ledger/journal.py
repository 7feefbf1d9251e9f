"""The local journal: where ledger records wait, on disk, while the database is away.

A folder with one lock, the node's id and numbered segments. A segment is a text file with one
record a line, each behind its CRC-32:

    9a3c01f2 {"kind":"request",...}

A line without a valid checksum at the end of the last segment is a write that a crash cut
short: its record was never acknowledged, so it is dropped. Anywhere else it is damage, and the
line is set aside in a file of its own, never silently skipped.
"""

import fcntl
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from telemetry.ledger.records import Record, decode_record, encode_record

_SEGMENT_BYTES = 16 * 1024 * 1024
_MAX_LINE_BYTES = 1024 * 1024


class JournalError(RuntimeError):
    """The journal cannot be used; the message says why and what to do."""


class JournalLockedError(JournalError):
    """A server that runs holds the folder."""


class JournalFullError(JournalError):
    """Appending would go beyond the size cap."""


@dataclass(frozen=True, slots=True)
class SegmentContent:
    """What a segment holds: its records, and the lines that cannot be read."""

    records: tuple[Record, ...]
    damaged_lines: tuple[bytes, ...]
    torn_tail_bytes: int


class Journal:
    """Exclusive owner of a journal folder. One thread at a time.

    Raises JournalLockedError when another process holds the folder: two servers never share one.
    """

    def __init__(self, folder: Path, *, max_bytes: int = 1 << 30) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise JournalLockedError(
                f"the ledger journal {folder} belongs to a server that runs; "
                "give each server a folder of its own"
            ) from error
        self.node = self._read_or_make_node()
        self._active: int | None = None  # descriptor of the segment being written
        self._active_path: Path | None = None
        self._active_bytes = 0
        self._total_bytes = sum(path.stat().st_size for path in self.segments())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_bytes(self) -> int:
        """Bytes in all segments."""
        return self._total_bytes

    @property
    def is_nearly_full(self) -> bool:
        """Whether four fifths of the cap are used."""
        return self._total_bytes > 0.8 * self._max_bytes

    @property
    def is_empty(self) -> bool:
        """Whether every record has been replayed."""
        return not self.segments()

    def segments(self) -> list[Path]:
        """The segments, oldest first."""
        return sorted(self._folder.glob("segment-*.journal"))

    def append(self, records: Sequence[Record]) -> None:
        """Write records and return once they are on the disk (fsync).

        All or nothing: after JournalFullError or OSError none of them counts as written.
        """
        data = b"".join(_line(encode_record(record)) for record in records)
        if self._total_bytes + len(data) > self._max_bytes:
            raise JournalFullError(
                f"the ledger journal {self._folder} has {self._total_bytes} bytes, its cap is "
                f"{self._max_bytes}: bring the database back or raise the cap"
            )
        if self._active is None or self._active_bytes >= _SEGMENT_BYTES:
            self._open_segment()
        self._write_all(data)
        self._active_bytes += len(data)
        self._total_bytes += len(data)

    def rotate(self) -> None:
        """End the segment being written; later records go to a new one."""
        if self._active is not None:
            os.close(self._active)
        self._active = self._active_path = None
        self._active_bytes = 0

    def read(self, segment: Path) -> SegmentContent:
        """The records of a segment, in the order in which they were appended."""
        records: list[Record] = []
        damaged: list[bytes] = []
        torn = 0
        for line, is_last in _lines(segment):
            record = _decoded(line)
            if record is not None:
                records.append(record)
            elif is_last and not line.endswith(b"\n"):
                torn = len(line)
            else:
                damaged.append(line)
        return SegmentContent(tuple(records), tuple(damaged), torn)

    def remove(self, segment: Path) -> None:
        """Forget a segment whose records are all in the database."""
        if segment == self._active_path:
            self.rotate()
        size = segment.stat().st_size
        segment.unlink()
        self._total_bytes -= size
        self._sync_folder()

    def set_aside(self, lines: Sequence[bytes], reason: str) -> Path:
        """Keep lines that cannot go to the database in a file of their own; its path."""
        path = self._folder / f"aside-{reason}-{uuid4().hex[:12]}.txt"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._sync_folder()
        return path

    def close(self) -> None:
        """Give the folder up for another process."""
        self.rotate()
        self._lock.close()

    def _open_segment(self) -> None:
        self.rotate()
        existing = self.segments()
        number = int(existing[-1].stem.partition("-")[2]) + 1 if existing else 1
        self._active_path = self._folder / f"segment-{number:010d}.journal"
        self._active = os.open(
            self._active_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600
        )
        self._sync_folder()

    def _write_all(self, data: bytes) -> None:
        descriptor = self._active
        if descriptor is None:
            raise JournalError("no segment is open")
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            # A half-written batch would run into the next one; cut it off and start afresh.
            try:
                os.ftruncate(descriptor, self._active_bytes)
            finally:
                self.rotate()
            raise

    def _read_or_make_node(self) -> str:
        path = self._folder / "node"
        if path.exists() and (found := path.read_text().strip()):
            return found
        node = uuid4().hex
        staged = self._folder / "node.tmp"
        staged.write_text(node + "\n")
        staged.replace(path)
        return node

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _line(payload: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def _decoded(line: bytes) -> Record | None:
    checksum, space, payload = line.rstrip(b"\n").partition(b" ")
    if not space or len(checksum) != 8 or not line.endswith(b"\n"):
        return None
    try:
        if int(checksum, 16) != zlib.crc32(payload):
            return None
        return decode_record(payload)
    except ValueError:
        return None


def _lines(segment: Path) -> Iterator[tuple[bytes, bool]]:
    size = segment.stat().st_size
    position = 0
    with segment.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            position += len(line)
            yield line, position == size
