"""Linear layers whose weights are kept in 8 bits: half of what a token's step reads from memory.

Asked for, never chosen by itself: the model whose output is guaranteed is then the one with the
rounded weights. Activations keep their dtype.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.loader import UnsupportedModelError
from engine.shards import is_sharded

_LARGEST = 127  # of a signed byte, the same on both sides


class Int8Linear(nn.Module):
    """y = x (S W)^T + b: W [out, in] of signed bytes, S a scale per output, for a CPU."""

    def __init__(
        self, quantized: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.shape
        self.bias = bias
        self._quantized = quantized
        self._scales = scales

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """The nearest to `linear`: each output's largest weight becomes 127."""
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
        scales = scales.to(linear.weight.dtype)
        # By the scales as they are kept, so that their rounding is made up for.
        rounded = (weight / scales.float().unsqueeze(1)).round().clamp(-_LARGEST, _LARGEST)
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(rounded.to(torch.int8), scales, bias)

    @classmethod
    def joined(cls, linears: Sequence["Int8Linear"]) -> "Int8Linear":
        """One layer whose outputs are those of `linears`, one after the other."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            torch.cat([linear._quantized for linear in linears]),
            torch.cat([linear._scales for linear in linears]),
            torch.cat(biases) if biases else None,
        )

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] in the activations' dtype, made anew."""
        return self._quantized.to(self._scales.dtype) * self._scales.unsqueeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, self.in_features)
        result = torch._weight_int8pack_mm(tokens, self._quantized, self._scales)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def quantize_linears(name: str, model: PreTrainedModel) -> int:
    """Replace every plain `nn.Linear` of the model in place; returns how many there were.

    Embeddings, norms and a mixture's experts keep their weights. Raises UnsupportedModelError for
    a model that is not on a CPU, or in several processes.
    """
    if model.device.type != "cpu":
        raise UnsupportedModelError(f"{name}: quantization 'int8' needs a CPU, not {model.device}")
    if is_sharded(model):
        raise UnsupportedModelError(f"{name}: quantization 'int8' needs the whole model at once")
    num_quantized = 0
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, child_name, Int8Linear.of(child))
                num_quantized += 1
    return num_quantized
