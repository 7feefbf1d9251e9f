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


_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_ASSUMED_ACCEPTANCE = 0.55  # of a draft that the vocabulary has, by a head trained for hours


def choose_size(
    counts: torch.Tensor,
    held_out: torch.Tensor,
    *,
    num_body_parameters: int,
    hidden_size: int,
    num_target_parameters: int,
    num_drafts: int,
    always: Sequence[int] = (),
) -> int:
    """The size whose head emits most tokens in the time of a plain step.

    A step of decoding reads every weight once, so its time is that of its weights: a draft step
    of a head with Vd output rows costs c = (body + Vd * H) / target of a target step. With a
    draft of K tokens, each accepted with probability alpha * coverage(Vd), a round emits
    sum_{k=0..K} (alpha * coverage)^k tokens in 1 + K * c. counts choose the tokens, held_out [V]
    is what they must cover.
    """
    sizes = [size for size in _SIZES if len(always) <= size < len(counts)] + [len(counts)]

    def goodput(size: int) -> float:
        alpha = _ASSUMED_ACCEPTANCE * coverage(held_out, select_vocabulary(counts, size, always))
        cost = (num_body_parameters + size * hidden_size) / num_target_parameters
        emitted: float = sum(alpha**k for k in range(num_drafts + 1))
        return emitted / (1 + num_drafts * cost)

    return max(sizes, key=goodput)
