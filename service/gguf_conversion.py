"""Turns a GGUF checkpoint into the safetensors folder that the engine loads."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_SHARD_SIZE = "2GB"


@dataclass(frozen=True, slots=True)
class GgufSpec:
    """What a GGUF file does not say reliably about its model.

    splits_digits: the model was trained with every digit as a token of its own
      (`pre=smollm` in GGUF), which transformers' reader of GGUF vocabularies leaves out.
    eos_token: ends an assistant turn, and therefore a generation.
    """

    splits_digits: bool
    bos_token: str
    eos_token: str
    pad_token: str


def convert(source: Path, destination: Path, spec: GgufSpec) -> None:
    """Write `source` as float32 safetensors, with its tokenizer, into `destination`.

    float32 holds every dequantised weight exactly; the engine casts when it loads.
    Raises ValueError when the tokenizer that was written does not read back as `spec` says.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _load_tokenizer(source, spec)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    token_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, token_id in token_ids.items():
        setattr(model.config, name, token_id)
    # The name in the file is the training run's, and would be read as a place to load from.
    vars(model.config).pop("_model_name_or_path", None)
    model.generation_config = GenerationConfig(**token_ids)
    tokenizer.model_max_length = model.config.max_position_embeddings
    destination.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(destination, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(destination)
    _check_tokenizer(destination, spec)


def conversion_versions() -> dict[str, str]:
    """The libraries that decide what `convert` writes, for the record beside the model."""
    return {name: version(name) for name in ("gguf", "safetensors", "torch", "transformers")}


def _load_tokenizer(source: Path, spec: GgufSpec) -> "PreTrainedTokenizerFast":
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{source.name} has no vocabulary for a fast tokenizer")
    if spec.splits_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [
                Digits(individual_digits=True),
                ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.bos_token = spec.bos_token
    tokenizer.eos_token = spec.eos_token
    tokenizer.pad_token = spec.pad_token
    return tokenizer


def _check_tokenizer(folder: Path, spec: GgufSpec) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token != spec.eos_token:
        raise ValueError(f"the end-of-turn token reads back as {tokenizer.eos_token!r}")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1234"}], tokenize=False, add_generation_prompt=True
    )
    if spec.eos_token not in rendered:
        raise ValueError("the chat template does not end a turn with the end-of-turn token")
    if spec.splits_digits and len(tokenizer("1234", add_special_tokens=False)["input_ids"]) != 4:
        raise ValueError("the tokenizer does not split digits")
