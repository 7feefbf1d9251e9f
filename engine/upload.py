"""Small lists of numbers on their way to the model's device. The host does not wait for it: on
CUDA they leave from pinned memory and join the stream."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch


def upload(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """`values`, lists of one length inside lists included, as a tensor on `device`."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the processor's on `device`."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def upload_together(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """A tensor [len] int64 of each list, all in one copy."""
    joined = upload(list(itertools.chain.from_iterable(lists)), device)
    return list(torch.split(joined, [len(values) for values in lists]))
