"""A second form of the export: one Delta table per table, for Fabric and other lakehouses.

It is made from the published files, so it holds what they hold. Every table changes by one
commit per generation, which names it; running again after a failure continues where the tables
are, whatever that run has to export itself. Readers see each
table whole, but for a moment two tables of different generations.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from exports.columns import Table, TableKind, with_added_columns
from exports.data_file import DataFile
from exports.dimensions import date_key
from exports.errors import TargetError
from exports.manifest import Manifest
from exports.schemas import TABLES
from exports.storage import Target
from exports.write import ROW_GROUP_ROWS

GENERATION = "tandem.generation"


def publish_delta(target: Target, manifest: Manifest, root: str) -> int:
    """Bring the Delta tables under `root` to the manifest's generation; returns the commits.

    A table that is exactly one generation behind gets the dates that changed since, any other is
    written whole. Needs the extra `delta`. Raises
    TargetError when a table cannot be written; the tables written before it keep their commit.
    """
    from deltalake.exceptions import DeltaError

    num_commits = 0
    for table in TABLES.values():
        location = f"{root.rstrip('/')}/{table.name}"
        try:
            found = _generation(location)
            if found == manifest.generation:
                continue
            is_fact = table.kind is TableKind.FACT
            days = manifest.changed_since(found) if is_fact else None
            _write(target, manifest, table, location, days)
            num_commits += 1
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise TargetError(f"cannot write the Delta table {location}: {error}") from error
    return num_commits


def _generation(location: str) -> int | None:
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(location):
        return None
    [latest] = DeltaTable(location).history(1)
    recorded = latest.get(GENERATION)
    return None if recorded is None else int(recorded)


def _write(
    target: Target, manifest: Manifest, table: Table, location: str, days: Sequence[date] | None
) -> None:
    from deltalake import CommitProperties, write_deltalake

    files = manifest.tables.get(table.name, ())
    keys = None if days is None else [date_key(day) for day in days]
    schema = table.schema.remove_metadata()
    rows = pa.RecordBatchReader.from_batches(schema, _batches(target, files, schema, keys))
    # No date at all still makes a commit: the table then says that it is of this generation.
    wanted = ", ".join(str(key) for key in keys or [-1])
    write_deltalake(
        location,
        rows,
        mode="overwrite",
        schema_mode="merge",  # a table from before a column was added gets it
        predicate=None if keys is None else f"date_key IN ({wanted})",
        commit_properties=CommitProperties(custom_metadata={GENERATION: str(manifest.generation)}),
    )


def _batches(
    target: Target, files: Iterable[DataFile], schema: pa.Schema, keys: list[int] | None
) -> Iterator[pa.RecordBatch]:
    for file in files:
        if keys is not None and not {date_key(day) for day in file.days} & set(keys):
            continue
        with target.open(file.path) as source, parquet.ParquetFile(source) as opened:
            for batch in opened.iter_batches(ROW_GROUP_ROWS):
                rows = pa.Table.from_batches([batch])
                if keys is not None:
                    is_wanted = pc.is_in(rows["date_key"], pa.array(keys, pa.int64()))
                    rows = rows.filter(is_wanted)
                yield from with_added_columns(rows, schema).to_batches()
