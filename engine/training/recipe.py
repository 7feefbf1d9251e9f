"""Everything that decides a training run, read from one TOML file. Unknown keys are errors."""

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from engine.training.errors import TrainingError
from engine.training.objectives import find_objective
from engine.training.utilities import find_utility


def _require(condition: bool, name: str, reason: str) -> None:
    if not condition:
        raise TrainingError(f"{name}: {reason}")


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """prompts: JSONL files; self_prompts: how many turns the target writes itself.

    sampled_share of the prompts are answered at `temperature`, the others greedily.
    held_out_share of the conversations are never trained on. No source gives more than
    max_source_share of those that are.
    """

    prompts: tuple[str, ...] = ()
    self_prompts: int = 0
    max_conversations: int = 100_000
    max_prompt_tokens: int = 512
    max_output_tokens: int = 192
    temperature: float = 0.7
    sampled_share: float = 0.5
    held_out_share: float = 0.04
    max_source_share: float = 1.0
    num_rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.self_prompts >= 0, "data.self_prompts", "must not be negative")
        for name in ("max_conversations", "max_prompt_tokens", "max_output_tokens", "num_rows"):
            _require(getattr(self, name) >= 1, f"data.{name}", "must be at least 1")
        _require(0 <= self.sampled_share <= 1, "data.sampled_share", "must be in [0, 1]")
        _require(0 < self.held_out_share < 1, "data.held_out_share", "must be in (0, 1)")
        _require(0 < self.max_source_share <= 1, "data.max_source_share", "must be in (0, 1]")
        _require(self.temperature > 0, "data.temperature", "must be positive")


@dataclass(frozen=True, slots=True)
class FeatureRecipe:
    """max_gigabytes bounds what the captured hidden states take on disk."""

    max_gigabytes: float = 8.0

    def __post_init__(self) -> None:
        _require(self.max_gigabytes > 0, "features.max_gigabytes", "must be positive")


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """draft_vocab_size 0 lets the cost model choose. captured_layers: empty for EAGLE-3's."""

    draft_vocab_size: int = 0
    captured_layers: tuple[int, ...] = ()
    num_draft_tokens: int = 4
    window: int = 512

    def __post_init__(self) -> None:
        _require(self.draft_vocab_size >= 0, "head.draft_vocab_size", "must not be negative")
        _require(1 <= self.num_draft_tokens <= 16, "head.num_draft_tokens", "must be 1 to 16")
        _require(self.window >= 1, "head.window", "must be at least 1")


@dataclass(frozen=True, slots=True)
class DistillRecipe:
    """Distillation: `objective` for most steps, finish_objective for the last finish_share.

    has_prompt_anchors trains on the prompts' positions, too. max_minutes ends the stage early;
    0 is no limit.
    """

    num_steps: int = 1500
    objective: str = "kl"
    finish_objective: str = "lk_hybrid"
    finish_share: float = 0.2
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    batches_per_step: int = 1
    evaluate_every: int = 150
    has_prompt_anchors: bool = True
    max_minutes: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.num_steps >= 1, "distill.num_steps", "must be at least 1")
        _require(0 <= self.finish_share < 1, "distill.finish_share", "must be in [0, 1)")
        find_objective(self.objective)
        find_objective(self.finish_objective)


@dataclass(frozen=True, slots=True)
class VariationalRecipe:
    """The variational stage: level A ("path") or level B ("sampled" paths, EM rounds).

    num_paths per context (one of them the conversation's own continuation) and
    contexts_per_batch contexts; temperature tempers the head that draws the others; utility is
    one of engine.training.utilities. path_weight times the paths' loss is added to kl_weight
    times teacher_objective on the conversation itself: much weight on the paths, whose contexts
    are the hard ones, unlearns the others. The controls spend the same time on more distillation.
    """

    level: str = "sampled"
    num_rounds: int = 4
    steps_per_round: int = 75
    learning_rate: float = 2e-4
    num_paths: int = 4
    contexts_per_batch: int = 64
    temperature: float = 1.0
    utility: str = "expected_length"
    teacher_objective: str = "lk_hybrid"
    num_chain_moves: int = 0
    path_weight: float = 0.1
    kl_weight: float = 1.0
    confidence_weight: float = 0.1
    clip: float = 10.0
    control_objectives: tuple[str, ...] = ("kl", "lk_hybrid")
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.level in ("path", "sampled"), "variational.level", "is path or sampled")
        for name in ("num_rounds", "steps_per_round", "num_paths", "contexts_per_batch"):
            _require(getattr(self, name) >= 1, f"variational.{name}", "must be at least 1")
        _require(self.num_paths >= 2, "variational.num_paths", "must be at least 2")
        find_objective(self.teacher_objective)
        find_utility(self.utility)
        for objective in self.control_objectives:
            find_objective(objective)


@dataclass(frozen=True, slots=True)
class Recipe:
    """target: folder or hub id of the model that the head drafts for."""

    target: str = ""
    dtype: str = "auto"
    data: DataRecipe = field(default_factory=DataRecipe)
    features: FeatureRecipe = field(default_factory=FeatureRecipe)
    head: HeadRecipe = field(default_factory=HeadRecipe)
    distill: DistillRecipe = field(default_factory=DistillRecipe)
    variational: VariationalRecipe = field(default_factory=VariationalRecipe)

    def __post_init__(self) -> None:
        _require(bool(self.target), "target", "must name a model")
        _require(
            bool(self.data.prompts) or self.data.self_prompts > 0,
            "data.prompts",
            "give files, or a number of self_prompts",
        )


def load_recipe(path: Path | None, changes: Mapping[str, str] | None = None) -> Recipe:
    """From a TOML file, then `section.key=value` changes. Raises TrainingError naming the key."""
    content: dict[str, Any] = {}
    if path is not None:
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise TrainingError(f"{path}: {error}") from error
    for key, text in (changes or {}).items():
        place = content
        *sections, name = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise TrainingError(f"{key}: {section} is no section")
        place[name] = _parse(text)
    recipe: Recipe = _build(Recipe, content, "")
    if path is not None:
        recipe = replace(recipe, data=replace(recipe.data, prompts=_relative(recipe, path)))
    return recipe


def _relative(recipe: Recipe, path: Path) -> tuple[str, ...]:
    """Prompt files are named relative to the recipe."""
    return tuple(str((path.parent / name).resolve()) for name in recipe.data.prompts)


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(kind: Any, content: Mapping[str, Any], prefix: str) -> Any:
    types_by_name = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(content) - known)
    if unknown:
        raise TrainingError(
            f"{prefix}{unknown[0]}: is no key; known are {', '.join(sorted(known))}"
        )
    values = {}
    for name, value in content.items():
        wanted = types_by_name[name]
        where = f"{prefix}{name}"
        if is_dataclass(wanted):
            if not isinstance(value, dict):
                raise TrainingError(f"{where}: must be a section")
            values[name] = _build(wanted, value, f"{where}.")
        else:
            values[name] = _convert(wanted, value, where)
    return kind(**values)


def _convert(wanted: Any, value: Any, where: str) -> Any:
    if isinstance(wanted, types.GenericAlias):
        element = wanted.__args__[0]
        if not isinstance(value, list | tuple):
            raise TrainingError(f"{where}: must be a list")
        return tuple(_convert(element, item, where) for item in value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise TrainingError(f"{where}: {value!r} is no {wanted.__name__}")
    return value
