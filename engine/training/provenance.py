"""What a stage was made by, written beside what it made."""

import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.training import atomic_files

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def provenance(**fields: Any) -> dict[str, Any]:
    """Command, versions, commit, machine and whatever else decided the result."""
    return {
        "command": " ".join(sys.argv),
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "num_threads": torch.get_num_threads(),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **fields,
    }


def write_provenance(folder: Path, **fields: Any) -> None:
    atomic_files.write_json(folder / "provenance.json", provenance(**fields))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 - the user's own git
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
