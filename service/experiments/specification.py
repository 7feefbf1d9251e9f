"""What an experiment is: its variants, how requests are spread over them, and its guard rails.

Read from a TOML file that is read again on SIGHUP, and when it changes where files are watched:

    name = "chat-v4"
    started_at = 2026-11-30T08:00:00Z  # earlier requests do not count
    unit = "request"                   # or "tenant": what keeps its variant
    key = "a secret of all servers"    # of the hash; the name, where it is left out
    slot_seconds = 300                 # pairs of slots for latency; left out: no such rails

    [[variant]]                        # the first one is the control
    name = "control"
    drafters = ["prompt_lookup", "head:chat-v3"]
    weight = 0.95

    [[variant]]
    name = "candidate"
    drafters = ["prompt_lookup", "head:chat-v4"]
    weight = 0.05

    [guard_rails]
    max_acceptance_loss = 0.01

    [[shadow]]                         # measured on finished requests, drafts for nobody
    drafter = "head:chat-v5@0001"
    share = 0.1
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from service.experiments.arms import ExperimentError as ExperimentError
from service.experiments.arms import Shadow as Shadow
from service.experiments.arms import Variant as Variant
from service.experiments.arms import require
from service.experiments.guard_rails import GuardRails
from service.experiments.switchback import Slots

Unit = Literal["request", "tenant"]
Promote = Literal["manual", "automatic"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A running comparison. The first variant is the control, the others are candidates."""

    name: str
    started_at: datetime
    variants: tuple[Variant, ...]
    unit: Unit = "request"
    key: str = field(default="", repr=False)
    slot_seconds: float | None = None
    washout_seconds: float = 20.0
    guard_rails: GuardRails = field(default_factory=GuardRails)
    shadows: tuple[Shadow, ...] = ()
    promote: Promote = "manual"
    canary: tuple[float, ...] = (0.05, 0.25, 0.5)
    canary_check_seconds: float = 60.0

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None,
            "name",
            f"must be up to 64 letters, digits and _.-, got {self.name!r}",
        )
        require(
            isinstance(self.started_at, datetime) and self.started_at.tzinfo is not None,
            "started_at",
            "must be an instant with a time zone",
        )
        require(self.unit in get_args(Unit), "unit", f"must be one of {get_args(Unit)}")
        require(isinstance(self.key, str), "key", "must be a text")
        names = [variant.name for variant in self.variants]
        least = 1 if self.shadows else 2
        require(len(names) >= least, "variant", "needs a control and a candidate, or a shadow")
        shadowed = [shadow.drafter for shadow in self.shadows]
        require(len(set(shadowed)) == len(shadowed), "shadow.drafter", "is measured twice")
        require(len(set(names)) == len(names), "variant.name", "is used twice")
        require(
            any(variant.weight > 0 for variant in self.variants), "weight", "one must be positive"
        )
        require(self.promote in get_args(Promote), "promote", f"must be one of {get_args(Promote)}")
        self._check_canary()
        for name in ("slot_seconds", "washout_seconds", "canary_check_seconds"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_left_out = value is None and name == "slot_seconds"
            require(is_number or is_left_out, name, f"must be a number, got {value!r}")
        if self.slot_seconds is not None:
            require(
                len(names) == 2, "slot_seconds", "needs one candidate: slots compare it with none"
            )
            try:
                self.slots  # noqa: B018 - checks the values
            except ValueError as error:
                raise ExperimentError(str(error)) from error

    def _check_canary(self) -> None:
        rising = (0.0, *self.canary)
        require(
            all(isinstance(s, int | float) for s in self.canary)
            and all(a < b < 1 for a, b in pairwise(rising)),
            "canary",
            "must be shares that rise, each below 1",
        )
        if self.promote == "manual":
            return
        require(len(self.variants) == 2, "promote", '"automatic" needs one candidate')
        names = [name for name in self.candidates[0].drafters if "@" in name]
        is_pair = len(names) == 1 and names[0].partition("@")[0] in self.control.drafters
        require(
            is_pair,
            "promote",
            '"automatic" needs a candidate that drafts with one "head:NAME@VERSION" and a control '
            'that drafts with "head:NAME"',
        )
        value = self.canary_check_seconds
        require(isinstance(value, int | float) and value > 0, "canary_check_seconds",
                f"must be positive, got {value!r}")  # fmt: skip

    @property
    def promoted_head(self) -> str:
        """The candidate's drafter that an automatic promotion makes the one in use."""
        return next(name for name in self.candidates[0].drafters if "@" in name)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the candidate, stage by stage: the file's own, then those of `canary` above it."""
        first = self.candidates[0].weight / sum(self.weights.values())
        return (first, *(share for share in self.canary if share > first))

    def with_share(self, share: float) -> "Experiment":
        """The same with so much for the one candidate, and the rest for the control."""
        control, candidate = self.variants
        return replace(
            self,
            variants=(replace(control, weight=1 - share), replace(candidate, weight=share)),
        )

    @property
    def control(self) -> Variant:
        return self.variants[0]

    @property
    def candidates(self) -> tuple[Variant, ...]:
        return self.variants[1:]

    @property
    def drafters(self) -> tuple[str, ...]:
        """All that its requests may draft with, and those in the shadow."""
        names = [name for v in self.variants for name in v.drafters]
        return tuple(dict.fromkeys((*names, *(shadow.drafter for shadow in self.shadows))))

    @property
    def baseline(self) -> str | None:
        """The control's head, which shadows are compared with."""
        heads = [name for name in self.control.drafters if name.split(":")[0] == "head"]
        return heads[0] if heads else None

    @property
    def hash_key(self) -> bytes:
        return (self.key or self.name).encode()

    @property
    def slots(self) -> Slots | None:
        if self.slot_seconds is None:
            return None
        return Slots(self.hash_key, self.slot_seconds, self.washout_seconds)

    @property
    def weights(self) -> dict[str, float]:
        return {variant.name: float(variant.weight) for variant in self.variants}

    def without(self, names: frozenset[str]) -> "Experiment":
        """The same with weight 0 for some candidates, whose share goes to the control."""
        freed = sum(v.weight for v in self.candidates if v.name in names)
        variants = tuple(
            replace(v, weight=v.weight + freed)
            if v is self.control
            else replace(v, weight=0.0)
            if v.name in names
            else v
            for v in self.variants
        )
        return replace(self, variants=variants)


def read_experiment(path: Path) -> Experiment:
    """Raises ExperimentError naming the file and the field, or OSError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path}: {error}") from error
    try:
        return _experiment(document)
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from error


def _experiment(document: Mapping[str, Any]) -> Experiment:
    values = dict(document)
    variants = values.pop("variant", [])
    rails = values.pop("guard_rails", {})
    shadows = values.pop("shadow", [])
    require(isinstance(shadows, list), "shadow", "must be written as [[shadow]]")
    require(isinstance(variants, list), "variant", "must be written as [[variant]]")
    require(isinstance(rails, dict), "guard_rails", "must be a table")
    known = {f.name for f in fields(Experiment)} - {"variants", "guard_rails", "shadows"}
    if isinstance(values.get("canary"), list):
        values["canary"] = tuple(values["canary"])
    require(isinstance(values.get("canary", ()), tuple), "canary", "must be a list of shares")
    _check_keys(values, known, {"name", "started_at"}, "")
    if isinstance(values["started_at"], datetime) and values["started_at"].tzinfo is not None:
        values["started_at"] = values["started_at"].astimezone(UTC)
    try:
        guard_rails = GuardRails(
            **_checked(rails, {f.name for f in fields(GuardRails)}, set(), "guard_rails.")
        )
    except (TypeError, ValueError) as error:
        raise ExperimentError(str(error)) from error
    found = Experiment(
        variants=tuple(_variant(entry, index) for index, entry in enumerate(variants)),
        guard_rails=guard_rails,
        shadows=tuple(_shadow(entry, index) for index, entry in enumerate(shadows)),
        **values,
    )
    if found.promote == "automatic":
        has_both = all(variant.weight > 0 for variant in found.variants)
        require(has_both, "weight", "must give both a share where promotion is automatic")
    return found


def _variant(entry: Any, index: int) -> Variant:
    where = f"variant[{index}]"
    require(isinstance(entry, dict), where, "must be a table")
    known = {f.name for f in fields(Variant)}
    values = _checked(entry, known, {"name", "drafters", "weight"}, f"{where}.")
    require(isinstance(values["drafters"], list), f"{where}.drafters", "must be a list of names")
    return Variant(**{**values, "drafters": tuple(values["drafters"])})


def _shadow(entry: Any, index: int) -> Shadow:
    require(isinstance(entry, dict), f"shadow[{index}]", "must be a table")
    known = {f.name for f in fields(Shadow)}
    return Shadow(**_checked(entry, known, known, f"shadow[{index}]."))


def _checked(
    entry: Mapping[str, Any], known: set[str], needed: set[str], prefix: str
) -> dict[str, Any]:
    _check_keys(entry, known, needed, prefix)
    return dict(entry)


def _check_keys(entry: Mapping[str, Any], known: set[str], needed: set[str], prefix: str) -> None:
    for name in sorted(entry.keys() - known):
        raise ExperimentError(f"{prefix}{name}: is not known; known are {sorted(known)}")
    for name in sorted(needed - entry.keys()):
        raise ExperimentError(f"{prefix}{name}: is missing")
