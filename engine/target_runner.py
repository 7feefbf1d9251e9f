"""What verification and audit ask of whatever runs the target: one method per layout's runner."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.layout.plan import ForwardRow, Padding
from engine.reading import Reading
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

    def own_reading(self, *, is_whole: bool) -> Reading:
        """A text read by the model's own attention, without any cache of ours. is_whole: in one
        read, without any cache at all."""
        ...

    def fresh_reading(self, num_tokens: int) -> Reading:
        """A text of so many tokens read by `forward`, in a cache of its own."""
        ...
