"""The engine's tokens are those of the target decoding alone."""

import random
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch

from engine import model_runner
from engine.layout.grouping import AttentionCosts
from engine.layout.plan import ForwardPlan
from engine.planned_attention import PlannedAttention
from engine.request import AcceptanceRule, SamplingParams
from tests.engine.driver import GREEDY, request, run, tiny_engine
from tests.marks import thorough
from tests.tiny import VOCAB_SIZE, related_draft, tiny_llama

BATCH_SIZES = (thorough(1), 2, thorough(5), 8)
DRAFTERS = (("prompt_lookup",), ("draft_model",), thorough(("prompt_lookup", "draft_model")))
SEEDED = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, seed=7)


@cache
def prompts(count: int) -> list[list[int]]:
    """Mixed lengths; every third one repeats itself, so that lookup finds something."""
    generator = random.Random(count)
    found = []
    for number in range(count):
        length = generator.choice([1, 3, 17, 40, 90, 140])
        prompt = [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]
        found.append((prompt[:6] * 12)[:60] if number % 3 == 2 else prompt)
    return found


@cache
def generated(count: int, max_tokens: int) -> list[list[int]]:
    """What transformers' own generate says, one prompt at a time."""
    model = tiny_llama()
    found = []
    for prompt in prompts(count):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


@cache
def alone(max_tokens: int, dtype: torch.dtype, sampling: SamplingParams) -> list[list[int]]:
    """Our own plain decoding, one request at a time."""
    found = []
    for number, prompt in enumerate(prompts(8)):
        engine = tiny_engine(dtype=dtype, max_num_rows=1)
        outcome = run(
            engine,
            [request(f"{number}", prompt, max_tokens=max_tokens, sampling=sampling, mode="off")],
        )
        found.append(outcome.token_ids[f"{number}"])
    return found


@pytest.mark.parametrize("block_size", [None, 16], ids=["one-block-rows", "small-blocks"])
@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_greedy_tokens_equal_generate_in_fp32(
    batch_size: int, drafters: tuple[str, ...], block_size: int | None
) -> None:
    engine = tiny_engine(
        drafters=drafters, max_num_rows=batch_size, max_step_tokens=96, kv_block_size=block_size
    )
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    if "draft_model" in drafters:
        stats = outcome.stats.values()
        assert (
            0 < sum(s.num_accepted_tokens for s in stats) < sum(s.num_draft_tokens for s in stats)
        )


@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_tokens_equal_our_plain_decoding_alone(
    batch_size: int, dtype: torch.dtype, sampling: SamplingParams, drafters: tuple[str, ...]
) -> None:
    engine = tiny_engine(
        dtype=dtype, drafters=drafters, max_num_rows=batch_size, max_step_tokens=64
    )
    if engine.info.guarantee != "bit_exact":
        pytest.skip("this machine's kernels do not keep bits")
    outcome = run(
        engine,
        [request(str(n), p, max_tokens=24, sampling=sampling) for n, p in enumerate(prompts(8))],
    )
    assert [outcome.token_ids[str(n)] for n in range(8)] == alone(24, dtype, sampling)


