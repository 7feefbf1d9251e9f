"""Architectures: each is served with the tokens of transformers' own `generate`, or refused.

The models are tiny and random, with weights wide enough apart that an argmax is no tie.
"""

import inspect
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.loader import UnsupportedModelError, load_model
from tests.engine.driver import request, run, tiny_engine
from tests.tiny import VOCAB_SIZE, tiny_llama, tiny_tokenizer

NUM_NEW_TOKENS = 30
WINDOW = 24  # shorter than two of the prompts

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}

# name: (model type, what differs from COMMON)
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, dynamic rope within its context": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in its upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3, heads wider than the model": ("qwen3", {"head_dim": 16}),
    "mistral, window": ("mistral", {"head_dim": 8, "sliding_window": WINDOW}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma 2": (
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma 3": (
        "gemma3_text",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
    ),
    "phi 3": ("phi3", {"pad_token_id": 0}),
    "phi 3, window": ("phi3", {"pad_token_id": 0, "sliding_window": WINDOW}),
    "gpt-2": ("gpt2", GPT),
    "gpt-2, tied": ("gpt2", {**GPT, "tie_word_embeddings": True}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-j": ("gptj", {**GPT, "rotary_dim": 8}),
    "gpt-bigcode, one key head": ("gpt_bigcode", GPT),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3, "pad_token_id": 0}),
    "glm-4": ("glm4", {"head_dim": 8, "pad_token_id": 0}),
    "cohere 2, window": ("cohere2", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "olmo 3, window": ("olmo3", {"sliding_window": WINDOW}),
    "smollm 3, some layers without positions": (
        "smollm3",
        {"pad_token_id": 0, "no_rope_layer_interval": 2},
    ),
    "starcoder 2, window": ("starcoder2", {"sliding_window": WINDOW}),
    "granite": ("granite", {"attention_multiplier": 0.2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen 3 experts": ("qwen3_moe", {**EXPERTS, "head_dim": 8}),
    "deepseek 3": ("deepseek_v3", LATENT),
    "gpt-oss, sinks": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

# name: (model type, what differs from COMMON, the engine's options, what the refusal says)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "falcon": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {},
        "computes its attention itself",
    ),
    "falcon, alibi": ("falcon", {"alibi": True}, {}, "computes its attention itself"),
    "bloom, alibi": ("bloom", {"n_head": 4, "n_layer": 3}, {}, "computes its attention itself"),
    "mamba": ("mamba", {"state_size": 4}, {}, "recurrent"),
    "jamba": ("jamba", {}, {}, "recurrent"),
    "qwen 3 next": ("qwen3_next", {}, {}, "recurrent"),
    "lfm 2, convolutions": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"]},
        {},
        "1 of its 3 layers use attention",
    ),
    "bert, sees the future": ("bert", {"pad_token_id": 0}, {}, "our logits differ"),
    "llama 4, attention in chunks": (
        "llama4_text",
        {
            "num_local_experts": 2,
            "head_dim": 8,
            "attention_chunk_size": 64,
            "intermediate_size_mlp": 32,
            "pad_token_id": 0,
        },
        {},
        "set max_model_tokens to 64",
    ),
    "phi 3, longrope": (
        "phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        },
        {},
        "set max_model_tokens to 64",
    ),
    "diffllama, differential attention": ("diffllama", {}, {}, "our logits differ"),
}


