"""The prompts that the demo sends: chat, long summaries, code, translation, Spanish, Chinese."""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A user's message, answered greedily with at most max_tokens tokens."""

    name: str
    kind: str
    prompt: str
    max_tokens: int


def load_prompts() -> tuple[DemoPrompt, ...]:
    """The prompts shipped with the package, in the order in which they are sent."""
    lines = (files(__package__) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(DemoPrompt(**json.loads(line)) for line in lines)
