"""Whether a model can be served at all: what its configuration says and its attention asks for.

A check at start sees only short sequences, so whatever changes with the length of a sequence
is judged here, from the configuration.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from engine.kv_storage import KVCacheShape
from engine.loader import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig

_RECORDER = "tandem_recorder"
_NUM_RECORDED_TOKENS = 8
_NUM_CHECKED_TOKENS = 40
_BEYOND_WINDOW = 16
_MOST_CHECKED_TOKENS = 4096 + _BEYOND_WINDOW


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """What one layer hands to its attention."""

    num_kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool


def check_configuration(name: str, config: "PretrainedConfig", max_tokens: int) -> None:
    """Raise UnsupportedModelError for what would go wrong only in longer sequences.

    max_tokens is the longest sequence that will be served.
    """
    text = config.get_text_config()
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", "default")
        limit = parameters.get("original_max_position_embeddings")
        if kind == "longrope" and isinstance(limit, int) and max_tokens > limit:
            raise UnsupportedModelError(
                f"{name}: its longrope frequencies change for every row of a batch once one of "
                f"them passes {limit} tokens; set max_model_tokens to {limit} or less"
            )
        if "dynamic" in kind and max_tokens > text.max_position_embeddings:
            raise UnsupportedModelError(
                f"{name}: its dynamic rope frequencies depend on the longest row of a batch "
                f"beyond {text.max_position_embeddings} tokens; set max_model_tokens no higher"
            )
    chunk = getattr(text, "attention_chunk_size", None)
    is_chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ())
    if is_chunked and isinstance(chunk, int) and max_tokens > chunk:
        raise UnsupportedModelError(
            f"{name}: its attention works in chunks of {chunk} tokens, which is not supported; "
            f"set max_model_tokens to {chunk} or less"
        )


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    """The rotary parameters of every kind of layer."""
    found = getattr(text, "rope_parameters", None)
    if not isinstance(found, Mapping):
        return []
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]


def agreement_length(model: PreTrainedModel, max_tokens: int) -> int:
    """Tokens that the check of our forward needs: past a sliding window if there is one."""
    windows = [
        value
        for key, value in model.config.get_text_config().to_dict().items()
        if "window" in key and isinstance(value, int) and value <= _MOST_CHECKED_TOKENS
    ]
    wanted = max([_NUM_CHECKED_TOKENS, *(window + _BEYOND_WINDOW for window in windows)])
    return min(wanted, max_tokens - 1, _MOST_CHECKED_TOKENS)


@torch.inference_mode()
def attention_shape(
    name: str, model: PreTrainedModel, num_tokens: int
) -> tuple[KVCacheShape, torch.Tensor, list[int]]:
    """The cache's shape, and the model's own logits [T, V] of the returned token ids.

    Raises UnsupportedModelError for attention that cannot go through the interface.
    """
    config = model.config.get_text_config()
    calls = _record_attention(name, model)
    layers = [calls[layer] for layer in range(config.num_hidden_layers)]
    _check_windows(name, config, layers, num_tokens)
    shapes = {(call.num_kv_heads, call.key_size, call.value_size) for call in layers}
    if len(shapes) != 1:
        raise UnsupportedModelError(f"{name}: its layers store keys of different shapes")
    shape = KVCacheShape(len(layers), *shapes.pop(), model.dtype, model.device)
    own = _own_attention(model, layers)
    token_ids = sample_token_ids(config.vocab_size, num_tokens, seed=1)
    model.set_attn_implementation(own)
    return shape, _logits(model, token_ids), token_ids


@torch.inference_mode()
def plain_cache_shape(
    name: str, model: PreTrainedModel, num_tokens: int
) -> tuple[KVCacheShape, torch.Tensor, list[int]]:
    """The same for a model that computes its attention itself, over a plain DynamicCache.

    Raises UnsupportedModelError unless every layer keeps a key for every token there.
    """
    config = model.config.get_text_config()
    own = model.config._attn_implementation
    with suppress(UnsupportedModelError):  # it keeps the attention that it was loaded with
        own = _own_attention(model, _record_attention(name, model).values())
    with _without_warnings():
        model.set_attn_implementation(own)
    token_ids = sample_token_ids(config.vocab_size, num_tokens, seed=1)
    cache = DynamicCache()
    try:
        model(
            input_ids=torch.tensor([token_ids[:_NUM_RECORDED_TOKENS]], device=model.device),
            use_cache=True,
            **{cache_argument(model): cache},
        )
        kept = [(keys, values) for keys, values, _ in cache]
        shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in kept}
        num_kept = {keys.shape[2] for keys, _ in kept}
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: it does not run over a plain cache of keys and values, as models with "
            f"recurrent or hybrid layers do not ({type(error).__name__}: {error})"
        ) from error
    if len(kept) != config.num_hidden_layers or num_kept != {min(_NUM_RECORDED_TOKENS, num_tokens)}:
        raise UnsupportedModelError(
            f"{name}: {len(kept)} of its {config.num_hidden_layers} layers keep keys in a plain "
            "cache; recurrent or hybrid layers have state that cannot be rolled back"
        )
    if len(shapes) != 1:
        raise UnsupportedModelError(f"{name}: its layers store keys of different shapes")
    shape = KVCacheShape(len(kept), *shapes.pop(), model.dtype, model.device)
    return shape, _logits(model, token_ids), token_ids


def cache_argument(model: PreTrainedModel) -> str:
    """What the model calls its cache: transformers 5.2x renames past_key_values to cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _own_attention(model: PreTrainedModel, calls: Iterable[_AttentionCall]) -> str:
    """transformers' own attention that computes all that the layers ask for."""
    # Its sdpa has neither of the two; its eager form needs memory for T x T scores.
    needs_eager = any(call.softcap is not None or call.has_sinks for call in calls)
    return "eager" if needs_eager or not model._supports_sdpa else "sdpa"


