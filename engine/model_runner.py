"""Calls a model over our own slots: a plan of tokens in, logits out.

Beside engine/aligned_runner.py and engine/reading.py the only file that calls a model.
Models run as transformers wrote them, or with layers that compute the same in fewer operations
(engine/lean_layers.py). Their attention is replaced through transformers' AttentionInterface by
`_attend`, which works over our slots (engine/planned_attention.py).
"""

import inspect
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, astuple
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.bucketed_forward import BucketedForward, Recorder
from engine.experts import pad_experts
from engine.kv_cache import KVCache
from engine.layout.grouping import UNMEASURED
from engine.layout.plan import ForwardPlan, ForwardRow, Padding
from engine.layout.ragged import plan_forward
from engine.planned_attention import PlannedAttention
from engine.reading import FreshReading, OwnReading
from engine.row_cache import RowCache
from engine.state_listeners import listeners_of

_runner_numbers = itertools.count()


class ModelRunner:
    """Runs one model over one cache."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, padding: Padding) -> None:
        self.model = model
        self.cache = cache
        self.padding = padding
        self.attention_costs = UNMEASURED
        self.num_forwards = 0
        self.num_positions = 0
        self.num_row_tokens = 0
        self.align_nanoseconds = 0
        self.attends_by_hand = False
        self.buckets: BucketedForward | None = None
        self._attention: PlannedAttention | None = None
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
        buckets = self.buckets if self.buckets and self.buckets.cache is self.cache else None
        bucket = buckets.choose(rows) if buckets else None
        if buckets and bucket:
            before = buckets.align_nanoseconds
            logits = buckets.forward(rows, bucket)
            self.align_nanoseconds += buckets.align_nanoseconds - before
            num_positions, num_row_tokens = sum(len(r.token_ids) for r in rows), bucket.num_tokens
        else:
            started = time.perf_counter_ns()
            plan = plan_forward(rows, self.cache, self.padding, self.attention_costs)
            self.align_nanoseconds += time.perf_counter_ns() - started
            with self._told(rows):
                logits = self._compute(plan)[: plan.num_logits]
            num_positions, num_row_tokens = plan.num_tokens, plan.input_ids.shape[1]
        self.num_forwards += 1
        self.num_positions += num_positions
        self.num_row_tokens += num_row_tokens
        return logits

    def _compute(self, plan: ForwardPlan) -> torch.Tensor:
        """Logits of plan.logit_index [M, vocabulary]."""
        arguments = {"logits_to_keep": plan.logit_index} if self._keeps_logits else {}
        self._attention = attention = PlannedAttention(plan, self.cache, self.padding)
        try:
            output = self.model(
                input_ids=plan.input_ids,
                position_ids=plan.position_ids,
                use_cache=False,
                **arguments,
            )
        finally:
            self._attention = None
        self.attends_by_hand |= attention.is_by_hand
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits.index_select(0, plan.logit_index)

    def use_buckets(self, recorder: Recorder) -> None:
        """From now on forwards over the present cache, one of small blocks, have a few shapes."""
        if self.cache.shape.shards is not None:
            raise ValueError("shards compute forwards of their own size")
        self.buckets = BucketedForward(
            self._compute, self.cache, self.padding, lambda: listeners_of(self.model), recorder
        )

    def _told(self, rows: Sequence[ForwardRow]) -> AbstractContextManager[None]:
        """Where the model has shards, the other processes compute the same rows."""
        shards = self.cache.shape.shards
        if shards is None:
            return nullcontext()
        blocks = {row.row: self.cache.block_table(row.row) for row in rows}
        described = [asdict(row) for row in rows]
        return shards.planned(self.cache.number, described, blocks, astuple(self.padding))

    def _num_tokens_multiple(self) -> int:
        return self.padding.tokens

    def own_reading(self, *, is_whole: bool) -> OwnReading:
        """See TargetRunner."""
        return OwnReading(
            self.model, self._attending_itself, keeps_logits=self._keeps_logits, is_whole=is_whole
        )

    @contextmanager
    def _attending_itself(self) -> Iterator[None]:
        self.model.set_attn_implementation(self._own_attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(self._attention_name)

    def fresh_reading(self, num_tokens: int) -> FreshReading:
        """See TargetRunner."""
        cache = KVCache(
            self.cache.shape, max_num_rows=1, max_tokens=max(num_tokens, 2), num_blocks=1
        )
        return FreshReading(self, cache)

    def swap_cache(self, cache: RowCache) -> RowCache:
        """Compute over this cache, a KVCache, from now on; the one before."""
        served, self.cache = self.cache, cast(KVCache, cache)
        return served

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
        attention = self._attention
        if attention is None:
            raise RuntimeError("the model was called outside ModelRunner.forward")
        layer: int = module.layer_idx  # type: ignore[assignment]
        attended = attention.attend(
            layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return attended.unsqueeze(0), None
