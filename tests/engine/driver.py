"""Drives an engine in tests: builds one around tiny models, runs requests, checks integrity."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch
from transformers import PreTrainedModel

from engine import assembly
from engine.config import EngineConfig, SpeculationConfig
from engine.cost_table import CostTable
from engine.engine import Engine
from engine.loader import describe_model
from engine.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TokenDelta,
)
from engine.stats import RequestStats, StepStats
from engine.target_runner import TargetRunner
from tests.tiny import related_draft, tiny_llama, tiny_tokenizer

GREEDY = SamplingParams(temperature=0)
# Of a tiny model on one core. Every test would measure its own otherwise.
TINY_COSTS = CostTable((1, 8, 32, 128), (0.0008, 0.0011, 0.0016, 0.0040))
_guarantees: dict[tuple[object, ...], str] = {}


def tiny_engine(
    *,
    target: PreTrainedModel | None = None,
    draft: PreTrainedModel | None = None,
    dtype: torch.dtype = torch.float32,
    drafters: tuple[str, ...] = ("prompt_lookup",),
    max_draft_tokens: int = 4,
    poison: float | None = 1000.0,
    is_measured: bool = False,
    head: str | None = None,
    **options: object,
) -> Engine:
    """An engine over tiny models whose never-written cache slots hold `poison`.

    is_measured probes this very engine; else what was found of the same model and padding stands.
    """
    target = target if target is not None else tiny_llama(dtype=dtype)
    if "draft_model" in drafters and draft is None:
        draft = related_draft(target, 0.05)  # type: ignore[arg-type]
    config = EngineConfig(
        target="tiny",
        kv_cache_memory=options.pop("kv_cache_memory", 5e8),  # type: ignore[arg-type]
        speculation=SpeculationConfig(
            drafters=drafters,
            draft_model="draft" if "draft_model" in drafters else None,
            max_draft_tokens=max_draft_tokens,
            head=head,
        ),
        **options,  # type: ignore[arg-type]
    )
    tokenizer = tiny_tokenizer()
    with nullcontext() if is_measured else _measured_before():
        engine = Engine.from_models(
            config,
            describe_model("tiny", target, tokenizer),
            describe_model("draft", draft, tokenizer) if draft is not None else None,
        )
    if poison is not None:
        engine._scheduler.cache.fill_unwritten(poison)
    return engine


@contextmanager
def _measured_before() -> Iterator[None]:
    probe = assembly.probe_guarantee

    def guarantee(runner: TargetRunner) -> str:
        config, cache = runner.model.config, runner.cache
        key = (
            config.to_json_string(),
            config._attn_implementation,
            runner.model.dtype,
            type(runner),
            runner.padding,
            cache.block_size,
            cache.is_contiguous,
        )
        if key not in _guarantees:
            _guarantees[key] = probe(runner)
        return _guarantees[key]

    with (
        mock.patch.object(assembly, "probe_guarantee", guarantee),
        mock.patch.object(assembly, "measure_costs", return_value=TINY_COSTS),
        mock.patch.object(assembly, "attention_keeps_bits", return_value=True),
    ):
        yield


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 24,
    sampling: SamplingParams = GREEDY,
    mode: str = "on",
    max_draft_tokens: int | None = None,
    **options: object,
) -> GenerationRequest:
    stopping = {
        name: options.pop(name)
        for name in (
            "min_tokens",
            "stop_token_ids",
            "stop_strings",
            "include_stop_string",
            "ignore_eos",
            "time_limit_seconds",
        )
        if name in options
    }
    drafter = options.pop("drafter", None)
    return GenerationRequest(
        request_id,
        tuple(prompt),
        sampling,
        StoppingParams(max_tokens=max_tokens, **stopping),  # type: ignore[arg-type]
        SpeculationParams(SpeculationMode(mode), max_draft_tokens, drafter),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@dataclass(slots=True)
class Outcome:
    """What an engine gave its requests."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    deltas: list[TokenDelta] = field(default_factory=list)
    stats: dict[str, RequestStats] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    def add_step(self, engine: Engine) -> None:
        """One step, with the grammar of deltas and the engine's integrity checked."""
        output = engine.step()
        engine.check_integrity()
        if output.stats is not None:
            self.steps.append(output.stats)
        for delta in output.deltas:
            tokens = self.token_ids.setdefault(delta.request_id, [])
            assert delta.first_token_index == len(tokens), "a gap or a repeat in the stream"
            assert delta.request_id not in self.stats, "a delta after the last one"
            tokens.extend(delta.token_ids)
            if delta.text is not None:
                self.text[delta.request_id] = self.text.get(delta.request_id, "") + delta.text
            self.deltas.append(delta)
        for stats in output.finished:
            assert stats.num_output_tokens == len(self.token_ids.get(stats.request_id, []))
            self.stats[stats.request_id] = stats


def run(engine: Engine, requests: Sequence[GenerationRequest], max_steps: int = 3000) -> Outcome:
    """Submit everything, step until all is done."""
    outcome = Outcome()
    for item in requests:
        engine.submit(item)
    for _ in range(max_steps):
        if not engine.has_work():
            return outcome
        outcome.add_step(engine)
    raise AssertionError(f"not done after {max_steps} steps")
