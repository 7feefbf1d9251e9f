"""Models and tokenizers from a folder or a hub id: safetensors only, never remote code."""

import atexit
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DistributedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import AutoConfig

from engine.shards import Shards, join

_CPU_FLAGS_WITH_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
_CIRCUMSTANCES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. name is how it was asked for; shards: of which this is one."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    shards: Shards | None = None


def resolve_device(wanted: str) -> torch.device:
    """ "auto" is CUDA where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def resolve_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and on processors with native bfloat16, else float32."""
    if wanted != "auto":
        dtype = getattr(torch, wanted, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype: unknown {wanted!r}")
        return dtype
    if device.type == "cuda" or _cpu_has_bf16():
        return torch.bfloat16
    return torch.float32


def _cpu_has_bf16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {
        flag
        for line in text.splitlines()
        if line.startswith(("flags", "Features"))
        for flag in line.split()
    }
    return any(flag in flags for flag in _CPU_FLAGS_WITH_BF16)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder or hub id."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model, trust_remote_code=False
    )
    return tokenizer


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """[V, H] of a model's input embedding, without gradient."""
    return _weight_of(model.get_input_embeddings())


def output_weight(model: PreTrainedModel) -> torch.Tensor:
    """[V, H] of a model's output layer, without gradient; a copy where its layers are packed."""
    return _weight_of(model.get_output_embeddings())


def _weight_of(module: torch.nn.Module | None) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedModelError(f"{type(module).__name__}: has no weight of token rows")
    return weight.detach()


def load_model(name: str, *, dtype: str, device: str, num_shards: int = 1) -> LoadedModel:
    """Load for inference. Raises UnsupportedModelError for what is no causal language model.

    num_shards: processes of torchrun that load it together, each a part of every layer; the first
    one's calls are announced to the others. Raises ShardError unless they are there.
    """
    place = resolve_device(device)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: an encoder-decoder model, not a causal one")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"{name}: {config.model_type!r} is no causal language model that transformers knows"
        )
    shards, arguments = None, {}
    if num_shards > 1:
        _check_shards(name, config, num_shards)
        shards = join(num_shards, place)
        arguments["distributed_config"] = DistributedConfig(tp_size=num_shards, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        name,
        **arguments,
        dtype=resolve_dtype(dtype, place),
        attn_implementation="eager",  # every model has it, and it is replaced anyway
        use_safetensors=True,
        trust_remote_code=False,
    )
    if shards is None:
        model.to(place)  # type: ignore[arg-type] # transformers wraps Module.to without its types
    model.eval()
    loaded = describe_model(name, model, load_tokenizer(name))
    if shards is not None and shards.is_leader:
        shards.lead(model)
        atexit.register(shards.stop)
    return replace(loaded, shards=shards)


def _check_shards(name: str, config: Any, num_shards: int) -> None:
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"{name}: transformers has no plan to split {text.model_type!r} over processes"
        )
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, heads, None) or text.num_attention_heads
        if count % num_shards:
            raise UnsupportedModelError(
                f"tensor_parallel: {num_shards} processes cannot share {heads}={count} evenly"
            )
    if not Path(name).is_dir():
        raise UnsupportedModelError(f"{name}: a model over several processes lies in a folder")


def describe_model(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> LoadedModel:
    """What the engine needs to know about a model that is in memory already."""
    model.requires_grad_(False)
    text_config = model.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise UnsupportedModelError(f"{name}: its configuration states no context length")
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(name, model),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_context_tokens=context,
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(value)
    return tuple(sorted(found))


def _fingerprint(name: str, model: PreTrainedModel) -> str:
    """Changes when the configuration or the weights do: a hash of the configuration and of
    samples spread over every weight. The dtype that files are loaded in does not count: a head
    trained beside a model serves it in any."""
    config = _without_circumstances(model.config.to_dict())
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    folder = Path(name)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as handle:
            for sample in range(_NUM_SAMPLES):
                handle.seek(sample * max(0, size - _SAMPLE_BYTES) // max(1, _NUM_SAMPLES - 1))
                digest.update(handle.read(_SAMPLE_BYTES))
    if not files:
        for key, parameter in model.state_dict().items():
            flat = parameter.detach().flatten()
            step = max(1, flat.numel() // 1024)
            sample = flat[::step][:1024].float().cpu().numpy().tobytes()
            digest.update(key.encode())
            digest.update(sample)
    return digest.hexdigest()[:16]


def _without_circumstances(config: Any) -> Any:
    """A configuration without where it was loaded from and by which version."""
    if not isinstance(config, dict):
        return config
    return {
        str(key): _without_circumstances(value)
        for key, value in config.items()
        if key not in _CIRCUMSTANCES
    }


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise UnsupportedModelError naming a token that the two tokenizers number differently."""
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    for token in target_vocab.keys() | draft_vocab.keys():
        if target_vocab.get(token) != draft_vocab.get(token):
            raise UnsupportedModelError(
                f"speculation.draft_model: token {token!r} is {target_vocab.get(token)} for the "
                f"target and {draft_vocab.get(token)} for the draft model"
            )
