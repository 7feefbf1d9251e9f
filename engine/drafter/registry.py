"""A folder of named heads: versions that never change, and a pointer to the one in use.

    ROOT/NAME/versions/0001/     a head's folder, copied in whole, and registration.json
    ROOT/NAME/pointer.json       {"current": "0002", "history": ["0001"], "reason": {...}}

A version appears by a rename and is never written again; the pointer is replaced by a rename, so
that whoever reads it gets the old version or the new one. The folder may be on a network disk
that several servers read; two programs that register at once get two versions.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.drafter.head.file_names import CARD, CONFIG, WEIGHTS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VERSION = re.compile(r"\d{4,}")
_COPIED = (CONFIG, WEIGHTS, CARD, "README.md")
_REGISTRATION = "registration.json"
_POINTER = "pointer.json"
_LOCK = ".lock"
_MAX_HISTORY = 100


class RegistryError(ValueError):
    """What cannot be registered, promoted or found; the message names it."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A version. fingerprint: of the configuration and the weights. registered_at: UTC."""

    name: str
    version: str
    fingerprint: str
    registered_at: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The version in use, and those before it, the latest last.

    reason: why it is in use, as whoever promoted it gave it. applied: promotions that must
    happen once only, and did.
    """

    current: str | None = None
    history: tuple[str, ...] = ()
    reason: Mapping[str, Any] = field(default_factory=dict)
    applied: tuple[str, ...] = ()


def head_fingerprint(folder: Path) -> str:
    """Sixteen hexadecimal digits of a head's configuration and weights. Raises OSError."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:16]


class HeadRegistry:
    """The registry of a folder. Every method raises RegistryError for what it refuses."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(p.parent.name for p in self.root.glob("*/versions") if p.is_dir())

    def versions(self, name: str) -> list[Registration]:
        """Oldest first."""
        folder = self._folder(name) / "versions"
        found = sorted(p.name for p in folder.glob("*") if _VERSION.fullmatch(p.name))
        return [self.registration(name, version) for version in found]

    def registration(self, name: str, version: str) -> Registration:
        path = self.folder_of(name, version) / _REGISTRATION
        try:
            return Registration(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RegistryError(f"{path}: {error}") from error

    def folder_of(self, name: str, version: str) -> Path:
        if not _VERSION.fullmatch(version):
            raise RegistryError(f"version: {version!r} is no version")
        path = self._folder(name) / "versions" / version
        if not path.is_dir():
            raise RegistryError(f"version: {name} has no version {version}")
        return path

    def pointer(self, name: str) -> Pointer:
        path = self._folder(name) / _POINTER
        if not path.exists():
            return Pointer()
        try:
            content = json.loads(path.read_text())
            return Pointer(
                content["current"],
                tuple(content["history"]),
                content["reason"],
                tuple(content.get("applied", ())),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RegistryError(f"{path}: {error}") from error

    def register(self, folder: Path, name: str, *, note: str = "") -> Registration:
        """Copy a head in as the next version; the same content again is the version it has."""
        for needed in (CONFIG, WEIGHTS):
            if not (folder / needed).is_file():
                raise RegistryError(f"{folder}: has no {needed}")
        versions = self._folder(name) / "versions"
        versions.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=versions))
        try:
            for file in _COPIED:
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, staged / file)
            fingerprint = head_fingerprint(staged)
            for known in self.versions(name):
                if known.fingerprint == fingerprint:
                    return known
            return self._publish(staged, name, fingerprint, note)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def promote(
        self,
        name: str,
        version: str,
        *,
        reason: Mapping[str, Any] | None = None,
        once: str | None = None,
    ) -> Pointer:
        """Point to a version whose files are still what was registered.

        once: names this promotion; of all programs that ask for it, now and later, one promotes,
        and the others find the pointer as it is then, a rollback included.
        """
        registered = self.registration(name, version)
        folder = self.folder_of(name, version)
        if head_fingerprint(folder) != registered.fingerprint:
            raise RegistryError(f"fingerprint: the files of {name}@{version} have changed")
        with self._locked(name):
            before = self.pointer(name)
            if once is not None and once in before.applied:
                return before
            applied = before.applied if once is None else (*before.applied, once)
            if before.current == version:
                same = replace(before, applied=applied)
                return before if same == before else self._point(name, same)
            history = (*before.history, before.current) if before.current else before.history
            return self._point(
                name, Pointer(version, history[-_MAX_HISTORY:], dict(reason or {}), applied)
            )

    def rollback(self, name: str) -> Pointer:
        """Point to the version that was in use before this one."""
        with self._locked(name):
            before = self.pointer(name)
            if not before.history:
                raise RegistryError(f"{name}: there is no earlier version to go back to")
            self.folder_of(name, before.history[-1])
            reason = {"rolled_back_from": before.current}
            return self._point(
                name,
                Pointer(before.history[-1], before.history[:-1], reason, before.applied),
            )

    def resolve(self, reference: str) -> Registration:
        """NAME is the version in use, NAME@VERSION that one."""
        name, has_version, version = reference.partition("@")
        if not has_version:
            current = self.pointer(name).current
            if current is None:
                raise RegistryError(f"{name}: no version is promoted; see `tandem drafter promote`")
            version = current
        return self.registration(name, version)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One program at a time changes the pointer of a name, on every machine."""
        try:
            handle = (self._folder(name) / _LOCK).open("a")
        except OSError as error:
            raise RegistryError(f"{name}: cannot be changed: {error.strerror}") from error
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _folder(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RegistryError(f"name: must be up to 64 letters, digits and _.-, got {name!r}")
        return self.root / name

    def _publish(self, staged: Path, name: str, fingerprint: str, note: str) -> Registration:
        while True:
            taken = [int(known.version) for known in self.versions(name)]
            version = f"{max(taken, default=0) + 1:04d}"
            found = Registration(
                name=name,
                version=version,
                fingerprint=fingerprint,
                registered_at=datetime.now(UTC).isoformat(timespec="seconds"),
                note=note,
            )
            (staged / _REGISTRATION).write_text(json.dumps(asdict(found), indent=2) + "\n")
            staged.chmod(0o755)
            _sync(staged)
            try:
                staged.rename(self._folder(name) / "versions" / version)
            except OSError:
                if not (self._folder(name) / "versions" / version).is_dir():
                    raise
                continue  # another program took the number
            return found

    def _point(self, name: str, pointer: Pointer) -> Pointer:
        path = self._folder(name) / _POINTER
        descriptor, staged = tempfile.mkstemp(prefix=".pointer-", dir=path.parent)
        with os.fdopen(descriptor, "w") as handle:
            json.dump(asdict(pointer), handle)
            handle.flush()
            os.fsync(handle.fileno())
        Path(staged).chmod(0o644)
        Path(staged).replace(path)
        return pointer


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
