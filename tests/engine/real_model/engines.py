"""Engines around SmolLM2-135M, made once each, and a draft model made from it."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.loader import LoadedModel, describe_model, load_model

DTYPES = ("float32", "bfloat16")
SKIPPED_LAYERS = range(12, 20)  # of 30; what is left agrees with the target now and then


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
