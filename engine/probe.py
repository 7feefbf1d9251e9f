"""What a model needs of the cache, and what the runner can promise about it: both measured.

`attention_shape` records what the model's attention is called with. `check_agreement`
compares our forward with the model's own, so a model whose attention we do not reproduce is
refused at start. `probe_guarantee` feeds the same tokens in different company and asks
whether every logit keeps its bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.kv_cache import KVCacheShape
from engine.layout.plan import ForwardRow
from engine.loader import UnsupportedModelError
from engine.model_runner import ModelRunner

_RECORDER = "tandem_recorder"
_NUM_PROBE_TOKENS = 80
_NUM_COMPARED = 16
_NUM_NEIGHBOURS = 3


def probe_token_ids(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    return token_ids


@torch.inference_mode()
def attention_shape(
    name: str, model: PreTrainedModel, num_tokens: int
) -> tuple[KVCacheShape, torch.Tensor, list[int]]:
    """The cache's shape, and the model's own logits [T, V] of the returned token ids.

    Raises UnsupportedModelError for attention that cannot go through the interface.
    """
    shapes: dict[int, tuple[int, int, int]] = {}

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer: int = module.layer_idx  # type: ignore[assignment]
        shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    config = model.config.get_text_config()
    token_ids = probe_token_ids(config.vocab_size, num_tokens, seed=1)
    AttentionInterface.register(_RECORDER, record)
    AttentionMaskInterface.register(_RECORDER, sdpa_mask)
    try:
        model.set_attn_implementation(_RECORDER)
        logits = model(
            input_ids=torch.tensor([token_ids], device=model.device), use_cache=False
        ).logits[0]
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: its attention cannot be replaced ({type(error).__name__}: {error})"
        ) from error
    num_layers = config.num_hidden_layers
    if sorted(shapes) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{name}: {len(shapes)} of its {num_layers} layers use attention; "
            "recurrent or hybrid layers have state that cannot be rolled back"
        )
    if len(set(shapes.values())) != 1:
        raise UnsupportedModelError(f"{name}: its layers store keys of different shapes")
    num_kv_heads, key_size, value_size = shapes[0]
    shape = KVCacheShape(num_layers, num_kv_heads, key_size, value_size, model.dtype, model.device)
    return shape, logits, token_ids


def agreement_length(model: PreTrainedModel, max_tokens: int) -> int:
    """Tokens that `check_agreement` needs: past a sliding window if there is one."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    wanted = window + 16 if isinstance(window, int) else 40
    return min(wanted, max_tokens - 1, 4096)


def check_agreement(
    name: str, runner: ModelRunner, logits: torch.Tensor, token_ids: Sequence[int]
) -> None:
    """Raise UnsupportedModelError unless our forward, in two chunks, gives the model's own
    `logits` up to rounding."""
    half = len(token_ids) // 2
    ours = _feed(runner, token_ids, [half, len(token_ids) - half])
    difference = (ours.float() - logits.float()).abs().max().item()
    spread = logits.float().std().item()
    tolerance = 0.25 if logits.dtype in (torch.bfloat16, torch.float16) else 2e-3
    if not difference <= tolerance * max(spread, 1e-6):
        raise UnsupportedModelError(
            f"{name}: our attention differs from its own by {difference:.3g} "
            f"(logits spread over {spread:.3g}); it uses a variant that is not supported"
        )


def probe_guarantee(runner: ModelRunner) -> str:
    """ "bit_exact" if the same tokens gave the same logits to the bit in every company tried:
    whole, in chunks of many widths, alone, among neighbours; else "rounding"."""
    vocab_size = runner.model.config.get_text_config().vocab_size
    num_tokens = min(_NUM_PROBE_TOKENS, runner.cache.max_tokens - 1)
    token_ids = probe_token_ids(vocab_size, num_tokens, seed=2)
    compared = min(_NUM_COMPARED, num_tokens // 2)
    start = num_tokens - compared
    whole = _feed(runner, token_ids, [num_tokens])[-compared:]
    widths = [1, 2, 5, 1, 3]
    ragged = [*widths, compared - sum(widths)] if compared > sum(widths) else [1] * compared
    alone = _feed(runner, token_ids, [start // 2, start - start // 2, *ragged])[-compared:]
    if not torch.equal(whole, alone):
        return "rounding"
    num_neighbours = min(_NUM_NEIGHBOURS, runner.cache.num_free_rows - 1)
    if num_neighbours > 0:
        among = _feed(runner, token_ids, [start, *ragged], num_neighbours)[-compared:]
        if not torch.equal(whole, among):
            return "rounding"
    return "bit_exact"


def _feed(
    runner: ModelRunner,
    token_ids: Sequence[int],
    widths: Sequence[int],
    num_neighbours: int = 0,
) -> torch.Tensor:
    """Logits [T, V] of token_ids fed in chunks, beside neighbours of other lengths."""
    cache = runner.cache
    vocab_size = runner.model.config.get_text_config().vocab_size
    sequences = [list(token_ids)] + [
        probe_token_ids(vocab_size, len(token_ids) + number, seed=3 + number)
        for number in range(num_neighbours)
    ]
    rows = [cache.allocate_row(sequence[:1])[0] for sequence in sequences]
    fed = [0] * len(sequences)
    found: list[torch.Tensor] = []
    try:
        for row, sequence in zip(rows, sequences, strict=True):
            cache.reserve(row, len(sequence))
        for width in widths:
            forward_rows = []
            for number, sequence in enumerate(sequences):
                count = width if number == 0 else min(width + number, len(sequence) - fed[number])
                chunk = sequence[fed[number] : fed[number] + count]
                if chunk:
                    forward_rows.append(
                        ForwardRow(rows[number], chunk, fed[number], width if number == 0 else 0)
                    )
                fed[number] += len(chunk)
            found.append(runner.forward(forward_rows))
    finally:
        for row in rows:
            cache.free_row(row, keep=False)
    return torch.cat(found)
