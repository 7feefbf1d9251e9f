"""Which tokens a head can draft: the most frequent ones, counted on text like that served.

Counting needs no model, so it reads far more text than the head is trained on. Tokens that
end a turn are always in; ties go to the lower id, which for byte-pair vocabularies is the
token merged earlier, the likelier one.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.training.errors import TrainingError


def count_tokens(sequences: Iterable[Sequence[int]], vocab_size: int) -> torch.Tensor:
    """[V] int64: how often each token occurs."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids in sequences:
        if token_ids:
            counts += torch.bincount(torch.tensor(list(token_ids)), minlength=vocab_size)
    return counts


def select_vocabulary(counts: torch.Tensor, size: int, always: Sequence[int] = ()) -> torch.Tensor:
    """[size] token ids in ascending order. Raises TrainingError if the size cannot be had."""
    if not len(always) <= size <= len(counts):
        raise TrainingError(
            f"head.draft_vocab_size: {size} is not between {len(always)} and {len(counts)}"
        )
    keys = counts.clone()
    keys[list(always)] = keys.max() + 1
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: torch.Tensor, token_ids: torch.Tensor) -> float:
    """Share of the counted tokens that the vocabulary has."""
    return float(counts[token_ids].sum() / counts.sum().clamp(min=1))