def sample_token_ids(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Random tokens, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    return token_ids


def _logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=torch.tensor([token_ids], device=model.device), use_cache=False
    ).logits[0]
    return logits


def _record_attention(name: str, model: PreTrainedModel) -> dict[int, _AttentionCall]:
    """What each layer asks of its attention, seen in one short forward."""
    calls: dict[int, _AttentionCall] = {}

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer: int = module.layer_idx  # type: ignore[assignment]
        calls[layer] = _AttentionCall(
            key.shape[1], key.shape[3], value.shape[3], sliding_window, softcap, s_aux is not None
        )
        size = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(size), None

    config = model.config.get_text_config()
    AttentionInterface.register(_RECORDER, record)
    try:
        with _without_warnings():
            model.set_attn_implementation(_RECORDER)
        if config._attn_implementation == _RECORDER:
            _logits(model, sample_token_ids(config.vocab_size, _NUM_RECORDED_TOKENS, seed=1))
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: its attention cannot be replaced ({type(error).__name__}: {error})"
        ) from error
    if config._attn_implementation != _RECORDER:
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} computes its attention itself and not through "
            "transformers' AttentionInterface, so it cannot be replaced; the layouts 'aligned' "
            "and 'grouped' may serve it"
        )
    if sorted(calls) != list(range(config.num_hidden_layers)):
        raise UnsupportedModelError(
            f"{name}: {len(calls)} of its {config.num_hidden_layers} layers use attention; "
            "recurrent or hybrid layers have state that cannot be rolled back"
        )
    return calls


def _check_windows(name: str, config: Any, layers: list[_AttentionCall], num_tokens: int) -> None:
    """A window too long to be seen in `num_tokens` must be announced by the layers themselves."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not isinstance(window, int) or window < num_tokens or not kinds:
        return
    for number, (kind, call) in enumerate(zip(kinds, layers, strict=True)):
        if call.sliding_window != (window if kind == "sliding_attention" else None):
            raise UnsupportedModelError(
                f"{name}: layer {number} is {kind} by its configuration with a window of {window}, "
                f"but asks for a window of {call.sliding_window}"
            )


@contextmanager
def _without_warnings() -> "Iterator[None]":
    """transformers warns of what is refused with a reason here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
