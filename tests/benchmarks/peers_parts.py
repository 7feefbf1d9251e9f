"""What has been measured so far, a file per contender and workload: a run may be interrupted.

A part is only found again by a run of the same engine, dtype, threads, model and effort. Each
holds what our plain decoding gave in the very same rounds, so that its ratios stay ratios within
a round, whenever the other parts were measured.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ENGINE = Path(__file__).resolve().parents[2] / "engine"


@dataclass(frozen=True, slots=True)
class Part:
    """One contender on one workload; rounds and reference have one entry per round.

    num_identical: requests of the last round with the very tokens of our plain decoding.
    """

    contender: str
    key: str  # WORKLOAD@ROWS
    versions: Mapping[str, str]
    rounds: tuple[dict[str, Any], ...]
    reference: tuple[dict[str, Any], ...]
    num_requests: int
    num_identical: int

    def ratios(self) -> list[float]:
        """Per round, our plain tokens/s over the contender's."""
        return [
            own["tokens_per_second"] / its["tokens_per_second"]
            for own, its in zip(self.reference, self.rounds, strict=True)
        ]


class Parts:
    """The parts of runs with these settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        text = json.dumps(dict(settings), sort_keys=True)
        self._folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._settings = text

    def find(self, contender: str, key: str) -> Part | None:
        path = self._path(contender, key)
        if not path.is_file():
            return None
        value = json.loads(path.read_text())
        value["rounds"], value["reference"] = tuple(value["rounds"]), tuple(value["reference"])
        return Part(**value)

    def keep(self, part: Part) -> None:
        """Whole or not at all."""
        path = self._path(part.contender, part.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        (self._folder / "settings.json").write_text(self._settings + "\n")
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(part)) + "\n")
        partial.rename(path)

    def all(self) -> list[Part]:
        """In order of name."""
        found = []
        for path in sorted(self._folder.glob("*/*.json")):
            value = json.loads(path.read_text())
            if (part := self.find(value["contender"], value["key"])) is not None:
                found.append(part)
        return found

    def _path(self, contender: str, key: str) -> Path:
        return self._folder / contender / f"{key.replace('/', '+')}.json"


def engine_digest(folder: Path = _ENGINE) -> str:
    """Of the engine's sources: figures of another engine are not ours."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        if "training" not in path.relative_to(folder).parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
