"""Reads a text through a target, some tokens at a time, without touching what is being served.

An audit takes as long as its text, and a request that arrives must not wait for all of it: it
reads in slices, each over what the slices before it left behind.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from engine.layout.plan import ForwardRow
from engine.row_cache import RowCache
from engine.suitability import cache_argument


class Reading(Protocol):
    """A text that is being read."""

    def read(self, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
        """Logits [num_logits, V] of the last of these tokens, which follow those read before."""
        ...


class OwnReading:
    """By the model as transformers computes it: its own attention, over its own kind of cache.

    attending is around every call, and makes the model's own attention that which it calls.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attending: Callable[[], AbstractContextManager[None]],
        *,
        keeps_logits: bool,
        is_whole: bool,
    ) -> None:
        """is_whole: all tokens come in one read, and need no cache."""
        self._model = model
        self._attending = attending
        self._keeps_logits = keeps_logits
        self._past = None if is_whole else DynamicCache(config=model.config)
        self._num_read = 0

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
        """Raises ValueError for tokens that follow others without a cache to see those in."""
        if self._past is None and self._num_read:
            raise ValueError("a text that is read as a whole does not go on")
        arguments: dict[str, Any] = {"use_cache": self._past is not None}
        if self._past is not None:
            arguments[cache_argument(self._model)] = self._past
        if self._keeps_logits:
            arguments["logits_to_keep"] = max(1, num_logits)
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        with self._attending():
            output = self._model(input_ids=input_ids, **arguments)
        self._num_read += len(token_ids)
        logits: torch.Tensor = output.logits[0]
        return logits[len(logits) - num_logits :]


class ServingRunner(Protocol):
    """What a fresh reading needs of the runner of a layout."""

    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor: ...

    def swap_cache(self, cache: RowCache) -> RowCache:
        """Compute over this cache from now on; the one before."""
        ...


class FreshReading:
    """As requests are served, in a cache of its own that nobody else has touched."""

    def __init__(self, runner: ServingRunner, cache: RowCache) -> None:
        """cache: empty, of one row that is long enough."""
        self._runner = runner
        self._cache = cache
        self._row: int | None = None
        self._read: list[int] = []

    def read(self, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
        if self._row is None:
            self._row, _ = self._cache.allocate_row(token_ids[:1])
        start = len(self._read)
        self._read.extend(token_ids)
        served = self._runner.swap_cache(self._cache)
        try:
            logits = self._runner.forward(
                [ForwardRow(self._row, list(token_ids), start, num_logits)]
            )
        finally:
            self._runner.swap_cache(served)
        self._cache.commit(self._row, self._read, len(self._read))
        return logits
