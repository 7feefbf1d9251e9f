"""Tiny random models, made in a moment and without a network."""

import copy
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer

__all__ = ["EOS_TOKEN_ID", "VOCAB_SIZE", "tiny_tokenizer"]  # with the models of this file


def tiny_llama(
    seed: int = 0,
    *,
    num_layers: int = 2,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    max_tokens: int = 512,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
) -> LlamaForCausalLM:
    """Random weights wide enough apart that an argmax is no tie."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_tokens,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def related_draft(target: LlamaForCausalLM, noise: float = 0.02, seed: int = 1) -> LlamaForCausalLM:
    """A draft model that agrees with its target often but not always: the target plus noise."""
    draft = LlamaForCausalLM(copy.deepcopy(target.config)).to(target.dtype).eval()
    draft.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
            shift = torch.randn(parameter.shape, generator=generator) * noise * spread
            parameter.add_(shift.to(parameter.dtype))
    return draft


def save_tiny_model(folder: Path, seed: int = 0, **options: object) -> Path:
    """A folder that `Engine.from_config` loads: safetensors and tokenizer."""
    tiny_llama(seed, **options).save_pretrained(folder)  # type: ignore[arg-type]
    tiny_tokenizer().save_pretrained(folder)
    return folder
