"""Calls a model over our own slots: a plan of tokens in, logits out.

Beside engine/aligned_runner.py the only file that calls a model.
Models run unmodified. Their attention is replaced through transformers' AttentionInterface
by `_attend`, which writes the new keys and values into our slots and reads each row's own
history. A token's bits depend only on what is pinned here: masks are always explicit, the
query heads of a key head are folded into query rows, and rows, tokens and keys are padded
(engine/layout/plan.py).
"""

import inspect
import itertools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from engine.experts import pad_experts
from engine.kv_cache import KVCache
from engine.layout.plan import AttentionGroup, ForwardPlan, ForwardRow, Padding
from engine.layout.ragged import plan_forward

_runner_numbers = itertools.count()


class ModelRunner:
    """Runs one model over one cache."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, padding: Padding) -> None:
        self.model = model
        self.cache = cache
        self.padding = padding
        self.num_forwards = 0
        self.num_positions = 0
        self.align_nanoseconds = 0
        self._plan: ForwardPlan | None = None
        self._masks: dict[tuple[int, int | None, int], torch.Tensor] = {}
        # Registered per runner: the function needs this runner's cache and plan, and models
        # do not all hand extra arguments down to their attention.
        self._attention_name = f"tandem_{next(_runner_numbers)}"
        attend = weakref.WeakMethod(self._attend)  # the registry must not keep the model alive

        def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            method = attend()
            if method is None:
                raise RuntimeError("the runner of this model is gone")
            return method(*args, **kwargs)

        AttentionInterface.register(self._attention_name, attention)
        self._own_attention: str = model.config._attn_implementation
        model.set_attn_implementation(self._attention_name)
        pad_experts(model, self._num_tokens_multiple)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        """Logits [sum of num_logits, vocabulary] in the order of rows; model's own dtype.

        Writes keys and values beyond the rows' lengths but changes no length, so a forward
        that fails, or whose tokens are rejected, leaves nothing to undo.
        """
        started = time.perf_counter_ns()
        plan = plan_forward(rows, self.cache, self.padding)
        self.align_nanoseconds += time.perf_counter_ns() - started
        arguments: dict[str, Any] = {}
        if self._keeps_logits:
            arguments["logits_to_keep"] = plan.logit_index
        self._plan = plan
        self._masks.clear()
        try:
            output = self.model(
                input_ids=plan.input_ids,
                position_ids=plan.position_ids,
                use_cache=False,
                **arguments,
            )
        finally:
            self._plan = None
        self.num_forwards += 1
        self.num_positions += plan.num_tokens
        logits: torch.Tensor = output.logits[0]
        if not self._keeps_logits:
            logits = logits.index_select(0, plan.logit_index)
        return logits[: plan.num_logits]

    def _num_tokens_multiple(self) -> int:
        return self.padding.tokens

    @torch.inference_mode()
    def logits_by_own_attention(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """Logits [T - first, V] of positions first.. by the unmodified model, without a cache."""
        index = torch.arange(first, len(token_ids), device=self.model.device)
        arguments: dict[str, Any] = {"logits_to_keep": index} if self._keeps_logits else {}
        self.model.set_attn_implementation(self._own_attention)
        try:
            output = self.model(
                input_ids=torch.tensor([list(token_ids)], device=self.model.device),
                use_cache=False,
                **arguments,
            )
        finally:
            self.model.set_attn_implementation(self._attention_name)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits.index_select(0, index)

    def logits_afresh(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """Logits [T - first, V] by `forward`, in a cache that nobody else has touched."""
        served = self.cache
        self.cache = KVCache(
            served.shape, max_num_rows=1, max_tokens=max(len(token_ids), 2), num_blocks=1
        )
        try:
            row, _ = self.cache.allocate_row(token_ids[:1])
            return self.forward([ForwardRow(row, list(token_ids), 0, len(token_ids) - first)])
        finally:
            self.cache = served

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, num_heads, N, head_size]
        key: torch.Tensor,  # [1, num_kv_heads, N, head_size]
        value: torch.Tensor,  # [1, num_kv_heads, N, value_size]
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,  # [num_heads], sinks
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        plan = self._plan
        if plan is None:
            raise RuntimeError("the model was called outside ModelRunner.forward")
        layer: int = module.layer_idx  # type: ignore[assignment]
        num_heads, num_tokens = query.shape[1], query.shape[2]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(0, plan.slots, key[0].transpose(0, 1)[: plan.num_tokens])
        values.index_copy_(0, plan.slots, value[0].transpose(0, 1)[: plan.num_tokens])
        tokens = query[0].transpose(0, 1).reshape(num_tokens, -1)  # [N, num_heads * head_size]
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        outputs = [
            self._attend_group(
                index, group, tokens, keys, values, num_heads, scale, sliding_window, softcap, s_aux
            )
            for index, group in enumerate(plan.groups)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if not (plan.output_is_in_order and joined.shape[0] == num_tokens):
            joined = joined.index_select(0, plan.output_index)
        return joined.view(1, num_tokens, num_heads, -1), None

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
        num_padding = -(fold * width) % self.padding.query_rows
        if num_padding:
            folded = F.pad(folded, (0, 0, 0, num_padding))
        mask = self._mask(index, group, fold, window, folded.dtype)
        group_keys = _rows_of(keys, group, self.cache.block_size)
        group_values = _rows_of(values, group, self.cache.block_size)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                folded, group_keys, group_values, attn_mask=mask, scale=scale
            )
        else:
            if sinks is not None:
                sinks = sinks.view(num_kv_heads, fold, 1).expand(-1, -1, width)
                sinks = F.pad(sinks.reshape(num_kv_heads, -1), (0, num_padding))
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
        num_padding = -mask.shape[1] % self.padding.query_rows
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
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.matmul(weights[..., : values.shape[2]], values)
