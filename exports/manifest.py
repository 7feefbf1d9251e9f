"""The manifest: which files are the tables now. Replacing it is the moment of publication.

A reader reads `manifest.json` and the files it lists, and nothing else at the target; so it
sees one complete version of all tables, whatever an export is doing meanwhile.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from exports.columns import (
    SCHEMA_VERSION,
)
from exports.data_file import DataFile
from exports.errors import TargetError
from exports.ledger_facts import Watermark
from exports.schemas import (
    TABLES,
)
from exports.storage import Target

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class RetiredFile:
    """A file that the tables no longer use, kept for readers that began before."""

    path: str
    retired_at: datetime


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published version. `generation` counts them from 1; 0 is nothing published yet.

    `recorded_until` is the instant up to which the ledger's rows are covered. `changed_dates`
    are those whose rows this generation wrote anew, for what is made from the tables and may be
    a generation behind; None where an older version published it and did not say.
    """

    generation: int = 0
    published_at: datetime | None = None
    recorded_until: datetime | None = None
    watermark: Watermark = field(default_factory=Watermark)
    tables: dict[str, tuple[DataFile, ...]] = field(default_factory=dict)
    retired: tuple[RetiredFile, ...] = ()
    changed_dates: tuple[date, ...] | None = None

    def day_rows(self, table: str) -> dict[date, int]:
        """Rows of a fact table by date."""
        by_day: dict[date, int] = {}
        for file in self.tables.get(table, ()):
            for day, num_rows in file.day_rows:
                by_day[day] = by_day.get(day, 0) + num_rows
        return by_day

    def num_rows(self, table: str) -> int:
        """Rows of a table; 0 for one that has no file."""
        return sum(file.num_rows for file in self.tables.get(table, ()))

    def dates(self, *tables: str) -> set[date]:
        """The dates that these fact tables have rows of."""
        return {day for table in tables for day in self.day_rows(table)}

    def changed_since(self, generation: int | None) -> tuple[date, ...] | None:
        """The dates that differ from an earlier generation; None when that is not known."""
        if generation == self.generation:
            return ()
        return self.changed_dates if generation == self.generation - 1 else None

    def paths(self) -> set[str]:
        """All files that the tables use."""
        return {file.path for files in self.tables.values() for file in files}


def read_manifest(target: Target) -> Manifest:
    """The published version; generation 0 when nothing is published.

    Raises TargetError for a manifest of another schema version or one that is not ours.
    """
    content = target.read(MANIFEST_NAME)
    return Manifest() if content is None else decode_manifest(content)


def write_manifest(target: Target, manifest: Manifest) -> None:
    """Publish. Readers see the previous version until this returns."""
    target.replace(MANIFEST_NAME, encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """The document that readers parse: tables -> files with rows, bytes, hash and dates."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "generation": manifest.generation,
        "published_at": _text(manifest.published_at),
        "recorded_until": _text(manifest.recorded_until),
        "watermark": asdict(manifest.watermark),
        "changed_dates": _texts(manifest.changed_dates),
        "tables": {
            name: {
                "rows": manifest.num_rows(name),
                "files": [
                    {
                        "path": file.path,
                        "rows": file.num_rows,
                        "bytes": file.num_bytes,
                        "sha256": file.sha256,
                        "min_date": _text(min(file.days, default=None)),
                        "max_date": _text(max(file.days, default=None)),
                        "date_rows": {day.isoformat(): rows for day, rows in file.day_rows},
                    }
                    for file in sorted(manifest.tables.get(name, ()), key=lambda f: f.path)
                ],
            }
            for name in TABLES
        },
        "retired": [
            {"path": file.path, "retired_at": _text(file.retired_at)}
            for file in sorted(manifest.retired, key=lambda f: f.path)
        ],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def decode_manifest(content: bytes) -> Manifest:
    """The inverse of encode_manifest. Raises TargetError for anything else."""
    try:
        document = json.loads(content)
        found = document["schema_version"]
        if found != SCHEMA_VERSION:
            raise TargetError(
                f"the target holds schema version {found}, this version writes "
                f"{SCHEMA_VERSION}: export into an empty folder"
            )
        return Manifest(
            generation=document["generation"],
            published_at=_instant(document["published_at"]),
            recorded_until=_instant(document["recorded_until"]),
            watermark=Watermark(**document["watermark"]),
            tables={
                name: tuple(_data_file(file) for file in table["files"])
                for name, table in document["tables"].items()
            },
            retired=tuple(
                RetiredFile(file["path"], datetime.fromisoformat(file["retired_at"]))
                for file in document["retired"]
            ),
            changed_dates=_dates(document.get("changed_dates")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{MANIFEST_NAME} cannot be understood: {error!r}") from error


def _data_file(file: dict[str, Any]) -> DataFile:
    return DataFile(
        path=file["path"],
        num_rows=file["rows"],
        num_bytes=file["bytes"],
        sha256=file["sha256"],
        day_rows=tuple((date.fromisoformat(day), rows) for day, rows in file["date_rows"].items()),
    )


def _text(value: date | datetime | None) -> str | None:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    return None if value is None else value.isoformat()


def _texts(days: tuple[date, ...] | None) -> list[str] | None:
    return None if days is None else [day.isoformat() for day in days]


def _dates(texts: list[str] | None) -> tuple[date, ...] | None:
    return None if texts is None else tuple(date.fromisoformat(text) for text in texts)


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
