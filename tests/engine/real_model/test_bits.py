"""SmolLM2-135M: a request's logits and tokens have the same bits whatever happens around it.

Every test compares with the request decoded alone, plainly, its prompt in one forward.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.engine import Engine
from tests.engine.driver import request
from tests.engine.real_model.engines import DTYPES, engine_of, small_engine
from tests.engine.real_model.observation import observe
from tests.engine.real_model.requests import (
    LONG,
    NUM_NEW_TOKENS,
    PROBED,
    Reference,
    alone,
    assert_all_same_bits,
    assert_same_bits,
    long_requests,
    neighbours,
    probed,
)

# The first test of an engine loads and probes it, which takes long on a busy machine.
pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


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
