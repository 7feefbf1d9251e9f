"""What a machine and a budget can do: measured on the target, never guessed."""

import time
from typing import Any

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.loader import output_weight
from engine.training.capture import Capturer
from engine.training.data_stage import answer_probe
from engine.training.distillation import Distillation
from engine.training.initialize import HeadShape, fresh_head, head_config
from engine.training.objectives import find_objective
from engine.training.run import Run
from engine.training.scores import Teacher
from engine.training.unrolled import make_batch

_PROBE_PROMPTS = 16
_PROBE_STEPS = 3
_SHARES = {"data": 0.3, "features": 0.1, "distill": 0.35, "variational": 0.1, "controls": 0.15}
# Acceptance lengths at K = 3 to 5 that others and we have seen, by response tokens trained on.
_EXPECTED = ((2e5, "1.3-1.6"), (2e6, "1.5-1.9"), (2e7, "1.7-2.3"), (float("inf"), "2.3-2.8"))


def make_plan(run: Run, budget_seconds: float) -> dict[str, Any]:
    """Rates of every stage, what the budget buys, disk, and where drafting breaks even."""
    recipe = run.recipe
    engine = Engine.from_config(
        EngineConfig(
            target=recipe.target,
            device=str(run.accelerator.device),
            dtype=recipe.dtype,  # type: ignore[arg-type] # checked by the engine
            max_num_rows=recipe.data.num_rows,
            max_model_tokens=recipe.data.max_prompt_tokens + recipe.data.max_output_tokens + 1,
            speculation=SpeculationConfig(drafters=("prompt_lookup",)),
        )
    )
    rows, answer_rate = answer_probe(engine, recipe, _PROBE_PROMPTS)
    costs = engine.target_costs
    del engine
    capturer = Capturer(run.target.model, run.captured_layers)
    started = time.monotonic()
    features = capturer.capture(rows)
    capture_rate = sum(f.num_tokens for f in features) / (time.monotonic() - started)
    capturer.close()
    size = recipe.head.draft_vocab_size or 8192
    train_rate = _train_rate(run, features, size)
    num_output = int(_SHARES["data"] * budget_seconds * answer_rate)
    hidden = run.target.model.config.get_text_config().hidden_size
    overhead = sum(f.num_tokens for f in features) / max(
        1, sum(f.num_tokens - f.num_prompt_tokens for f in features)
    )
    num_drafts = recipe.head.num_draft_tokens
    break_even = {
        str(batch): round(
            costs.forward_seconds(batch * (num_drafts + 1)) / costs.forward_seconds(batch), 2
        )
        for batch in (1, 8, 32)
    }
    return {
        "budget_seconds": budget_seconds,
        "answer_tokens_per_second": round(answer_rate, 1),
        "capture_tokens_per_second": round(capture_rate, 1),
        "train_positions_per_second": round(train_rate, 1),
        "seconds": {name: round(share * budget_seconds) for name, share in _SHARES.items()},
        "output_tokens": num_output,
        "epochs_of_distillation": round(
            _SHARES["distill"] * budget_seconds * train_rate / max(1, num_output), 1
        ),
        "feature_gigabytes": round(num_output * overhead * 4 * hidden * 2 / 1e9, 2),
        "draft_vocab_size": size,
        "acceptance_length_expected": next(t for n, t in _EXPECTED if num_output < n),
        "break_even_acceptance_length": break_even,
        "advice": _advice(break_even),
    }


def _train_rate(run: Run, features: list[Any], size: int) -> float:
    model = run.target.model
    config = head_config(model, "plan", HeadShape(size, run.captured_layers))
    head = fresh_head(config, model, list(range(config.draft_vocab_size)), seed=0)
    weight = output_weight(model)
    teacher = Teacher(weight[head.draft_token_ids].contiguous(), head.draft_token_ids)
    dtype = None if model.dtype.itemsize == 4 else model.dtype
    objective = find_objective(run.recipe.distill.objective)
    module = Distillation(head, teacher, objective, run.recipe.head.num_draft_tokens, dtype)
    batch = make_batch(features).to(head.device)
    module(batch).backward()
    started = time.monotonic()
    for _ in range(_PROBE_STEPS):
        module(batch).backward()
    num_anchors = int((batch.depth_limits > 0).sum())
    return _PROBE_STEPS * num_anchors / (time.monotonic() - started)


def _advice(break_even: dict[str, float]) -> str:
    most = max(break_even.values())
    if most < 2:
        return "drafting pays at every batch size once the acceptance length is above these"
    return (
        "a verification costs much more than a plain step in large batches here: there the "
        "controller will draft little, whatever the head"
    )
