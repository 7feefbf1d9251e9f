"""Tiny random models and a real tokenizer, made in a moment and without a network."""

import copy
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS_TOKEN_ID = 1
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "a person sees the other person",
    "0123456789",
]


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


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCAB_SIZE tokens: any text round-trips, characters may span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<eos>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"[filler{index}]" for index in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tiny_model(folder: Path, seed: int = 0, **options: object) -> Path:
    """A folder that `Engine.from_config` loads: safetensors and tokenizer."""
    tiny_llama(seed, **options).save_pretrained(folder)  # type: ignore[arg-type]
    tiny_tokenizer().save_pretrained(folder)
    return folder
