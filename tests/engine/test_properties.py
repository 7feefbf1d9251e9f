"""Whatever arrives, in whatever order: the invariants hold after every step, and the tokens and
their logprobs have the bits of the target decoding alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import FinishReason, SamplingParams
from tests.engine.driver import Outcome, request, run, tiny_engine
from tests.tiny import VOCAB_SIZE

MAX_TOKENS = 64
Mixture = tuple[list[dict[str, Any]], int, int, tuple[str, int | None, int], int]


@cache
def reference_engine(dtype: torch.dtype) -> Engine:
    return tiny_engine(dtype=dtype, max_num_rows=1, max_model_tokens=256)


@cache
def alone(
    prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams, dtype: torch.dtype
) -> list[tuple[int, float]]:
    """Plain decoding, one request, nothing cached before it: each token and its logprob."""
    tenant = f"{hash((prompt, max_tokens, sampling))}"
    item = request("a", prompt, max_tokens=max_tokens, sampling=sampling, mode="off", tenant=tenant)
    return emitted(run(reference_engine(dtype), [item]), "a")


def emitted(outcome: Outcome, request_id: str) -> list[tuple[int, float]]:
    found = [
        (item.token_id, item.logprob)
        for delta in outcome.deltas
        if delta.request_id == request_id
        for item in delta.logprobs
    ]
    assert [token_id for token_id, _ in found] == outcome.token_ids.get(request_id, [])
    return found


prompts = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=70),
    st.lists(st.integers(3, 9), min_size=1, max_size=5).map(lambda part: (part * 12)[:50]),
)
samplings = st.sampled_from(
    [
        replace(params, num_top_logprobs=0)
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.7, seed=1),
            SamplingParams(temperature=1.3, seed=2, top_k=12, top_p=0.9),
            SamplingParams(temperature=1.0, seed=3, min_p=0.05, repetition_penalty=1.3),
            SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.4),
            SamplingParams(temperature=0.9, seed=4, typical_p=0.8, logit_bias=((5, 3.0),)),
        )
    ]
)
arrivals = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "sampling": samplings,
        "max_tokens": st.integers(1, 20),
        "mode": st.sampled_from(["off", "on", "auto"]),
        "max_draft_tokens": st.sampled_from([None, 0, 1, 3, 8]),
        "at_step": st.integers(0, 12),
        "cancel_after": st.one_of(st.none(), st.integers(0, 15)),
        "priority": st.integers(-2, 2),
        "tenant": st.sampled_from(["red", "blue"]),
        "drafter": st.sampled_from([None, "prompt_lookup", "draft_model"]),
    }
)


mixtures = st.tuples(
    st.lists(arrivals, min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([8, 19, 64, 512]),
    st.sampled_from(
        [
            ("ragged", None, 0),
            ("ragged", 16, 0),
            ("ragged", 16, 17),
            ("ragged", 16, 24),
            ("ragged", 48, 8),
            ("aligned", None, 0),
            ("grouped", None, 0),
        ]
    ),
    st.sampled_from([1, 4, 9]),
)


def many(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@many(12)
@given(mixtures)
def test_any_mixture_equals_the_target_alone(mixture: Mixture) -> None:
    holds(torch.float32, *mixture)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.timeout(900)
@many(40)
@given(mixtures)
def test_any_of_many_mixtures_equals_the_target_alone(dtype: torch.dtype, mixture: Mixture) -> None:
    holds(dtype, *mixture)


def holds(
    dtype: torch.dtype,
    planned: list[dict[str, Any]],
    num_rows: int,
    max_step_tokens: int,
    cache_layout: tuple[str, int | None, int],
    max_draft_tokens: int,
) -> None:
    layout, block_size, num_blocks = cache_layout
    assume(layout == "ragged" or dtype == torch.float32)  # the others promise rounding
    options: dict[str, object] = {}
    if num_blocks:
        bytes_per_token = 2 * 2 * 2 * (2 * 8) * dtype.itemsize  # two models
        options["kv_cache_memory"] = num_blocks * (block_size or 0) * bytes_per_token + 1
    engine = tiny_engine(
        dtype=dtype,
        drafters=("prompt_lookup", "draft_model"),
        max_num_rows=num_rows,
        max_step_tokens=max_step_tokens,
        max_model_tokens=256,
        max_draft_tokens=max_draft_tokens,
        kv_block_size=block_size,
        layout=layout,
        **options,
    )
    outcome = Outcome()
    for step in range(2000):
        for number, item in enumerate(planned):
            if item["at_step"] == step:
                keys = ("prompt", "sampling", "max_tokens", "mode", "max_draft_tokens")
                more = ("priority", "tenant", "drafter")
                engine.submit(request(str(number), **{key: item[key] for key in (*keys, *more)}))
            after = item["cancel_after"]
            if after is not None and item["at_step"] + after == step:
                engine.cancel(str(number))
        outcome.add_step(engine)
        if step > 12 and not engine.has_work():
            break
    assert len(outcome.stats) == len(planned)
    for number, item in enumerate(planned):
        stats, got = outcome.stats[str(number)], emitted(outcome, str(number))
        expected = alone(tuple(item["prompt"]), item["max_tokens"], item["sampling"], dtype)
        if engine.info.guarantee != "bit_exact":
            got, expected = (
                [(token_id, 0.0) for token_id, _ in pairs] for pairs in (got, expected)
            )
        if stats.finish_reason is FinishReason.CANCELLED:
            assert got == expected[: len(got)]
        else:
            assert got == expected
        identity = stats.num_plain_steps + stats.num_verify_steps - stats.num_cut_tokens
        assert stats.num_output_tokens == identity + stats.num_emitted_accepted_tokens
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
    pool = engine._scheduler.cache.pool
    assert pool.num_available == pool.num_blocks
