"""Who drafts in an experiment: its variants, and heads in the shadow."""

import math
import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VERSION = re.compile(r"head:[A-Za-z0-9][A-Za-z0-9_.-]{0,63}@\d{4,}")


class ExperimentError(ValueError):
    """An experiment that cannot be run; the message names the field."""


def require(condition: bool, name: str, reason: str) -> None:
    if not condition:
        raise ExperimentError(f"{name}: {reason}")


@dataclass(frozen=True, slots=True)
class Variant:
    """drafters: names that its requests may draft with; none means plain decoding."""

    name: str
    drafters: tuple[str, ...]
    weight: float
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None,
            "variant.name",
            f"must be up to 64 letters, digits and _.-, got {self.name!r}",
        )
        where = f"variant {self.name}"
        require(
            isinstance(self.weight, int | float) and 0 <= self.weight < math.inf,
            f"{where}.weight",
            f"must be a number that is not negative, got {self.weight!r}",
        )
        require(
            all(isinstance(name, str) and name for name in self.drafters),
            f"{where}.drafters",
            "must be a list of names",
        )
        limit = self.max_draft_tokens
        require(
            limit is None or (isinstance(limit, int) and 1 <= limit <= 64),
            f"{where}.max_draft_tokens",
            f"must be between 1 and 64, got {limit!r}",
        )


@dataclass(frozen=True, slots=True)
class Shadow:
    """A head that drafts for nobody and is measured on a share of the finished requests, beside
    the control's head."""

    drafter: str
    share: float

    def __post_init__(self) -> None:
        is_version = isinstance(self.drafter, str) and _VERSION.fullmatch(self.drafter) is not None
        require(
            is_version,
            "shadow.drafter",
            f'must be "head:NAME@VERSION", got {self.drafter!r}',
        )
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        require(
            is_number and 0 < self.share <= 1,
            "shadow.share",
            f"must be above 0 and at most 1, got {self.share!r}",
        )
