"""What the export and a process that writes its dates tell each other."""

from dataclasses import dataclass
from pathlib import Path

from exports.days import WrittenDay
from exports.errors import ExportError
from exports.row_stream import Database


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to a worker; DayTasks follow. It may hold a password."""

    database: Database
    staging: Path
    superseded_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowsDone:
    """So many further request rows of the date in the making."""

    num_rows: int


Reply = RowsDone | WrittenDay | ExportError
"""Of a worker: any number of RowsDone and then the date; or an error, after which it ends."""
