"""An export as DuckDB sees it: one view per table, over the files that the manifest lists.

DuckDB reads the same files from a folder or, with its httpfs extension, from a bucket; it is
how a person, the HTML report and the tests ask questions of an export.
"""

from pathlib import Path
from typing import Any

from exports.errors import TargetError
from exports.manifest import read_manifest
from exports.schemas import TABLES
from exports.storage import Target


def open_export(folder: Path) -> Any:
    """A DuckDB connection with a view per table; times are shown in UTC.

    Raises TargetError when there is no export in the folder.
    """
    import duckdb

    manifest = read_manifest(Target(folder))
    if not manifest.generation:
        raise TargetError(f"{folder} holds no export")
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for name, table in TABLES.items():
        paths = [str(folder / file.path) for file in manifest.tables.get(name, ())]
        if paths:
            relation = connection.read_parquet(paths, hive_partitioning=False, union_by_name=True)
            # Files from before a column was added lack it.
            whole = connection.from_arrow(table.schema.empty_table())
            missing = [
                f"CAST(NULL AS {kind}) AS {column}"
                for column, kind in zip(whole.columns, whole.dtypes, strict=True)
                if column not in relation.columns
            ]
            relation = relation.project(", ".join(["*", *missing]))
        else:
            relation = connection.from_arrow(table.schema.empty_table())
        relation.create_view(name)
    return connection
