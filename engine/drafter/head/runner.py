"""Runs a head over its own cache of slots: tokens and hidden states in, draft logits out."""

from collections.abc import Sequence

import torch
from torch import nn

from engine.drafter.head.model import Eagle3Head
from engine.kv_cache import KVCache
from engine.layout.plan import ForwardRow, Padding
from engine.layout.ragged import plan_forward
from engine.planned_attention import PlannedAttention


class HeadRunner:
    """One head, one cache. A row's first entry stands for any position of its request: rotary
    embeddings only know differences."""

    def __init__(self, head: Eagle3Head, cache: KVCache, padding: Padding, *, window: int) -> None:
        self.head = head
        self.cache = cache
        self._padding = padding
        self._window = window
        self.output_layer: nn.Module = head.lm_head

    @property
    def hidden_size(self) -> int:
        return self.head.config.hidden_size

    @torch.inference_mode()
    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """[N, H] of captured states [N, 3H]; a multiple of the padding at a time."""
        missing = -len(captured) % self._padding.tokens
        padded = nn.functional.pad(captured, (0, 0, 0, missing)) if missing else captured
        return self.head.fuse(padded)[: len(captured)]

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[ForwardRow], states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(draft logits [M, Vd], states for the next step [M, H]) of the wanted tokens.

        states [N, H]: of every token of the rows, in their order.
        """
        plan = plan_forward(rows, self.cache, self._padding)
        attention = PlannedAttention(plan, self.cache, self._padding)
        num_padding = plan.input_ids.shape[1] - plan.num_tokens
        if num_padding:
            states = nn.functional.pad(states, (0, 0, 0, num_padding))
        scale = self.head.config.head_size**-0.5

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attention.attend(0, query, key, value, scale=scale, window=self._window)

        output, following = self.head.advance(
            plan.input_ids[0], states, self.head.rotation(plan.position_ids[0]), attend
        )
        logits: torch.Tensor = self.output_layer(output.index_select(0, plan.logit_index))
        kept = plan.logit_index[: plan.num_logits]
        return logits[: plan.num_logits], following.index_select(0, kept)
