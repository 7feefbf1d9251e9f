"""Compaction: the dates of a closed month share a file, so that readers open few.

A month is closed once there are rows a week after its end; that depends on the rows alone, so
the same ledger still makes the same files. A late row splits its month again, which is merged
anew at the end of the same run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from exports.columns import Table, with_added_columns
from exports.data_file import DataFile
from exports.dimensions import date_key
from exports.errors import TargetError
from exports.storage import Target, place
from exports.write import ROW_GROUP_ROWS, TableWriter, day_folder, month_folder

CLOSED_AFTER = timedelta(days=7)
MAX_MERGED_BYTES = 256 * 1024 * 1024
"""A month whose files are larger together keeps its daily ones: they are large enough."""

Files = tuple[DataFile, ...]


@dataclass(frozen=True, slots=True)
class Compactor:
    """Splits and merges published files by writing new ones; the old ones stay as they are."""

    target: Target
    staging: Path

    def split(self, table: Table, files: Files, days: Iterable[date]) -> Files:
        """The files, where those that hold one of the days and others are one per date."""
        wanted = set(days)
        result: list[DataFile] = []
        for file in files:
            if len(file.days) < 2 or wanted.isdisjoint(file.days):
                result.append(file)
                continue
            for day in file.days:
                with TableWriter(self.staging, table, day_folder(day)) as writer:
                    for rows in self._rows(table, file):
                        is_of_day = pc.equal(rows.column("date_key"), date_key(day))
                        writer.add(rows.filter(is_of_day))
                    result.extend(place(self.target, writer.finish()))
        return _ordered(result)

    def merged(self, table: Table, files: Files, last: date) -> Files:
        """The files, where closed months are merged; `last` is the last date of any fact.

        Raises TargetError when rows get lost.
        """
        by_month: dict[str, list[DataFile]] = {}
        for file in files:
            by_month.setdefault(month_folder(file.days[0]), []).append(file)
        result: list[DataFile] = []
        for folder, parts in by_month.items():
            is_closed = _end_of_month(parts[0].days[0]) + CLOSED_AFTER <= last
            is_small = sum(part.num_bytes for part in parts) <= MAX_MERGED_BYTES
            if not (is_closed and is_small and len(parts) > 1):
                result.extend(parts)
                continue
            with TableWriter(self.staging, table, folder) as writer:
                for part in sorted(parts, key=lambda file: (file.days, file.path)):
                    for rows in self._rows(table, part):
                        writer.add(rows)
                merged = place(self.target, writer.finish())
            if sum(f.num_rows for f in merged) != sum(part.num_rows for part in parts):
                raise TargetError(f"{table.name}/{folder}: rows were lost while merging")
            result.extend(merged)
        return _ordered(result)

    def _rows(self, table: Table, file: DataFile) -> Iterable[pa.Table]:
        with self.target.open(file.path) as source, parquet.ParquetFile(source) as opened:
            for batch in opened.iter_batches(ROW_GROUP_ROWS):
                yield with_added_columns(pa.Table.from_batches([batch]), table.schema)


def _end_of_month(day: date) -> date:
    following = day.replace(day=28) + timedelta(days=4)
    return following.replace(day=1)


def _ordered(files: Iterable[DataFile]) -> Files:
    return tuple(sorted(files, key=lambda file: file.path))
