"""Cosines and signed sines of rotary positions, computed once and looked up in every forward."""

from typing import Any

import torch
from torch import nn

_MOST_HELD_POSITIONS = 32_768  # beyond, the table would weigh more than it saves
_FIXED_KINDS = ("default", "linear", "llama3", "yarn")  # frequencies do not change with length


class RotaryTable(nn.Module):
    """Stands in for a model's rotary embedding, for layers that rotate by
    x * cos + roll(x, size / 2) * sin: the first half of sin has its sign turned."""

    def __init__(self, rotary: nn.Module, num_positions: int) -> None:
        super().__init__()
        self._rotary = rotary
        self._num_positions = num_positions if num_positions <= _MOST_HELD_POSITIONS else 0
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def can_hold(rotary: Any, head_size: int) -> bool:
        """Whether its angles depend on the position alone and turn whole heads."""
        frequencies = getattr(rotary, "inv_freq", None)
        return (
            getattr(rotary, "rope_type", None) in _FIXED_KINDS
            and isinstance(frequencies, torch.Tensor)
            and 2 * frequencies.shape[-1] == head_size
        )

    def forward(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,  # [B, T]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [B, T, 1, head size] in x's dtype."""
        if not self._num_positions:
            return self._computed(x, position_ids)
        if self._held is None:
            every = torch.arange(self._num_positions, device=x.device)
            cos, sin = self._computed(x, every.unsqueeze(0))
            self._held = cos[0], sin[0]
        cos, sin = self._held
        index, size = position_ids.reshape(-1), position_ids.shape
        return (
            cos.index_select(0, index).view(*size, 1, -1),
            sin.index_select(0, index).view(*size, 1, -1),
        )

    def _computed(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(x, position_ids=position_ids)
        first, second = sin.chunk(2, dim=-1)
        return cos.unsqueeze(2), torch.cat((-first, second), dim=-1).unsqueeze(2)
