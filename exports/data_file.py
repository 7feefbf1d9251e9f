"""A file of a table: as published, and as it waits for its place."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DataFile:
    """A published file. `path` is relative to the root.

    `day_rows` holds the UTC dates of its rows with their number; it is empty for a dimension.
    """

    path: str
    num_rows: int
    num_bytes: int
    sha256: str
    day_rows: tuple[tuple[date, int], ...] = ()

    @property
    def days(self) -> tuple[date, ...]:
        """The dates of its rows, in order."""
        return tuple(day for day, _ in self.day_rows)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A finished local file at `staged` that is to become `file` at the target."""

    staged: Path
    file: DataFile
