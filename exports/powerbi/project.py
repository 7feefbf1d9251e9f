"""The Power BI project, whole: Tandem.pbip, its semantic model and its report.

`python -m exports.powerbi.project` writes the copy that is kept in this folder; a test fails
while it is not current.
"""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exports.errors import TargetError
from exports.powerbi.pbir import report_files
from exports.powerbi.queries import Source
from exports.powerbi.tmdl import model_files

NAME = "Tandem"
DEFAULT_ROOT = r"C:\data\tandem-export"
_FABRIC = "https://developer.microsoft.com/json-schemas/fabric"
_LOGICAL_IDS = {
    "Report": "9c1f0f6e-7a43-4a0e-8d6b-2f7a2b1c5d01",
    "SemanticModel": "9c1f0f6e-7a43-4a0e-8d6b-2f7a2b1c5d02",
}


def project_files(root: str = DEFAULT_ROOT, source: Source = Source.FOLDER) -> dict[str, str]:
    """Path -> content of every file of a project that reads the export at `root`."""
    files = {
        f"{NAME}.pbip": _json(
            {
                "$schema": f"{_FABRIC}/pbip/pbipProperties/1.0.0/schema.json",
                "version": "1.0",
                "artifacts": [{"report": {"path": f"{NAME}.Report"}}],
                "settings": {"enableAutoRecovery": True},
            }
        ),
        f"{NAME}.SemanticModel/definition.pbism": _json(
            {
                "$schema": f"{_FABRIC}/item/semanticModel/definitionProperties/1.0.0/schema.json",
                "version": "4.2",
                "settings": {},
            }
        ),
    }
    for kind, logical_id in _LOGICAL_IDS.items():
        files[f"{NAME}.{kind}/.platform"] = _json(
            {
                "$schema": f"{_FABRIC}/gitIntegration/platformProperties/2.0.0/schema.json",
                "metadata": {"type": kind, "displayName": NAME},
                "config": {"version": "2.0", "logicalId": logical_id},
            }
        )
    for path, content in model_files(root, source).items():
        files[f"{NAME}.SemanticModel/definition/{path}"] = content
    for path, content in report_files().items():
        files[f"{NAME}.Report/{path}"] = content
    return files


def write_project(folder: Path, root: str, source: Source = Source.FOLDER) -> Path:
    """Write a project into a folder that has none; returns the .pbip file.

    Raises TargetError when there is one already, for it may hold a person's work, and for a
    PostgreSQL address that names no server or database or that holds a password.
    """
    if source is Source.POSTGRESQL:
        _check_address(root)
    pbip = folder / f"{NAME}.pbip"
    if pbip.exists():
        raise TargetError(f"{pbip} exists already")
    try:
        _write(folder, project_files(root, source))
    except OSError as error:
        raise TargetError(f"cannot write {folder}: {error}") from error
    return pbip


def default_source(root: str) -> Source:
    """ADLS for an https address, PostgreSQL for its own, a folder for anything else."""
    if root.startswith("postgresql://"):
        return Source.POSTGRESQL
    return Source.ADLS if root.startswith("https://") else Source.FOLDER


def _check_address(root: str) -> None:
    address = urlsplit(root)
    if address.scheme != "postgresql" or not address.hostname or len(address.path) < 2:
        raise TargetError(f"root: want postgresql://HOST:PORT/DATABASE, got {root!r}")
    if address.username or address.password:
        raise TargetError("root: no user or password here; Power BI asks for them and keeps them")


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", newline="\n")


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


if __name__ == "__main__":
    here = Path(__file__).parent
    for part in ("Report", "SemanticModel"):
        shutil.rmtree(here / f"{NAME}.{part}", ignore_errors=True)
    _write(here, project_files())
