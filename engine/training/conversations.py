"""Conversations that a target wrote: the rows that training reads, kept in shards of JSON lines.

A row's tokens are the prompt's, then the output's; what is trained on follows from that
boundary alone, never from a chat template.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.training import atomic_files
from engine.training.errors import TrainingError

MANIFEST = "manifest.json"
_SHARD = "shard-{:06d}.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is asked, ready as tokens. source says where it came from; key is unique
    and stable, so that seeds and the held-out part depend on it and not on the order."""

    key: str
    source: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the target's own answer to it.

    temperature and seed repeat the answer; finish_reason is the engine's word.
    """

    key: str
    source: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    finish_reason: str
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise TrainingError(f"conversation {self.key!r}: prompt_token_ids is empty")

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.output_token_ids


def stable_fraction(key: str, purpose: str) -> float:
    """A number in [0, 1) that depends on the key and the purpose alone."""
    digest = hashlib.sha256(f"{purpose}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_held_out(key: str, share: float) -> bool:
    """Whether a conversation is kept for evaluation; the same answer in every stage and run."""
    return stable_fraction(key, "held-out") < share


def shard_path(folder: Path, index: int) -> Path:
    return folder / _SHARD.format(index)


def write_shard(folder: Path, index: int, rows: Sequence[Conversation]) -> None:
    lines = [json.dumps(asdict(row), separators=(",", ":")) for row in rows]
    atomic_files.write_bytes(
        shard_path(folder, index), "".join(f"{line}\n" for line in lines).encode()
    )


def read_shard(path: Path) -> list[Conversation]:
    """Raises TrainingError naming the file and the line that is no conversation."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            for name in ("prompt_token_ids", "output_token_ids"):
                fields[name] = tuple(int(token_id) for token_id in fields[name])
            rows.append(Conversation(**fields))
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingError(f"{path}:{number}: {error}") from error
    return rows


def read_conversations(folder: Path) -> Iterator[Conversation]:
    """All rows of the finished shards, in their order. Raises TrainingError if there is none."""
    paths = sorted(folder.glob("shard-*.jsonl"))
    if not paths:
        raise TrainingError(f"{folder}: holds no conversations; run the data stage first")
    for path in paths:
        yield from read_shard(path)
