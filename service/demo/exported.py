"""Reads the exported tables as any consumer would: the manifest, and the files it lists."""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow
from pyarrow import parquet


def read_exported(folder: Path) -> Mapping[str, pyarrow.Table]:
    """Every exported table that has rows, by name.

    Raises OSError or ValueError when there is no export, or not one that can be read.
    """
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    tables = {}
    for name, entry in manifest["tables"].items():
        # One file at a time: its folder's name is no column of the table.
        parts = [parquet.ParquetFile(folder / file["path"]).read() for file in entry["files"]]
        if sum(part.num_rows for part in parts):
            tables[name] = pyarrow.concat_tables(parts)
    return tables
