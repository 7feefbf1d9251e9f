"""Logprobs are those of the model's own logits, whatever speculation did."""

import pytest
import torch

from engine.request import SamplingParams, TokenLogprob
from tests.engine.driver import request, run, tiny_engine
from tests.engine.test_equality import prompts
from tests.tiny import tiny_llama


def teacher_forced(token_ids: list[int]) -> torch.Tensor:
    """[T - 1, V]: log probabilities of the token after each position."""
    with torch.inference_mode():
        logits = tiny_llama()(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, dim=-1)[:-1]


def check(found: tuple[TokenLogprob, ...], expected: torch.Tensor, num_top: int) -> None:
    assert len(found) == len(expected)
    for item, logprobs in zip(found, expected, strict=True):
        assert item.logprob == pytest.approx(float(logprobs[item.token_id]), abs=1e-4)
        assert len(item.top) == num_top
        values = [value for _, value in item.top]
        best = torch.topk(logprobs, max(num_top, 1)).values[:num_top].tolist()
        assert values == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("drafters", [("prompt_lookup",), ("draft_model",)], ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_emitted_tokens_equal_teacher_forcing(
    temperature: float, drafters: tuple[str, ...], num_top: int
) -> None:
    engine = tiny_engine(drafters=drafters, max_num_rows=8)
    sampling = SamplingParams(temperature=temperature, top_k=40, seed=5, num_top_logprobs=num_top)
    outcome = run(
        engine,
        [request(str(n), p, sampling=sampling) for n, p in enumerate(prompts(8))]
        + [request("none", prompts(8)[0])],
    )
    for number, prompt in enumerate(prompts(8)):
        deltas = [d for d in outcome.deltas if d.request_id == str(number)]
        found = tuple(item for delta in deltas for item in delta.logprobs)
        token_ids = outcome.token_ids[str(number)]
        assert [item.token_id for item in found] == token_ids
        check(found, teacher_forced([*prompt, *token_ids])[len(prompt) - 1 :], num_top)
    assert all(not d.logprobs for d in outcome.deltas if d.request_id == "none")


@pytest.mark.parametrize("max_step_tokens", [16, 512])
@pytest.mark.parametrize("block_size", [None, 16])
def test_logprobs_of_the_prompt_come_with_the_first_delta(
    block_size: int | None, max_step_tokens: int
) -> None:
    engine = tiny_engine(max_num_rows=4, max_step_tokens=max_step_tokens, kv_block_size=block_size)
    sampling = SamplingParams(temperature=0, num_top_logprobs=2, prompt_logprobs=True)
    items = [request(f"{n}", p, sampling=sampling, max_tokens=5) for n, p in enumerate(prompts(6))]
    plain = [request(f"plain{n}", p, max_tokens=5) for n, p in enumerate(prompts(6))]
    outcome = run(engine, [item for pair in zip(plain, items, strict=True) for item in pair])
    for number, prompt in enumerate(prompts(6)):
        first, *later = [d for d in outcome.deltas if d.request_id == str(number)]
        assert [item.token_id for item in first.prompt_logprobs] == prompt[1:]
        expected = teacher_forced([*prompt, 0])[: len(prompt) - 1]
        check(first.prompt_logprobs, expected, 2)
        assert not any(delta.prompt_logprobs for delta in later)
        assert outcome.token_ids[str(number)] == outcome.token_ids[f"plain{number}"]
