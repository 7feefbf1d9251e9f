"""The data stage: prompts from every source of the recipe, answered by the target, in shards."""

import itertools
import json
import time
from pathlib import Path

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.training import atomic_files
from engine.training.conversations import Prompt, shard_path, stable_fraction
from engine.training.errors import TrainingError
from engine.training.prompt_sources import (
    jsonl_prompts,
    self_prompt,
    self_prompt_request,
    user_turn_opening,
)
from engine.training.provenance import write_provenance
from engine.training.recipe import Recipe
from engine.training.regenerate import (
    AnswerPlan,
    answer_request,
    regenerate_shard,
    run_requests,
)
from engine.training.run import Run
from engine.training.status import StatusLog, duration

_SHARD_PROMPTS = 160
_SELF_PROMPTS = "self_prompts.json"
_SETTINGS = "settings.json"


def make_data(folder: Path, recipe: Recipe, *, device: str = "auto") -> None:
    """Answer every prompt that has no answer yet.

    Raises TrainingError if the folder was begun with other settings.
    """
    status = StatusLog(folder)
    data = recipe.data
    engine = Engine.from_config(
        EngineConfig(
            target=recipe.target,
            device=device,
            dtype=recipe.dtype,  # type: ignore[arg-type] # checked by the engine
            max_num_rows=data.num_rows,
            max_model_tokens=data.max_prompt_tokens + data.max_output_tokens + 1,
            speculation=SpeculationConfig(drafters=("prompt_lookup",)),
        )
    )
    _check_settings(folder, recipe, engine.info.fingerprint)
    prompts = _prompts(folder, recipe, engine)
    plan = AnswerPlan(data.max_output_tokens, data.temperature, data.sampled_share, data.seed)
    shards = [prompts[i : i + _SHARD_PROMPTS] for i in range(0, len(prompts), _SHARD_PROMPTS)]
    begun, tokens, done = time.monotonic(), [0], 0
    missing = [i for i in range(len(shards)) if not shard_path(folder, i).exists()]

    def heard(count: int) -> None:
        tokens[0] += count
        seconds = time.monotonic() - begun
        left = seconds / max(1, done) * (len(missing) - done) if done else float("nan")
        eta = f" | ETA {duration(left)}" if done else ""
        status.line(
            f"data | shard {done + 1}/{len(missing)} | {tokens[0]} tokens | "
            f"{tokens[0] / max(seconds, 1e-9):.0f} tok/s{eta}"
        )

    for index in missing:
        accounting = regenerate_shard(engine, folder, index, shards[index], plan, heard)
        done += 1
        if accounting is not None:
            status.event(
                "shard",
                index=index,
                num_prompts=accounting.num_prompts,
                num_failed=accounting.num_failed,
                num_output_tokens=accounting.num_output_tokens,
            )
    write_provenance(folder, target_fingerprint=engine.info.fingerprint)
    status.line(f"data | {len(prompts)} prompts answered", is_final=True)


def answer_prompts(run: Run) -> None:
    """RUN/data: every prompt answered, by the main process."""
    place = str(run.accelerator.device)
    run.on_main(lambda: make_data(run.folder / "data", run.recipe, device=place))


def _check_settings(folder: Path, recipe: Recipe, fingerprint: str) -> None:
    data = recipe.data
    settings = {
        "target_fingerprint": fingerprint,
        "max_prompt_tokens": data.max_prompt_tokens,
        "max_output_tokens": data.max_output_tokens,
        "temperature": data.temperature,
        "sampled_share": data.sampled_share,
        "seed": data.seed,
        "prompts": [Path(name).name for name in data.prompts],
        "self_prompts": data.self_prompts,
        "max_conversations": data.max_conversations,
    }
    path = folder / _SETTINGS
    if not path.exists():
        atomic_files.write_json(path, settings)
        return
    kept = json.loads(path.read_text())
    for name, value in settings.items():
        if kept.get(name) != value:
            raise TrainingError(
                f"{folder}: begun with {name} {kept.get(name)!r}, not {value!r}; use another folder"
            )


def _prompts(folder: Path, recipe: Recipe, engine: Engine) -> list[Prompt]:
    """All prompts in an order that depends on their keys alone, so that any part of them is a
    fair sample of the whole."""
    data = recipe.data
    found: list[Prompt] = []
    for name in data.prompts:
        found.extend(
            jsonl_prompts(Path(name), engine.tokenizer, max_prompt_tokens=data.max_prompt_tokens)
        )
    if data.self_prompts:
        found.extend(_self_prompts(folder, recipe, engine))
    keys = {prompt.key for prompt in found}
    if len(keys) != len(found):
        raise TrainingError("data.prompts: two files of the same name")
    if not found:
        raise TrainingError("data.prompts: no prompt is short enough")
    found.sort(key=lambda prompt: stable_fraction(prompt.key, "order"))
    return found[: data.max_conversations]


def _self_prompts(folder: Path, recipe: Recipe, engine: Engine) -> list[Prompt]:
    path = folder / _SELF_PROMPTS
    if path.exists():
        return [
            Prompt(row["key"], row["source"], tuple(row["token_ids"]))
            for row in json.loads(path.read_text())
        ]
    data = recipe.data
    opening = user_turn_opening(engine.tokenizer)
    requests = [self_prompt_request(i, opening, data.seed) for i in range(data.self_prompts)]
    answers = run_requests(engine, requests)
    made = (
        self_prompt(index, answers[request.request_id][0], engine.tokenizer)
        for index, request in enumerate(requests)
    )
    prompts = [p for p in made if p is not None and len(p.token_ids) <= data.max_prompt_tokens]
    rows = [{"key": p.key, "source": p.source, "token_ids": list(p.token_ids)} for p in prompts]
    atomic_files.write_json(path, rows)
    return prompts


def answer_probe(
    engine: Engine, recipe: Recipe, num_prompts: int
) -> tuple[list[tuple[list[int], int]], float]:
    """A few prompts answered: (tokens, prompt's share of them) of each, and output tokens per
    second."""
    data = recipe.data
    requests = []
    if data.prompts:
        source = jsonl_prompts(
            Path(data.prompts[0]), engine.tokenizer, max_prompt_tokens=data.max_prompt_tokens
        )
        plan = AnswerPlan(data.max_output_tokens, data.temperature, data.sampled_share, data.seed)
        requests = [answer_request(p, plan) for p in itertools.islice(source, num_prompts)]
    if not requests:
        opening = user_turn_opening(engine.tokenizer)
        requests = [self_prompt_request(i, opening, data.seed) for i in range(num_prompts)]
    begun = time.monotonic()
    answers = run_requests(engine, requests)
    seconds = time.monotonic() - begun
    rows = [
        ([*r.prompt_token_ids, *answers[r.request_id][0]], len(r.prompt_token_ids))
        for r in requests
        if len(answers[r.request_id][0]) > 1
    ]
    if not rows:
        raise TrainingError("plan: the target answers nothing")
    return rows, sum(len(tokens) - prompt for tokens, prompt in rows) / seconds
