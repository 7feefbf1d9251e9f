"""Captured features on disk: shards of safetensors, a manifest, a budget in bytes.

Shards appear whole, in the order of the conversations, and are never made twice. When the
budget is spent the cache is complete as it is: training goes over what fits.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from engine.training import atomic_files
from engine.training.capture import Features
from engine.training.errors import TrainingError

_MANIFEST = "manifest.json"
_SHARD_TOKENS = 14_000
_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class CachedRow:
    """Where one conversation's features lie."""

    key: str
    source: str
    temperature: float
    shard: int
    start: int
    num_tokens: int
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class CacheInput:
    """One conversation to capture."""

    key: str
    source: str
    temperature: float
    token_ids: tuple[int, ...]
    num_prompt_tokens: int


def shard_file(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:06d}.safetensors"


def build_cache(
    folder: Path,
    inputs: Sequence[CacheInput],
    capture: Callable[[Sequence[tuple[Sequence[int], int]]], list[Features]],
    *,
    identity: dict[str, Any],
    max_bytes: int,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> None:
    """Capture what is missing. identity (target fingerprint, layers) must match an older part.

    Raises TrainingError if the folder holds features of another target.
    """
    manifest = folder / _MANIFEST
    if manifest.exists():
        check_identity(folder, identity)
    else:
        atomic_files.write_json(manifest, identity)
    used = 0
    for index, group in enumerate(_groups(inputs, _SHARD_TOKENS)):
        path = shard_file(folder, index)
        if not path.exists():
            if used >= max_bytes:
                break
            _write_shard(path, group, capture, on_tokens)
        used += path.stat().st_size


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Raise TrainingError naming the field in which the cache was made for something else."""
    try:
        kept = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{folder / _MANIFEST}: {error}") from error
    for name, value in identity.items():
        if kept.get(name) != value:
            raise TrainingError(
                f"{folder}: {name} is {kept.get(name)!r} there and {value!r} here; the features "
                "are of another target, make new ones in another folder"
            )


def _groups(inputs: Sequence[CacheInput], num_tokens: int) -> list[list[CacheInput]]:
    groups: list[list[CacheInput]] = []
    held = num_tokens
    for item in inputs:
        if held >= num_tokens:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += len(item.token_ids)
    return groups


def _write_shard(
    path: Path,
    group: Sequence[CacheInput],
    capture: Callable[[Sequence[tuple[Sequence[int], int]]], list[Features]],
    on_tokens: Callable[[int], None],
) -> None:
    by_key: dict[str, Features] = {}
    batch: list[CacheInput] = []
    ordered = sorted(group, key=lambda item: len(item.token_ids))
    for item in [*ordered, None]:
        is_full = batch and (item is None or (len(batch) + 1) * len(item.token_ids) > _BATCH_TOKENS)
        if is_full:
            rows = [(row.token_ids, row.num_prompt_tokens) for row in batch]
            for row, features in zip(batch, capture(rows), strict=True):
                if not torch.isfinite(features.last.float()).all():
                    raise TrainingError(f"{row.key}: the target's hidden states are not finite")
                by_key[row.key] = features
            on_tokens(sum(len(row.token_ids) for row in batch))
            batch = []
        if item is not None:
            batch.append(item)
    found = [by_key[item.key] for item in group]
    rows_json = [
        {
            "key": item.key,
            "source": item.source,
            "temperature": item.temperature,
            "num_tokens": len(item.token_ids),
            "num_prompt_tokens": item.num_prompt_tokens,
        }
        for item in group
    ]
    tensors = {
        "token_ids": torch.cat([f.token_ids for f in found]).to(torch.int32),
        "captured": torch.cat([f.captured for f in found]),
        "last": torch.cat([f.last for f in found]),
        "log_normalizer": torch.cat([f.log_normalizer for f in found]),
        "best_token_ids": torch.cat([f.best_token_ids for f in found]).to(torch.int32),
    }
    atomic_files.write_bytes(path, save(tensors, {"rows": json.dumps(rows_json)}))


class FeatureCache:
    """Reads features by conversation, memory-mapped."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        check_identity(folder, identity)
        self.folder = folder
        self.rows: list[CachedRow] = []
        self._files: dict[int, Any] = {}
        for index, path in enumerate(sorted(folder.glob("shard-*.safetensors"))):
            with safe_open(path, "pt") as handle:
                rows = json.loads(handle.metadata()["rows"])
            start = 0
            for row in rows:
                self.rows.append(CachedRow(shard=index, start=start, **row))
                start += row["num_tokens"]
        if not self.rows:
            raise TrainingError(f"{folder}: holds no features; run the cache stage first")

    def read(self, row: CachedRow) -> Features:
        file = self._files.get(row.shard)
        if file is None:
            path = shard_file(self.folder, row.shard)
            file = self._files[row.shard] = safe_open(path, "pt")
        stop = row.start + row.num_tokens

        def part(name: str) -> torch.Tensor:
            found: torch.Tensor = file.get_slice(name)[row.start : stop]
            return found

        return Features(
            part("token_ids").long(),
            row.num_prompt_tokens,
            part("captured"),
            part("last"),
            part("log_normalizer"),
            part("best_token_ids").long(),
        )
