"""Where tables are published: a local folder or an object store, behind four operations.

Object stores have no rename, so nothing here needs one: a data file gets a new name each time
and the manifest is replaced by one write, which the stores make atomic.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from exports.data_file import DataFile, StagedFile
from exports.errors import TargetError

_COPY_BYTES = 8 * 1024 * 1024
STAGING = ".staging"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file at the target; `name` is relative to its root, with forward slashes."""

    name: str
    num_bytes: int
    modified_at: datetime


class Target:
    """A place to publish to. Every operation raises TargetError when the place fails.

    `location` is a folder, or the URI of an object store that pyarrow knows (s3://, gs://,
    abfss://) or that fsspec knows (az://, memory://, ...).
    """

    def __init__(self, location: str | Path) -> None:
        self.location = str(location)
        try:
            self._filesystem, root = _open(self.location)
        except (OSError, ValueError, ImportError, pa.ArrowException) as error:
            raise TargetError(f"cannot open {self.location}: {error}") from error
        self._root = root.rstrip("/")
        self.is_local = isinstance(self._filesystem, fs.LocalFileSystem)
        if self.is_local:
            try:
                Path(self._root).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TargetError(f"cannot write to {self.location}: {error}") from error

    @property
    def local_root(self) -> Path | None:
        """The folder, when the target is one."""
        return Path(self._root) if self.is_local else None

    def staging_folder(self) -> Path:
        """A new local folder for files in the making; what a killed run left there is removed.

        Beside a local target, so that a finished file is moved and not copied.
        """
        try:
            if self.is_local:
                parent = Path(self._root) / STAGING
                shutil.rmtree(parent, ignore_errors=True)
                parent.mkdir(exist_ok=True)
                return Path(tempfile.mkdtemp(dir=parent))
            return Path(tempfile.mkdtemp(prefix="tandem-export-"))
        except OSError as error:
            raise TargetError(f"cannot stage files: {error}") from error

    def put(self, staged: Path, name: str) -> None:
        """Move a staged file to its final, new name, durably. The staged file is gone after it."""
        try:
            if self.is_local:
                final = Path(self._root) / name
                final.parent.mkdir(parents=True, exist_ok=True)
                _sync_file(staged)
                os.replace(staged, final)
                _sync_folder(final.parent)
                return
            with (
                staged.open("rb") as source,
                self._filesystem.open_output_stream(self._path(name)) as sink,
            ):
                while chunk := source.read(_COPY_BYTES):
                    sink.write(chunk)
            staged.unlink()
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot write {name}: {error}") from error

    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file: a reader sees the old or the new content, never a mixture."""
        try:
            if self.is_local:
                final = Path(self._root) / name
                staged = final.with_name(f".{name}.new")
                staged.write_bytes(content)
                _sync_file(staged)
                os.replace(staged, final)
                _sync_folder(final.parent)
                return
            with self._filesystem.open_output_stream(self._path(name)) as sink:
                sink.write(content)
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot write {name}: {error}") from error

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None when there is none."""
        path = self._path(name)
        try:
            if self._filesystem.get_file_info(path).type == fs.FileType.NotFound:
                return None
            with self._filesystem.open_input_stream(path) as source:
                content: bytes = source.read()
                return content
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot read {name}: {error}") from error

    def open(self, name: str) -> pa.NativeFile:
        """A data file for reading at any place."""
        try:
            return self._filesystem.open_input_file(self._path(name))
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot read {name}: {error}") from error

    def files(self) -> Iterator[StoredFile]:
        """Every data file at the target, in no order."""
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        try:
            for info in self._filesystem.get_file_info(selector):
                name = info.path.removeprefix(self._root).lstrip("/")
                if info.type == fs.FileType.File and name.endswith(".parquet"):
                    modified_at = info.mtime or datetime.now(UTC)
                    yield StoredFile(name, info.size, modified_at.astimezone(UTC))
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot list {self.location}: {error}") from error

    def delete(self, name: str) -> None:
        """Remove a data file; one that is gone already is no error."""
        try:
            self._filesystem.delete_file(self._path(name))
        except FileNotFoundError:
            return
        except (OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot delete {name}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def place(target: Target, files: Iterable[StagedFile]) -> list[DataFile]:
    """Put staged files in their places. No reader looks there until a manifest says so."""
    placed = []
    for entry in files:
        target.put(entry.staged, entry.file.path)
        placed.append(entry.file)
    return placed


def _open(location: str) -> tuple[fs.FileSystem, str]:
    if "://" not in location:
        return fs.LocalFileSystem(), str(Path(location).resolve())
    try:
        filesystem, root = fs.FileSystem.from_uri(location)
        return filesystem, str(root)
    except (pa.ArrowInvalid, NotImplementedError):
        import fsspec  # only for places that pyarrow does not know

        filesystem, root = fsspec.core.url_to_fs(location)
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), str(root)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    _sync_file(path)
