"""Parquet files: the same rows always make the same bytes, whatever batches they came in."""

import hashlib
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from exports.columns import Table, TableKind
from exports.data_file import DataFile, StagedFile
from exports.dimensions import date_of
from exports.errors import TargetError

ROW_GROUP_ROWS = 131_072
MAX_FILE_ROWS = 32 * ROW_GROUP_ROWS
COMPRESSION = "snappy"  # every Microsoft reader takes it; zstd would save a quarter
_HASH_BYTES = 1024 * 1024


class TableWriter:
    """Writes a part of a table as local, staged files, each checked by reading it back.

    `folder` is the part's folder below the table's, "" for a whole dimension. The name that a
    file is to get at the target is new for new content: it holds the content's hash.
    """

    def __init__(
        self, staging: Path, table: Table, folder: str, summed: tuple[str, ...] = ()
    ) -> None:
        self._staging = staging
        self._table = table
        self._folder = folder
        self._is_fact = table.kind is TableKind.FACT
        self._schema = table.schema
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._writer: parquet.ParquetWriter | None = None
        self._num_file_rows = 0
        self._key_rows: dict[int, int] = {}
        self._files: list[StagedFile] = []
        self.sums = dict.fromkeys(summed, 0)
        """Sums of the `summed` columns, read back from the written files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, rows: pa.Table) -> None:
        """Append rows that have the table's schema."""
        self._waiting.append(rows)
        self._num_waiting += rows.num_rows
        while self._num_waiting >= ROW_GROUP_ROWS:
            waiting = pa.concat_tables(self._waiting)
            self._write(waiting.slice(0, ROW_GROUP_ROWS))
            self._waiting = [waiting.slice(ROW_GROUP_ROWS)]
            self._num_waiting -= ROW_GROUP_ROWS

    def finish(self) -> list[StagedFile]:
        """Write what is left. A fact without rows has no file; a dimension always has one."""
        if self._num_waiting or not (self._is_fact or self._files):
            self._write(pa.concat_tables([self._schema.empty_table(), *self._waiting]))
            self._waiting, self._num_waiting = [], 0
        self._close_file()
        return self._files

    def _write(self, rows: pa.Table) -> None:
        try:
            if self._writer is None:
                self._writer = parquet.ParquetWriter(
                    self._staged,
                    self._schema,
                    compression=COMPRESSION,
                    use_dictionary=_dictionary_columns(self._schema),
                    write_statistics=True,
                )
            self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot write {self._table.name}: {error}") from error
        self._num_file_rows += rows.num_rows
        if self._is_fact:
            for entry in rows.column("date_key").value_counts().to_pylist():
                key = entry["values"]
                self._key_rows[key] = self._key_rows.get(key, 0) + entry["counts"]
        if self._num_file_rows >= MAX_FILE_ROWS:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
            digest = _sha256(self._staged)
            num_bytes = self._staged.stat().st_size
            num_rows = self._read_back()
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot write {self._table.name}: {error}") from error
        if num_rows != self._num_file_rows:
            raise TargetError(
                f"{self._staged.name} holds {num_rows} rows, {self._num_file_rows} were written"
            )
        days = tuple((date_of(key), rows) for key, rows in sorted(self._key_rows.items()))
        file = DataFile(self._file_name(digest), num_rows, num_bytes, digest, days)
        self._files.append(StagedFile(self._staged, file))
        self._writer, self._num_file_rows, self._key_rows = None, 0, {}

    @property
    def _staged(self) -> Path:
        part = f"{self._folder or 'all'}-{len(self._files):04}"
        return self._staging / f"{self._table.name}-{part}.parquet"

    def _read_back(self) -> int:
        with parquet.ParquetFile(self._staged) as written:
            for batch in written.iter_batches(ROW_GROUP_ROWS, columns=list(self.sums)):
                for name in self.sums:
                    self.sums[name] += pc.sum(batch.column(name)).as_py() or 0
            num_rows: int = written.metadata.num_rows
            return num_rows

    def _file_name(self, digest: str) -> str:
        folder = "/".join(filter(None, [self._table.name, self._folder]))
        return f"{folder}/part-{len(self._files):04}-{digest[:16]}.parquet"


def day_folder(day: date) -> str:
    """Folder of a date.

    `dt=`, not `date_key=`: readers that turn folder names into columns would find the same
    column twice, with two types.
    """
    return f"dt={day}"


def month_folder(day: date) -> str:
    """Folder of a date's month, for files that hold several dates."""
    return f"month={day.year:04}-{day.month:02}"


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    distinct = ("request_id", "trace_id")
    return [
        field.name
        for field in schema
        if field.name.endswith("_key") or (field.type == pa.string() and field.name not in distinct)
    ]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
