"""Attention of one forward over slots: new keys are written, each row reads its own history.

A token's bits depend only on what is pinned here and in the plan: masks are always explicit,
the query heads of a key head are folded into query rows, and rows, tokens and keys are padded
(engine/layout/plan.py).
"""

import torch
import torch.nn.functional as F

from engine.kv_cache import KVCache
from engine.layout.plan import AttentionGroup, ForwardPlan, Padding


class PlannedAttention:
    """Made for one plan; masks are shared by the layers."""

    def __init__(self, plan: ForwardPlan, cache: KVCache, padding: Padding) -> None:
        self._plan = plan
        self._cache = cache
        self._padding = padding
        self._masks: dict[tuple[int, int | None, int], torch.Tensor] = {}
        self.is_by_hand = False  # no fused kernel had what a layer asked for

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [N, num_heads, head_size]
        key: torch.Tensor,  # [N, num_kv_heads, head_size]
        value: torch.Tensor,  # [N, num_kv_heads, value_size]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # [num_heads]
    ) -> torch.Tensor:
        """[N, num_heads, value_size]. Keys and values of the plan's tokens are stored first."""
        plan = self._plan
        num_tokens, num_heads = query.shape[:2]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, plan.slots, key[: plan.num_tokens])
        values.index_copy_(0, plan.slots, value[: plan.num_tokens])
        tokens = query.reshape(num_tokens, -1)  # [N, num_heads * head_size]
        outputs = [
            self._attend_group(
                index, group, tokens, keys, values, num_heads, scale, window, softcap, sinks
            )
            for index, group in enumerate(plan.groups)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if not (plan.output_is_in_order and joined.shape[0] == num_tokens):
            joined = joined.index_select(0, plan.output_index)
        return joined.view(num_tokens, num_heads, -1)

    def _attend_group(
        self,
        index: int,
        group: AttentionGroup,
        tokens: torch.Tensor,  # [N, num_heads * head_size]
        keys: torch.Tensor,  # [num_slots, num_kv_heads, head_size]
        values: torch.Tensor,  # [num_slots, num_kv_heads, value_size]
        num_heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[R * W, num_heads * value_size]."""
        num_rows, width, num_kv_heads = group.num_rows, group.width, keys.shape[1]
        fold = num_heads // num_kv_heads  # G
        folded = (
            tokens.index_select(0, group.token_index)
            .view(num_rows, width, num_kv_heads, fold, -1)
            .permute(0, 2, 3, 1, 4)
            .reshape(num_rows, num_kv_heads, fold * width, -1)
        )
        num_padding = -(fold * width) % self._padding.query_rows
        if num_padding:
            folded = F.pad(folded, (0, 0, 0, num_padding))
        mask = self._mask(index, group, fold, window, folded.dtype)
        group_keys = _rows_of(keys, group, self._plan.block_size)
        group_values = _rows_of(values, group, self._plan.block_size)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                folded, group_keys, group_values, attn_mask=mask, scale=scale
            )
        else:
            if sinks is not None:
                sinks = sinks.view(num_kv_heads, fold, 1).expand(-1, -1, width)
                sinks = F.pad(sinks.reshape(num_kv_heads, -1), (0, num_padding))
            self.is_by_hand = True
            attended = _attend_by_hand(
                folded, group_keys, group_values, mask, scale, softcap, sinks
            )
        return (
            attended[:, :, : fold * width]
            .view(num_rows, num_kv_heads, fold, width, -1)
            .permute(0, 3, 1, 2, 4)
            .reshape(num_rows * width, -1)
        )

    def _mask(
        self, index: int, group: AttentionGroup, fold: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """[R, 1, folded query rows, L], additive: a token sees itself and what came before."""
        found = self._masks.get((index, window, fold))
        if found is not None:
            return found
        slots = torch.arange(group.num_keys, device=group.positions.device)
        positions = group.positions[:, :, None]
        visible = slots <= positions  # [R, W, L]
        if window is not None:
            visible &= slots > positions - window
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask.masked_fill_(~visible, float("-inf"))
        mask = mask.repeat(1, fold, 1)
        # Rows of padding see everything: a row that sees nothing would be NaN.
        num_padding = -mask.shape[1] % self._padding.query_rows
        if num_padding:
            mask = F.pad(mask, (0, 0, 0, num_padding))
        mask = mask.unsqueeze(1)
        self._masks[index, window, fold] = mask
        return mask


def _rows_of(slots: torch.Tensor, group: AttentionGroup, block_size: int) -> torch.Tensor:
    """[R, num_kv_heads, L, size] of a layer's keys or values; a view where rows are contiguous."""
    num_kv_heads, size = slots.shape[1:]
    if group.key_slots is None:
        rows = slots.as_strided(
            (group.num_rows, group.num_keys, num_kv_heads, size),
            (block_size * num_kv_heads * size, num_kv_heads * size, size, 1),
            group.first_slot * num_kv_heads * size,
        )
    else:
        rows = slots.index_select(0, group.key_slots).view(
            group.num_rows, group.num_keys, num_kv_heads, size
        )
    return rows.transpose(1, 2)


def _attend_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, folded query rows]
) -> torch.Tensor:
    """What no fused kernel offers: scores squashed to (-softcap, softcap) before the mask
    (Gemma 2), and a score per head that takes its share of the softmax and adds nothing
    (gpt-oss)."""
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        sink_scores = sinks.float()[None, :, :, None].expand(scores.shape[0], -1, -1, 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : values.shape[2]]
    # In float32: of bfloat16 the product adds in an order that depends on the number of keys.
    return torch.matmul(weights, values.float()).to(values.dtype)
