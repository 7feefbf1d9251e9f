"""How large the caches of the models may be, and which kind of cache a layout needs."""

from dataclasses import dataclass

import psutil
import torch

from engine.config import EngineConfig
from engine.key_padding import padded_keys
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.aligned import AlignedCache
from engine.loader import LoadedModel
from engine.row_cache import RowCache

_CUDA_BLOCK_SIZE = 16
_RECTANGLE_COPIES = 3


@dataclass(frozen=True, slots=True)
class ExaminedModel:
    """A model whose attention was seen to work through the interface."""

    loaded: LoadedModel
    shape: KVCacheShape
    logits: torch.Tensor
    token_ids: list[int]
    is_ragged: bool

    @property
    def bytes_per_token(self) -> int:
        """Rectangles are copied while they grow, and may hold columns of rows that left."""
        return self.shape.bytes_per_token * (1 if self.is_ragged else _RECTANGLE_COPIES)


def make_caches(
    config: EngineConfig, examined: list[ExaminedModel], max_tokens: int
) -> list[RowCache]:
    """Target's cache first. Both models get as many rows; memory is split by their need."""
    bytes_per_token = sum(model.bytes_per_token for model in examined)
    budget = _budget_bytes(config.kv_cache_memory, examined[0].shape.device)
    block_size = config.kv_block_size
    if block_size is None and examined[0].is_ragged and examined[0].shape.device.type == "cuda":
        block_size = _CUDA_BLOCK_SIZE
    row_tokens = padded_keys(max_tokens)
    tokens_per_block = block_size or row_tokens
    most_blocks = config.max_num_rows * -(-row_tokens // tokens_per_block)
    num_blocks = min(most_blocks, int(budget // (bytes_per_token * tokens_per_block)))
    if num_blocks * tokens_per_block < max_tokens:
        raise ValueError(
            f"kv_cache_memory: {budget / 2**20:.0f} MiB hold "
            f"{int(budget // bytes_per_token)} tokens, one request needs {max_tokens}; "
            "lower max_model_tokens or give more memory"
        )
    num_rows = config.max_num_rows if block_size else min(config.max_num_rows, num_blocks)
    return [
        make_cache(
            model,
            max_num_rows=num_rows,
            max_tokens=min(max_tokens, model.loaded.max_context_tokens),
            num_blocks=num_blocks,
            block_size=block_size,
        )
        for model in examined
    ]


def make_cache(
    examined: ExaminedModel,
    *,
    max_num_rows: int,
    max_tokens: int,
    num_blocks: int,
    block_size: int | None,
) -> KVCache | AlignedCache:
    """num_blocks of block_size tokens, or of a row's longest length if there is none."""
    if not examined.is_ragged:
        return AlignedCache(
            examined.shape, max_num_rows=max_num_rows, max_tokens=max_tokens, num_blocks=num_blocks
        )
    return KVCache(
        examined.shape,
        max_num_rows=max_num_rows,
        max_tokens=max_tokens,
        num_blocks=num_blocks,
        block_size=block_size,
    )


def _budget_bytes(wanted: float, device: torch.device) -> float:
    """Bytes as given, or a share of what is free now."""
    if wanted > 1:
        return wanted
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return wanted * free
    return wanted * float(psutil.virtual_memory().available)