@pytest.mark.parametrize("block_size", [None, 16], ids=["one-block-rows", "small-blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tokens_do_not_depend_on_which_rows_attend_together(
    dtype: torch.dtype, block_size: int | None
) -> None:
    """Every difference of context length is worth a call of its own here."""
    long = [[7 + n % 90 for n in range(length)] for length in (40, 300, 140, 20)]
    requests = [
        request(str(n), p, max_tokens=20, sampling=SEEDED, ignore_eos=True)
        for n, p in enumerate(long)
    ]
    options = {"dtype": dtype, "max_model_tokens": 512, "kv_block_size": block_size}
    together = tiny_engine(max_num_rows=4, **options)
    split = tiny_engine(max_num_rows=4, **options)
    split._verifier.runner.attention_costs = AttentionCosts(0.0, 1.0)
    num_groups: list[int] = []
    plan_forward = model_runner.plan_forward

    def counted(*arguments: object) -> ForwardPlan:
        plan = plan_forward(*arguments)  # type: ignore[arg-type]
        num_groups.append(len(plan.groups))
        return plan

    with mock.patch.object(model_runner, "plan_forward", counted):
        expected = run(together, requests).token_ids
        num_together = sum(num_groups)
        num_groups.clear()
        assert run(split, requests).token_ids == expected
    assert sum(num_groups) > num_together


@pytest.mark.parametrize("max_draft_tokens", [1, thorough(2), 7, thorough(16)])
def test_tokens_do_not_depend_on_the_number_of_drafts(max_draft_tokens: int) -> None:
    engine = tiny_engine(
        drafters=("draft_model",), max_draft_tokens=max_draft_tokens, max_num_rows=4
    )
    outcome = run(
        engine,
        [request(str(n), p, max_tokens=24, sampling=SEEDED) for n, p in enumerate(prompts(8))],
    )
    assert [outcome.token_ids[str(n)] for n in range(8)] == alone(24, torch.float32, SEEDED)


def test_a_perfect_drafter_is_accepted_in_full_with_a_bonus_token_each_step() -> None:
    target = tiny_llama()
    draft = related_draft(target, noise=0.0)
    engine = tiny_engine(target=target, draft=draft, drafters=("draft_model",), max_draft_tokens=4)
    outcome = run(
        engine, [request("a", prompts(8)[3], max_tokens=26, ignore_eos=True, sampling=SEEDED)]
    )
    stats = outcome.stats["a"]
    # One token from the prompt's own step, then K + 1 = 5 per verification.
    assert (stats.num_verify_steps, stats.num_accepted_tokens) == (5, 20)
    assert stats.acceptance_histogram == (0, 0, 0, 0, 5)


@pytest.mark.parametrize("sampling", [thorough(GREEDY), SEEDED], ids=["greedy", "seeded"])
def test_acceptance_of_a_request_does_not_depend_on_its_neighbours(
    sampling: SamplingParams,
) -> None:
    def accepted(num_rows: int) -> list[tuple[int, ...]]:
        engine = tiny_engine(drafters=("draft_model",), max_num_rows=num_rows, max_step_tokens=4096)
        outcome = run(
            engine,
            [
                request(str(n), p, max_tokens=24, sampling=sampling)
                for n, p in enumerate(prompts(16))
            ],
        )
        return [outcome.stats[str(n)].acceptance_histogram for n in range(16)]

    assert accepted(16) == accepted(1)


@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
def test_rejection_rows_and_coupled_rows_share_a_batch(drafters: tuple[str, ...]) -> None:
    by_rejection = SamplingParams(temperature=0.8, seed=3, acceptance_rule=AcceptanceRule.REJECTION)
    engine = tiny_engine(drafters=drafters, max_num_rows=8)
    outcome = run(
        engine,
        [
            request(str(n), p, max_tokens=24, sampling=by_rejection if n % 2 else SEEDED)
            for n, p in enumerate(prompts(8))
        ],
    )
    expected = alone(24, torch.float32, SEEDED)
    for number in range(0, 8, 2):
        assert outcome.token_ids[str(number)] == expected[number]
    for number in range(1, 8, 2):
        assert outcome.stats[str(number)].num_output_tokens >= 1


def test_a_stale_slot_that_became_visible_would_change_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted bug: one key too many is visible to every row."""
    mask = PlannedAttention._mask

    def mask_with_a_hole(self, index, group, fold, window, dtype):  # type: ignore[no-untyped-def]
        return mask(self, index, _moved_on(group), fold, window, dtype)

    engine = tiny_engine(max_num_rows=4)
    monkeypatch.setattr(PlannedAttention, "_mask", mask_with_a_hole)
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    assert [outcome.token_ids[str(n)] for n in range(8)] != generated(8, 30)


def _moved_on(group):  # type: ignore[no-untyped-def]
    return replace(group, positions=group.positions + 1)
