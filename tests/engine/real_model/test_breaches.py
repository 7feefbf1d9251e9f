"""Planted in SmolLM2-135M's forward, what breaks the promise is seen by the tests and the probe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.engine import Engine
from engine.layout.plan import PACKED_PADDING, Padding
from engine.probe import probe_guarantee
from tests.engine.real_model.engines import DTYPES, engine_of
from tests.engine.real_model.observation import Observed, observe
from tests.engine.real_model.requests import PROBED, alone, assert_same_bits, neighbours, probed

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

Plant = Callable[[Engine, pytest.MonkeyPatch], None]


def one_token_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for single tokens adds in two halves; with the padding as it is it never runs."""
    layer = engine._verifier.runner.model.model.layers[3].down_proj
    packed, weight = layer.forward, layer.weight
    half = weight.shape[1] // 2

    def product(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-2] > 1:
            result: torch.Tensor = packed(hidden)
            return result
        left = F.linear(hidden[..., :half], weight[:, :half])
        return left + F.linear(hidden[..., half:], weight[:, half:])

    monkeypatch.setattr(layer, "forward", product)
    assert probe_guarantee(engine._verifier.runner) == "bit_exact"
    padding = Padding(1, PACKED_PADDING.query_rows, PACKED_PADDING.keys)
    monkeypatch.setattr(engine._verifier.runner, "padding", padding)


def unpadded_keys(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    padding = Padding(PACKED_PADDING.tokens, PACKED_PADDING.query_rows, 1)
    monkeypatch.setattr(engine._verifier.runner, "padding", padding)


def a_dropped_mask(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every key that a row has is visible to it: the same values by another kernel."""
    attend = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        mask = options["attn_mask"]
        num_visible = int((mask[0, 0, 0] == 0).sum())
        if query.shape[0] == 1 and bool((mask[..., :num_visible] == 0).all()):
            key, value, options["attn_mask"] = (
                key[:, :, :num_visible],
                value[:, :, :num_visible],
                None,
            )
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


def a_trace_of_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer leaks a trace of the batch's mean into every token."""
    layer = engine._verifier.runner.model.model.layers[3].down_proj
    forward = layer.forward

    def leak(hidden: torch.Tensor) -> torch.Tensor:
        output = forward(hidden)
        return output + 1e-2 * output.mean(dim=-2, keepdim=True)

    monkeypatch.setattr(layer, "forward", leak)


@pytest.mark.parametrize(
    "plant", [one_token_alone, unpadded_keys, a_dropped_mask, a_trace_of_the_others]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_breach_is_seen_and_the_probe_promises_rounding(
    smollm2: Path, dtype: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(smollm2, dtype)
    tenant = plant.__name__
    requests = [probed(engine, name, f"{tenant} together") for name in PROBED]
    crowd = neighbours(engine, 3, tenant, seed=2)
    with monkeypatch.context() as planted:
        plant(engine, planted)
        assert probe_guarantee(engine._verifier.runner) == "rounding"
        together = observe(engine, [*requests, *crowd], [0, 6, 9, 9, 9])
        by_itself = observe(engine, [probed(engine, PROBED[0], f"{tenant} by itself", mode="off")])
    assert not (
        has_same_bits(smollm2, dtype, together, f"{tenant} together")
        and has_same_bits(smollm2, dtype, by_itself, f"{tenant} by itself")
    )
    sound = observe(engine, [probed(engine, name, f"after {tenant}") for name in PROBED])
    assert has_same_bits(smollm2, dtype, sound, f"after {tenant}")


def has_same_bits(folder: Path, dtype: str, observed: Observed, tenant: str) -> bool:
    """Of every request of the tenant that was observed."""
    names = [name for name in PROBED if f"{name} {tenant}" in observed.logits]
    assert names
    try:
        for name in names:
            assert_same_bits(observed, f"{name} {tenant}", alone(folder, dtype)[name])
    except AssertionError:
        return False
    return True
