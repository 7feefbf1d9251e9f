"""SmolLM2-135M: a request's logits and tokens have the same bits whatever happens around it.

Every test compares with the request decoded alone, plainly, its prompt in one forward.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.layout.plan import ForwardRow
from engine.loader import LoadedModel, describe_model, load_model
from engine.request import GenerationRequest, SamplingParams
from tests.engine.driver import GREEDY, Outcome, request

# The first test of an engine loads and probes it, which takes long on a busy machine.
pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

DTYPES = ("float32", "bfloat16")
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
NUM_NEW_TOKENS = 28
SKIPPED_LAYERS = range(12, 20)  # of 30; what is left agrees with the target now and then
PROMPTS = {
    "greedy": (
        "Monday: the train leaves at nine. Tuesday: the train leaves at ten. "
        "Wednesday: the train leaves at eleven. Thursday: the train leaves at twelve. "
        "Friday: the train leaves at one. Monday: the train leaves at"
    ),
    "seeded": (
        "def area(width, height):\n    return width * height\n\n\n"
        "def volume(width, height, depth):\n    return width * height * depth\n\n\ndef "
    ),
}
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED}
PROBED = tuple(PROMPTS)
LONG = (150, 330, 700, 1000)  # tokens of prompts: attention takes 512 keys at a time
RECORDED = {*PROBED, "long"}


@dataclass(slots=True)
class Observed:
    """What the probed requests got: tokens, and the logits of every position that emitted."""

    outcome: Outcome = field(default_factory=Outcome)
    logits: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    fed: list[tuple[str, int, list[int], torch.Tensor]] = field(default_factory=list)

    def keep_what_was_committed(self, requests: Sequence[GenerationRequest]) -> None:
        """Drop the logits that followed a draft that was rejected."""
        prompts = {item.request_id: list(item.prompt_token_ids) for item in requests}
        for request_id, start, token_ids, logits in self.fed:
            prompt = prompts[request_id]
            final = prompt + self.outcome.token_ids[request_id]
            for offset in range(len(token_ids)):
                position = start + offset
                index = offset - (len(token_ids) - len(logits))
                is_committed = token_ids[: offset + 1] == final[start : position + 1]
                if is_committed and index >= 0 and len(prompt) - 1 <= position < len(final) - 1:
                    self.logits.setdefault(request_id, {})[position] = logits[index]
        self.fed.clear()


def observe(
    engine: Engine, requests: Sequence[GenerationRequest], arrivals: Sequence[int] | None = None
) -> Observed:
    """Run everything; arrivals are the steps before which the requests are submitted."""
    observed = Observed()
    runner = engine._verifier.runner
    running = engine._scheduler.running
    forward = runner.forward

    def record(rows: Sequence[ForwardRow], *args: Any, **options: Any) -> torch.Tensor:
        logits = forward(rows, *args, **options)
        ids = {live.row: request_id for request_id, live in running.items()}
        end = 0
        for row in rows:
            end += row.num_logits
            if row.num_logits and ids[row.row].split(" ")[0] in RECORDED:
                kept = logits[end - row.num_logits : end].clone()
                observed.fed.append((ids[row.row], row.start, list(row.token_ids), kept))
        return logits

    runner.forward = record  # type: ignore[method-assign]
    try:
        waiting = sorted(
            zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0]
        )
        for step in range(2000):
            while waiting and waiting[0][0] <= step:
                engine.submit(waiting.pop(0)[1])
            if not waiting and not engine.has_work():
                break
            observed.outcome.add_step(engine)
    finally:
        runner.forward = forward  # type: ignore[method-assign]
    recorded = [item for item in requests if item.request_id.split(" ")[0] in RECORDED]
    observed.keep_what_was_committed(recorded)
    return observed


# ---- models and engines, made once ----------------------------------------------------


def skip_layers(target: LoadedModel) -> LoadedModel:
    """A draft model: the target without some of its layers."""
    weights = target.model.state_dict()
    kept = [
        layer
        for layer in range(target.model.config.num_hidden_layers)
        if layer not in SKIPPED_LAYERS
    ]
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(kept)
    draft = LlamaForCausalLM(config).to(target.model.dtype).eval()
    for name, parameter in draft.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(kept[int(parts[2])])
        parameter.copy_(weights[".".join(parts)])
    return describe_model("fewer layers", draft, target.tokenizer)


@cache
def engine_of(folder: Path, dtype: str, **options: Any) -> Engine:
    """Made once; each has models of its own, because an engine changes them."""
    target = load_model(str(folder), dtype=dtype, device="cpu")
    draft = None if options else skip_layers(target)
    config = EngineConfig(
        target=str(folder),
        max_model_tokens=options.pop("max_model_tokens", 256),
        kv_cache_memory=options.pop("kv_cache_memory", 2e9),
        speculation=SpeculationConfig(
            drafters=("prompt_lookup", "draft_model") if draft else ("prompt_lookup",),
            draft_model="fewer layers" if draft else None,
            max_draft_tokens=8,
        ),
        **options,
    )
    engine = Engine.from_models(config, target, draft)
    if engine.info.guarantee != "bit_exact":
        pytest.skip(f"this machine's kernels do not keep bits in {dtype}")
    return engine


def small_engine(folder: Path, dtype: str) -> Engine:
    """Small blocks, few of them, and prompts in small chunks."""
    bytes_per_token = 30 * 3 * (64 + 64) * (4 if dtype == "float32" else 2)
    return engine_of(
        folder,
        dtype,
        kv_block_size=16,
        kv_cache_memory=16 * 16 * bytes_per_token,
        max_step_tokens=32,
    )


def probed(engine: Engine, name: str, tenant: str, **options: Any) -> GenerationRequest:
    """The probed request under a name of its own; a tenant keeps prefixes apart."""
    return request(
        f"{name} {tenant}",
        engine.tokenizer(PROMPTS[name]).input_ids,
        max_tokens=NUM_NEW_TOKENS,
        sampling=SAMPLING[name],
        ignore_eos=True,
        tenant=tenant,
        **options,
    )


def neighbours(
    engine: Engine, count: int, tenant: str, seed: int, **options: Any
) -> list[GenerationRequest]:
    """Random tokens, lengths and sampling."""
    generator = random.Random(seed)
    return [
        request(
            f"neighbour {number} {tenant}",
            [generator.randrange(engine.info.vocab_size) for _ in range(generator.randint(2, 60))],
            max_tokens=generator.randint(4, NUM_NEW_TOKENS),
            sampling=generator.choice([GREEDY, SamplingParams(temperature=1.0, seed=number)]),
            mode=generator.choice(["on", "off"]),
            drafter="prompt_lookup",
            ignore_eos=True,
            tenant=tenant,
            **options,
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Reference:
    """A probed request alone: plain decoding, the prompt in one forward."""

    token_ids: list[int]
    logits: dict[int, torch.Tensor]


@cache
def alone(folder: Path, dtype: str) -> dict[str, Reference]:
    engine = engine_of(folder, dtype)
    found = {}
    for name in PROBED:
        item = probed(engine, name, "alone", mode="off")
        observed = observe(engine, [item])
        found[name] = Reference(
            observed.outcome.token_ids[item.request_id], observed.logits[item.request_id]
        )
    return found


def assert_same_bits(observed: Observed, request_id: str, reference: Reference) -> None:
    assert observed.outcome.token_ids[request_id] == reference.token_ids
    found = observed.logits[request_id]
    assert found.keys() == reference.logits.keys()
    assert len(found) == NUM_NEW_TOKENS
    for position, expected in reference.logits.items():
        assert torch.equal(found[position], expected), (request_id, position)


def assert_all_same_bits(folder: Path, dtype: str, observed: Observed, tenant: str) -> None:
    for name, reference in alone(folder, dtype).items():
        assert_same_bits(observed, f"{name} {tenant}", reference)


# ---- one test per thing that must not matter ------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_fifteen_random_neighbours_do_not_matter(smollm2: Path, dtype: str) -> None:
    engine = engine_of(smollm2, dtype)
    for name in PROBED:
        crowd = neighbours(engine, 15, f"crowd of {name}", seed=1)
        item = probed(engine, name, "in a crowd", mode="off")
        observed = observe(engine, [*crowd[:7], item, *crowd[7:]])
        assert max(len(step.rows) for step in observed.outcome.steps) == 16
        assert_same_bits(observed, item.request_id, alone(smollm2, dtype)[name])


@pytest.mark.parametrize("max_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_speculation_does_not_matter(
    smollm2: Path, dtype: str, drafter: str, max_draft_tokens: int
) -> None:
    engine = engine_of(smollm2, dtype)
    tenant = f"{drafter} {max_draft_tokens}"
    items = [
        probed(engine, name, tenant, drafter=drafter, max_draft_tokens=max_draft_tokens)
        for name in PROBED
    ]
    observed = observe(engine, items)
    stats = observed.outcome.stats.values()
    num_drafted = sum(s.num_draft_tokens for s in stats)
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    assert 0 < num_accepted <= num_drafted
    assert num_accepted < num_drafted or max_draft_tokens == 1
    assert max(len(s.drafted_per_position) for s in stats) == max_draft_tokens
    assert_all_same_bits(smollm2, dtype, observed, tenant)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_in_chunks_do_not_matter(
    smollm2: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(smollm2, dtype)
    monkeypatch.setattr(engine._scheduler, "max_step_tokens", 11)
    items = [probed(engine, name, "chunked", max_draft_tokens=4) for name in PROBED]
    observed = observe(engine, items)
    for item in items:
        chunks = [
            row.num_prefill_positions
            for step in observed.outcome.steps
            for row in step.rows
            if row.request_id == item.request_id and row.num_prefill_positions
        ]
        assert len(chunks) > 4
        assert sum(chunks) == len(item.prompt_token_ids)
    assert_all_same_bits(smollm2, dtype, observed, "chunked")


def long_requests(engine: Engine, tenant: str, **options: Any) -> list[GenerationRequest]:
    draw = random.Random(5)
    return [
        request(
            f"long {length} {tenant}",
            [draw.randrange(engine.info.vocab_size) for _ in range(length)],
            max_tokens=NUM_NEW_TOKENS,
            ignore_eos=True,
            tenant=tenant,
            **options,
        )
        for length in LONG
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompts_in_chunks_beside_each_other_do_not_matter(
    smollm2: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(LONG) + NUM_NEW_TOKENS
    engine = engine_of(smollm2, dtype, max_model_tokens=longest, max_step_tokens=longest)
    alone = [observe(engine, [item]) for item in long_requests(engine, "alone", mode="off")]
    monkeypatch.setattr(engine._scheduler, "max_step_tokens", 200)
    items = long_requests(engine, "together", max_draft_tokens=4)
    together = observe(engine, items, [0, 3, 5, 1])
    for item, observed in zip(items, alone, strict=True):
        [(request_id, logits)] = observed.logits.items()
        reference = Reference(observed.outcome.token_ids[request_id], logits)
        assert_same_bits(together, item.request_id, reference)


@pytest.mark.parametrize("make", [engine_of, small_engine], ids=["one-block-rows", "small-blocks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reused_prefix_does_not_matter(
    smollm2: Path, dtype: str, make: Callable[[Path, str], Engine]
) -> None:
    engine = make(smollm2, dtype)
    cold, warm = (
        observe(engine, [probed(engine, name, "reuse", max_draft_tokens=4) for name in PROBED])
        for _ in range(2)
    )
    for observed, is_warm in ((cold, False), (warm, True)):
        for stats in observed.outcome.stats.values():
            assert (stats.num_cached_prompt_tokens > 0) == is_warm
        assert_all_same_bits(smollm2, dtype, observed, "reuse")
    first, second = (
        {name: stats.acceptance_histogram for name, stats in observed.outcome.stats.items()}
        for observed in (cold, warm)
    )
    assert first == second


@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption_does_not_matter(smollm2: Path, dtype: str) -> None:
    engine = small_engine(smollm2, dtype)
    for name in PROBED:
        item = probed(engine, name, f"{name} preempted", priority=-50, max_draft_tokens=1)
        crowd = [
            request(f"crowd {n} {name}", range(n, n + 60), mode="off", ignore_eos=True, priority=50)
            for n in range(4)
        ]
        observed = observe(engine, [item, *crowd], [0, 4, 4, 4, 4])
        stats = observed.outcome.stats[item.request_id]
        assert stats.num_preemptions > 0
        assert stats.num_recomputed_tokens > 0
        assert_same_bits(observed, item.request_id, alone(smollm2, dtype)[name])


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_arrival_does_not_matter(smollm2: Path, dtype: str, order: int) -> None:
    engine = engine_of(smollm2, dtype)
    tenant = f"order {order}"
    generator = random.Random(order)
    requests = [probed(engine, name, tenant) for name in PROBED]
    requests += neighbours(engine, 4, tenant, seed=order)
    generator.shuffle(requests)
    arrivals = [generator.randrange(12) for _ in requests]
    assert_all_same_bits(smollm2, dtype, observe(engine, requests, arrivals), tenant)


def test_a_breach_would_be_seen(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: every layer of a batch leaks a trace of its mean into the tokens."""
    engine = engine_of(smollm2, "float32")
    block = engine._verifier.runner.model.model.layers[3].down_proj
    handle = block.register_forward_hook(
        lambda module, inputs, output: output + 1e-6 * output.mean(dim=1, keepdim=True)
    )
    try:
        observed = observe(engine, [probed(engine, name, "breach") for name in PROBED])
    finally:
        handle.remove()
    with pytest.raises(AssertionError):
        assert_all_same_bits(smollm2, "float32", observed, "breach")
