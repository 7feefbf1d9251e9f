"""What verification and audit ask of whatever runs the target: one method per layout's runner."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.layout.plan import ForwardRow, Padding
from engine.row_cache import RowCache


class TargetRunner(Protocol):
    """A model and a cache. All counts are since the start: num_positions of the tokens asked for,
    num_row_tokens with the padding that was computed beside them, and align_nanoseconds the time
    it took to lay rows out for the model: planning, and moving keys where the layout has to."""

    model: PreTrainedModel
    padding: Padding
    num_forwards: int
    num_positions: int
    num_row_tokens: int
    align_nanoseconds: int

    @property
    def cache(self) -> RowCache: ...

    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        """Logits [sum of num_logits, V] in the order of rows. Changes no row's length."""
        ...

    def logits_by_own_attention(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """Logits [T - first, V] of positions first.. by the model's own attention, cacheless."""
        ...

    def logits_afresh(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """The same by our own forward of the whole sequence, in a cache of its own."""
        ...
