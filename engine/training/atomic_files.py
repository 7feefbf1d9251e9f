"""Files that are there whole or not at all: written beside their place, synced, renamed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content; a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that appears complete; replaces an older one of the same name.

    fill writes the content into the folder that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    fill(temporary)
    for file in sorted(temporary.rglob("*")):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    if path.exists():
        old = path.with_name(f".old-{path.name}")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old)
    else:
        temporary.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
