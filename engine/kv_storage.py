"""The tensors behind a cache: what a model stores per token, and memory that is lazy."""

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.shards import Shards


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What a model stores per token; in each of its processes, where shards are given."""

    num_layers: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    shards: Shards | None = field(default=None, compare=False, repr=False)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Layers, heads, and the sizes of a key and a value."""
        return self.num_layers, self.num_kv_heads, self.key_size, self.value_size

    @property
    def bytes_per_token(self) -> int:
        size = torch.empty((), dtype=self.dtype).element_size()
        return self.num_layers * self.num_kv_heads * (self.key_size + self.value_size) * size


def lazy_zeros(size: tuple[int, ...], shape: KVCacheShape) -> torch.Tensor:
    """Zeros whose pages the operating system provides only when they are first written.

    Zeros, because a never-written slot is masked but still multiplied; lazy, because a row
    reserves a whole context and most requests are short.
    """
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    num_bytes = int(np.prod(size)) * torch.empty((), dtype=shape.dtype).element_size()
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(shape.dtype).view(size)