def build(
    kind: str, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The same weights every time."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**COMMON, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # zero otherwise, and then never missed
                parameter.normal_(0.0, 0.1, generator=generator)
    return model.to(dtype).eval()


def with_noise(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model that agrees with the model often but not always."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return model


@cache
def prompts() -> list[list[int]]:
    """Mixed lengths; the second repeats itself, so that lookup finds something."""
    generator = random.Random(3)
    found = [[generator.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (3, 8, 61)]
    found[1] = found[1] * 5
    return found


def generated(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", SERVED)
def test_tokens_equal_generate_in_fp32(name: str) -> None:
    model = build(*SERVED[name])
    expected = generated(model)
    assert len({token for tokens in expected for token in tokens}) > 15, "a model of few words"
    engine = tiny_engine(
        target=model,
        draft=with_noise(build(*SERVED[name])),
        drafters=("prompt_lookup", "draft_model"),
        max_num_rows=3,
        max_step_tokens=48,
    )
    for mode in ("on", "off"):
        outcome = run(
            engine,
            [
                request(f"{mode}{n}", prompt, max_tokens=NUM_NEW_TOKENS, mode=mode, ignore_eos=True)
                for n, prompt in enumerate(prompts())
            ],
        )
        assert [outcome.token_ids[f"{mode}{n}"] for n in range(3)] == expected
        stats = outcome.stats.values()
        assert any(s.num_accepted_tokens for s in stats) == (mode == "on")
        assert any(s.num_accepted_tokens < s.num_draft_tokens for s in stats) == (mode == "on")


OWN_ATTENTION = ("falcon", "falcon, alibi", "bloom, alibi", "diffllama, differential attention")
PLAIN = ("gpt-2", "opt", "gpt-bigcode, one key head", "mistral, window", "gemma 2")
PLAIN += ("gpt-oss, sinks", "deepseek 3")


@pytest.mark.parametrize("name", [*OWN_ATTENTION, *PLAIN])
@pytest.mark.thorough
def test_over_a_plain_cache_any_attention_is_served_with_the_tokens_of_generate(name: str) -> None:
    kind, changes = (SERVED.get(name) or REFUSED[name])[:2]
    model = build(kind, changes)
    expected = generated(model)
    engine = tiny_engine(
        target=model,
        draft=tiny_llama(),
        drafters=("prompt_lookup", "draft_model"),
        layout="aligned",
        max_num_rows=3,
        max_step_tokens=48,
    )
    outcome = run(
        engine,
        [
            request(str(n), prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
            for n, prompt in enumerate(prompts())
        ],
    )
    assert [outcome.token_ids[str(n)] for n in range(3)] == expected
    assert all(s.num_draft_tokens > 0 for s in outcome.stats.values())


@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen 3 next", "lfm 2, convolutions"])
def test_what_is_no_cache_of_keys_is_refused_in_every_layout(name: str) -> None:
    kind, changes, options, _ = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match="recurrent or hybrid layers"):
        tiny_engine(target=build(kind, changes), layout="aligned", **options)


@pytest.mark.parametrize("argument", ["attention_mask", "position_ids"])
def test_a_model_that_does_not_heed_what_tells_rows_apart_is_refused(argument: str) -> None:
    """Planted: alone such a model is right, beside a longer row it is not."""
    model = build("llama", {})
    forward = model.forward

    def careless(**arguments: Any) -> Any:
        given = arguments.get(argument)
        if given is not None and len(given) > 1:
            is_mask = argument == "attention_mask"
            arguments[argument] = torch.ones_like(given) if is_mask else given // 2
        return forward(**arguments)

    careless.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = careless  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="our logits differ"):
        tiny_engine(target=model, layout="aligned")


@pytest.mark.thorough
@pytest.mark.parametrize("name", SERVED)
def test_tokens_in_bf16_equal_our_plain_decoding_alone(name: str) -> None:
    engine = tiny_engine(target=build(*SERVED[name], torch.bfloat16), max_num_rows=3)
    if engine.info.guarantee != "bit_exact":
        pytest.skip(f"{name}: this machine's kernels do not keep bits")
    together = run(
        engine,
        [
            request(str(n), prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
            for n, prompt in enumerate(prompts())
        ],
    )
    single = tiny_engine(
        target=build(*SERVED[name], torch.bfloat16), max_num_rows=1, max_step_tokens=16
    )
    for n, prompt in enumerate(prompts()):
        alone = run(
            single,
            [request(str(n), prompt, max_tokens=NUM_NEW_TOKENS, mode="off", ignore_eos=True)],
        )
        assert alone.token_ids[str(n)] == together.token_ids[str(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen 3 experts", "deepseek 3", "gpt-oss, sinks"])
def test_experts_keep_bits_where_dense_layers_do(name: str, dtype: torch.dtype) -> None:
    dense = tiny_engine(target=build("llama", {}, dtype), is_measured=True).info.guarantee
    assert tiny_engine(target=build(*SERVED[name], dtype), is_measured=True).info.guarantee == dense


def test_experts_that_see_any_number_of_tokens_are_only_promised_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated: the product of fewer than four tokens takes another kernel."""
    grouped_mm = F.grouped_mm

    def by_tokens(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        result = grouped_mm(x, weight, offs=offs)
        counts = torch.diff(offs, prepend=offs.new_zeros(1))
        is_few = (counts < 4).repeat_interleave(counts)
        return result * (1 + 1e-6 * is_few[:, None])

    monkeypatch.setattr(F, "grouped_mm", by_tokens)
    padded = tiny_engine(target=build(*SERVED["mixtral"]), is_measured=True).info.guarantee
    monkeypatch.setattr("engine.model_runner.pad_experts", lambda model, multiple: None)
    assert (
        tiny_engine(target=build(*SERVED["mixtral"]), is_measured=True).info.guarantee == "rounding"
    )
    assert padded == tiny_engine(target=build("llama", {}), is_measured=True).info.guarantee


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    name: str, dtype: torch.dtype
) -> None:
    kind, changes, options, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        tiny_engine(target=build(kind, changes, dtype), **options)


@pytest.mark.parametrize(
    "name", ["llama 4, attention in chunks", "phi 3, longrope"], ids=["chunks", "longrope"]
)
def test_within_the_limit_that_the_refusal_names_the_model_is_served(name: str) -> None:
    kind, changes, _, _ = REFUSED[name]
    model = build(kind, changes)
    ids = torch.tensor([prompts()[1]])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0, ids.shape[1] :].tolist()
    engine = tiny_engine(target=model, max_num_rows=3, max_model_tokens=64)
    outcome = run(engine, [request(str(n), p, max_tokens=20) for n, p in enumerate(prompts()[:2])])
    assert outcome.token_ids["1"] == expected


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    CLIPModel(CLIPConfig(text_config=small, vision_config=small)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        load_model(str(tmp_path), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ["gpt-oss, sinks", "gemma 2", "mixtral", "gpt-2, tied"])
def test_a_saved_model_is_loaded_whatever_attention_transformers_offers_for_it(
    name: str, tmp_path: Path
) -> None:
    model = build(*SERVED[name])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu").model
    assert generated(loaded) == generated(model)
