"""Lean layers compute what transformers' own layers compute, and are called as they are."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.drafter.head.tap import HiddenStateTap
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.plan import PACKED_PADDING
from engine.lean_layers import LeanLayer, can_be_lean, make_lean
from engine.model_runner import ModelRunner
from engine.packed_linear import pack_linears
from engine.probe import probe_guarantee
from engine.rotary_table import RotaryTable
from tests.engine.test_models import SERVED, build
from tests.tiny import tiny_llama

LEAN = [
    "llama",
    "llama, one key head, tied",
    "llama 3 rope",
    "llama, yarn",
    "qwen2, tied",
    "qwen2, window in its upper layers",
    "qwen3, heads wider than the model",
    "mistral, window",
]
NUM_TOKENS = 40  # longer than the window
TOKEN_IDS = torch.arange(5, 5 + 2 * NUM_TOKENS).view(2, NUM_TOKENS)


def logits(model: Any, **options: object) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=TOKEN_IDS, **options).logits
    return found


@pytest.mark.parametrize("name", LEAN)
def test_a_lean_model_gives_the_models_own_logits_and_generates_its_tokens(name: str) -> None:
    model: Any = build(*SERVED[name])
    expected = logits(model)
    generated = model.generate(TOKEN_IDS[:1], max_new_tokens=20, do_sample=False)
    assert can_be_lean(model)
    make_lean(model, 128)
    assert all(type(layer) is LeanLayer for layer in model.model.layers)
    torch.testing.assert_close(
        logits(model), expected, rtol=1e-4, atol=1e-4 * float(expected.std())
    )
    # A cache of keys and values, a mask, steps of one token.
    got = model.generate(TOKEN_IDS[:1], max_new_tokens=20, do_sample=False)
    assert torch.equal(got, generated)


@pytest.mark.parametrize(
    "name", ["gemma", "phi 3", "gpt-2", "llama, dynamic rope within its context"]
)
def test_what_a_lean_layer_does_not_compute_is_left_as_it_is(name: str) -> None:
    assert not can_be_lean(build(*SERVED[name]))


def test_projections_of_which_only_some_have_a_bias_are_left_as_they_are() -> None:
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.v_proj = nn.Linear(32, attention.v_proj.out_features, bias=True)
    assert not can_be_lean(model)


def test_a_lean_model_is_not_made_lean_again() -> None:
    model = tiny_llama()
    make_lean(model, 64)
    assert not can_be_lean(model)


def test_hidden_states_that_enter_a_lean_layer_can_be_tapped() -> None:
    model = tiny_llama(num_layers=4)
    expected = model(input_ids=TOKEN_IDS, output_hidden_states=True).hidden_states
    make_lean(model, 64)
    tap = HiddenStateTap(model, (1, 2, 3))
    logits(model)
    torch.testing.assert_close(tap.take(), torch.cat(expected[1:4], -1), rtol=1e-3, atol=1e-3)


def runner_of(model: Any) -> ModelRunner:
    shape = KVCacheShape(2, 2, 8, 8, model.dtype, model.device)
    cache = KVCache(shape, max_num_rows=4, max_tokens=256, num_blocks=4)
    return ModelRunner(model, cache, PACKED_PADDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_tokens_bits_do_not_depend_on_its_company(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    make_lean(model, 256)
    pack_linears(model)
    assert probe_guarantee(runner_of(model)) == "bit_exact"


def test_a_norm_that_looks_at_the_company_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    make_lean(model, 256)
    pack_linears(model)
    norm = model.model.layers[1].mlp_norm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: forward(x + 1e-4 * x.mean()))
    assert probe_guarantee(runner_of(model)) == "rounding"


def test_angles_are_looked_up_as_they_would_be_computed() -> None:
    rotary = tiny_llama().model.rotary_emb
    x, positions = torch.zeros(1, 3, 32), torch.tensor([[7, 0, 255]])
    cos, sin = rotary(x, position_ids=positions)
    for num_positions in (256, 100_000):  # held, and too many to be held
        found_cos, found_sin = RotaryTable(rotary, num_positions)(x, position_ids=positions)
        assert torch.equal(found_cos, cos.unsqueeze(2))
        signed = torch.cat((-sin[..., :4], sin[..., 4:]), dim=-1)
        assert torch.equal(found_sin, signed.unsqueeze(2))


def test_a_position_beyond_the_table_is_an_error() -> None:
    table = RotaryTable(tiny_llama().model.rotary_emb, 16)
    with pytest.raises(IndexError):
        table(torch.zeros(1, 1, 32), position_ids=torch.tensor([[16]]))
