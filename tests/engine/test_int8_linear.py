"""Weights of 8 bits: the nearest there are, and a model of its own with every guarantee."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.int8_linear import Int8Linear, quantize_linears
from engine.loader import UnsupportedModelError
from tests.engine.driver import request, run, tiny_engine
from tests.engine.test_equality import SEEDED, prompts
from tests.marks import thorough
from tests.tiny import tiny_llama

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(48, 64, bias=bias)


@torch.inference_mode()
def test_every_weight_is_within_half_a_step_of_the_original() -> None:
    original = linear()
    original.weight[5] = 0.0
    quantized = Int8Linear.of(original)
    steps = original.weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((quantized.weight - original.weight).abs() <= steps / 2 + 1e-7).all()
    assert (quantized.weight[5] == 0).all()


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_the_rounded_weights(bias: bool) -> None:
    quantized = Int8Linear.of(linear(bias))
    x = torch.randn(2, 7, 48)
    expected = nn.functional.linear(x, quantized.weight, quantized.bias)
    assert (quantized.bias is not None) == bias
    torch.testing.assert_close(quantized(x), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_joined_layers_give_the_outputs_of_each() -> None:
    parts = [Int8Linear.of(linear()), Int8Linear.of(linear())]
    x = torch.randn(1, 5, 48)
    expected = torch.cat([part(x) for part in parts], dim=-1)
    assert torch.equal(Int8Linear.joined(parts)(x), expected)


def generated(dtype: torch.dtype, num_prompts: int, max_tokens: int) -> list[list[int]]:
    """transformers' greedy tokens of the model with rounded weights."""
    model: Any = tiny_llama(dtype=dtype)
    quantize_linears("tiny", model)
    outputs = []
    for prompt in prompts(num_prompts):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model"])
def test_in_a_batch_with_drafts_the_tokens_are_those_of_the_rounded_model_alone(
    drafter: str,
) -> None:
    engine = tiny_engine(quantization="int8", drafters=(drafter,), max_num_rows=4)
    assert (engine.info.guarantee, engine.info.quantization) == ("bit_exact", "int8")
    outcome = run(engine, [request(str(n), p, max_tokens=24) for n, p in enumerate(prompts(6))])
    expected = generated(torch.float32, 6, 24)
    assert [outcome.token_ids[str(n)] for n in range(6)] == expected
    assert sum(stats.num_accepted_tokens for stats in outcome.stats.values()) > 0
    plain = tiny_engine(max_num_rows=4)
    whole = run(plain, [request(str(n), p, max_tokens=24) for n, p in enumerate(prompts(6))])
    assert [whole.token_ids[str(n)] for n in range(6)] != expected  # it is another model


@pytest.mark.parametrize("dtype", [thorough(torch.float32), torch.bfloat16], ids=["fp32", "bf16"])
def test_a_seeded_request_is_the_same_alone_and_among_neighbours(dtype: torch.dtype) -> None:
    engine = tiny_engine(quantization="int8", dtype=dtype, max_num_rows=8, is_measured=True)
    assert engine.info.guarantee == "bit_exact"
    wanted = [request(str(n), p, max_tokens=20, sampling=SEEDED) for n, p in enumerate(prompts(8))]
    together = run(engine, wanted).token_ids
    for each in wanted:
        alone = tiny_engine(quantization="int8", dtype=dtype, max_num_rows=1)
        assert run(alone, [each]).token_ids[each.request_id] == together[each.request_id]


def test_a_model_elsewhere_than_on_a_cpu_is_refused_by_name() -> None:
    elsewhere: Any = tiny_llama()
    elsewhere.to("meta")
    with pytest.raises(UnsupportedModelError, match="tiny: quantization 'int8' needs a CPU"):
        quantize_linears("tiny", elsewhere)


def test_shards_are_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(ValueError, match="tensor_parallel: needs quantization 'none'"):
        EngineConfig(target="tiny", tensor_parallel=2, quantization="int8")
