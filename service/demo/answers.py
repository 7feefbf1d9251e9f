"""What came back for one prompt, and what can be counted over many. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.demo.prompts import DemoPrompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished stream. Durations are the server's own; None where nothing was measured."""

    prompt: DemoPrompt
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_verify_steps: int
    ttft_seconds: float | None
    tpot_seconds: float | None
    cost_nano_usd: int | None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return acceptance_rate([self])

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification, bonus included; None when nothing was verified."""
        return acceptance_length([self])


@dataclass(frozen=True, slots=True)
class Round:
    """All prompts sent once. wall_seconds runs from the first request to the last answer."""

    answers: tuple[Answer, ...]
    wall_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.wall_seconds


def acceptance_rate(answers: Sequence[Answer]) -> float | None:
    """Over all answers; None when nothing was drafted."""
    num_drafted = sum(answer.num_draft_tokens for answer in answers)
    return sum(a.num_accepted_tokens for a in answers) / num_drafted if num_drafted else None


def acceptance_length(answers: Sequence[Answer]) -> float | None:
    """1 + accepted / verifications over all answers; None when nothing was verified."""
    num_verifications = sum(answer.num_verify_steps for answer in answers)
    if not num_verifications:
        return None
    return 1 + sum(answer.num_accepted_tokens for answer in answers) / num_verifications


def exact_match(answers: Sequence[Answer], references: Sequence[Sequence[int]]) -> float:
    """Share of answers whose every token, and length, equals the reference's."""
    pairs = zip(answers, references, strict=True)
    return sum(list(a.token_ids) == list(r) for a, r in pairs) / len(answers)
