"""In what precision a head computes while it learns: its weights stay float32."""

from contextlib import AbstractContextManager, nullcontext

import torch


def mixed_precision(
    device: torch.device, dtype: torch.dtype | None
) -> AbstractContextManager[object]:
    """Matrix products in `dtype`; None leaves everything in float32, on any device."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
