"""Removing files that no reader needs any more."""

from dataclasses import replace
from datetime import datetime, timedelta

from exports.data_file import DataFile
from exports.manifest import Manifest, RetiredFile, write_manifest
from exports.storage import Target


def retire(before: Manifest, tables: dict[str, tuple[DataFile, ...]], now: datetime) -> Manifest:
    """The manifest with new tables, and the files that they no longer use as retired."""
    after = replace(before, tables=tables)
    used = after.paths()
    retired = [file for file in before.retired if file.path not in used]
    known = {file.path for file in retired}
    retired += [RetiredFile(path, now) for path in before.paths() - used if path not in known]
    return replace(after, retired=tuple(sorted(retired, key=lambda file: file.path)))


def collect_garbage(
    target: Target, manifest: Manifest, now: datetime, grace: timedelta
) -> tuple[Manifest, int]:
    """Delete what has been out of use for `grace`; returns the manifest and the number deleted.

    That is: retired files, and files of runs that were killed before they published.
    """
    expired = {f.path for f in manifest.retired if now - f.retired_at >= grace}
    waiting = {f.path for f in manifest.retired} - expired
    used = manifest.paths()
    abandoned = {
        file.name
        for file in target.files()
        if file.name not in used
        and file.name not in waiting
        and (file.name in expired or now - file.modified_at >= grace)
    }
    for name in sorted(abandoned):
        target.delete(name)
    if expired:
        kept = tuple(f for f in manifest.retired if f.path not in expired)
        manifest = replace(manifest, retired=kept)
        write_manifest(target, manifest)
    return manifest, len(abandoned)
