"""Linear layers whose weights oneDNN has laid out once, instead of in every call.

On a CPU a decode step reads every weight for a handful of tokens, and the general matrix
product packs the weight anew each time. Packed once, the product is two to three times
faster, and a token's result has the same bits for any number of tokens from two up.
"""

import torch
from torch import nn

from engine.shards import is_sharded

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_EXPECTED_TOKENS = 8  # oneDNN may choose the layout by it; any number of tokens works


class PackedLinear(nn.Module):
    """Stands in for a `nn.Linear`: y = x W^T + b, for inference on a CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), _EXPECTED_TOKENS
        )
        self._bias = linear.bias.detach() if linear.bias is not None else None

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], laid out anew: a copy that costs its memory as long as it is held."""
        plain: torch.Tensor = self._weight.to_dense()
        return plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return result


def can_pack(model: nn.Module) -> bool:
    """Whether this build of torch has the packed product for the model's device and dtype."""
    parameter = next(model.parameters())
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in _PACKED_DTYPES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not is_sharded(model)
    )


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` of the model in place; returns how many there were.

    The original weights are released, except where an embedding shares them. Embeddings and
    other weights stay as they are.
    """
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
                num_packed += 1
    return num_packed


def is_all_packed(model: nn.Module) -> bool:
    """No matrix product of the model goes through the general kernels any more."""
    return not any(
        parameter.dim() >= 2
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )
