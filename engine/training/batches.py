"""In what order conversations are trained on: a function of seed and step alone.

So a run that resumes needs no state of a sampler: it asks for the batch of its step.
"""

import random
from collections.abc import Sequence

from engine.training.feature_cache import CachedRow

_POOL_BATCHES = 8


def epoch_batches(
    rows: Sequence[CachedRow], *, batch_tokens: int, seed: int, epoch: int
) -> list[list[CachedRow]]:
    """Batches of conversations of similar length, at most batch_tokens padded tokens each (one
    longer conversation is a batch of its own)."""
    generator = random.Random(f"{seed}-{epoch}")  # noqa: S311 - an order, not a secret
    order = list(rows)
    generator.shuffle(order)
    batches: list[list[CachedRow]] = []
    pool_size = max(1, _POOL_BATCHES * batch_tokens // 256)
    for start in range(0, len(order), pool_size):
        pool = sorted(order[start : start + pool_size], key=lambda row: row.num_tokens)
        batch: list[CachedRow] = []
        for row in pool:
            if batch and (len(batch) + 1) * row.num_tokens > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        if batch:
            batches.append(batch)
    generator.shuffle(batches)
    return batches


class BatchOrder:
    """The batch of any step."""

    def __init__(self, rows: Sequence[CachedRow], *, batch_tokens: int, seed: int) -> None:
        self._rows = rows
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._epoch = -1
        self._first_step = 0
        self._batches: list[list[CachedRow]] = []

    def __getitem__(self, step: int) -> list[CachedRow]:
        if step < self._first_step:
            self._epoch, self._first_step, self._batches = -1, 0, []
        while step >= self._first_step + len(self._batches):
            self._first_step += len(self._batches)
            self._epoch += 1
            self._batches = epoch_batches(
                self._rows, batch_tokens=self._batch_tokens, seed=self._seed, epoch=self._epoch
            )
        return self._batches[step - self._first_step]
