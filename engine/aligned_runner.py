"""Calls a model over a plain transformers cache: any attention, nothing replaced.

Beside engine/model_runner.py and engine/reading.py the only file that calls a model. What a row's
tokens are, where they lie and what they may see is said in the terms that every causal model of
transformers understands: a rectangle of tokens, a mask of columns, position ids, a DynamicCache.
"""

import inspect
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from engine.kv_storage import KVCacheShape
from engine.layout.aligned import AlignedCache
from engine.layout.grouping import share_forwards
from engine.layout.plan import NO_PADDING, ForwardRow
from engine.layout.rectangle import Rectangle
from engine.reading import FreshReading, OwnReading
from engine.row_cache import RowCache
from engine.suitability import cache_argument
from engine.upload import upload


class AlignedRunner:
    """Runs one model over one AlignedCache.

    Rows of up to max_shared_width tokens share a forward; wider ones, chunks of prompts, share one
    with others of their width, so that little is computed for padding.
    """

    def __init__(
        self, model: PreTrainedModel, cache: AlignedCache, *, max_shared_width: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.padding = NO_PADDING
        self.num_forwards = 0
        self.num_positions = 0
        self.num_row_tokens = 0
        self.align_nanoseconds = 0
        self._max_shared_width = max_shared_width
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_argument(model)

    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        """Logits [sum of num_logits, vocabulary] in the order of rows; model's own dtype.

        Adds columns beyond the rows' lengths but changes no length; see AlignedCache. Raises
        ValueError for a row that does not start at its length: its positions would be wrong.
        """
        widths = [len(row.token_ids) for row in rows]
        logits: dict[int, torch.Tensor] = {}
        for batch in share_forwards(widths, self._max_shared_width):
            found = self._forward([rows[index] for index in batch])
            logits.update(zip(batch, found, strict=True))
        return torch.cat([logits[index] for index in range(len(rows))])

    @torch.inference_mode()
    def _forward(self, rows: Sequence[ForwardRow]) -> list[torch.Tensor]:
        """Logits [num_logits, V] of each row, from one call of the model."""
        started = time.perf_counter_ns()
        for row in rows:
            if row.start != self.cache.length(row.row):
                raise ValueError(
                    f"row {row.row} starts at {row.start}, {self.cache.length(row.row)} tokens "
                    "are in its cache"
                )
        places = [row.row for row in rows]
        rectangle = self.cache.batch(places)
        width = max(len(row.token_ids) for row in rows)
        arguments = self._arguments(rows, rectangle, width)
        past = _plain_cache(rectangle)
        self.align_nanoseconds += time.perf_counter_ns() - started
        num_kept = width
        if self._keeps_logits:
            wanted = [width - len(r.token_ids) + r.num_logits for r in rows if r.num_logits]
            num_kept = arguments["logits_to_keep"] = max(wanted, default=1)
        output = self.model(use_cache=True, **{self._cache_name: past}, **arguments)
        keys, values = _contents(past, self.cache.shape, rectangle.num_columns + width)
        self.cache.grow(places, keys, values)
        self.num_forwards += 1
        self.num_positions += sum(len(row.token_ids) for row in rows)
        self.num_row_tokens += len(rows) * width
        logits: torch.Tensor = output.logits[:, -num_kept:]  # [R, num_kept, V]
        dropped = width - num_kept
        found = []
        for index, row in enumerate(rows):
            stop = len(row.token_ids) - dropped
            found.append(
                logits[index, stop - row.num_logits : stop] if row.num_logits else logits[index, :0]
            )
        return found

    def _arguments(
        self, rows: Sequence[ForwardRow], rectangle: Rectangle, width: int
    ) -> dict[str, Any]:
        """Tokens and positions [R, W] and the mask of columns [R, C + W].

        Rows with fewer new tokens are filled up on the right, where causality hides the filling
        from every token that counts.
        """
        input_ids, positions, mask = [], [], []
        for row, pad in zip(rows, rectangle.pads, strict=True):
            count = len(row.token_ids)
            missing = width - count
            last = row.start + count - 1
            input_ids.append([*row.token_ids, *[0] * missing])
            positions.append([*range(row.start, row.start + count), *[last] * missing])
            seen = rectangle.num_columns - pad + count
            mask.append([*[0] * pad, *[1] * seen, *[0] * missing])
        device = self.model.device
        arguments: dict[str, Any] = {
            "input_ids": upload(input_ids, device),
            "attention_mask": upload(mask, device),
        }
        if self._takes_positions:
            arguments["position_ids"] = upload(positions, device)
        return arguments

    def own_reading(self, *, is_whole: bool) -> OwnReading:
        """See TargetRunner."""
        return OwnReading(
            self.model, nullcontext, keeps_logits=self._keeps_logits, is_whole=is_whole
        )

    def fresh_reading(self, num_tokens: int) -> FreshReading:
        """See TargetRunner."""
        cache = AlignedCache(
            self.cache.shape, max_num_rows=1, max_tokens=max(num_tokens, 2), num_blocks=1
        )
        return FreshReading(self, cache)

    def swap_cache(self, cache: RowCache) -> RowCache:
        """Compute over this cache, an AlignedCache, from now on; the one before."""
        served, self.cache = self.cache, cast(AlignedCache, cache)
        return served


def _plain_cache(rectangle: Rectangle) -> DynamicCache:
    cache = DynamicCache()
    for keys, values in zip(rectangle.keys, rectangle.values, strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _contents(
    cache: Cache, shape: KVCacheShape, num_columns: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of all layers; raises RuntimeError unless all hold num_columns."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != num_columns:
            raise RuntimeError(f"a layer does not hold {num_columns} columns after a forward")
        assert layer.keys is not None and layer.values is not None  # noqa: S101, PT018
        keys.append(layer.keys)
        values.append(layer.values)
    if len(keys) != shape.num_layers:
        raise RuntimeError(f"{len(keys)} of {shape.num_layers} layers hold keys")
    return keys, values
