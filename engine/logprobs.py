"""Log probabilities that a client sees: of the model's own logits, before any processor."""

from collections.abc import Sequence

import torch

from engine.request import TokenLogprob
from engine.upload import upload

POSITIONS_AT_ONCE = 64  # whose logprobs exist in float32 at the same time


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Log probabilities of token_ids under logits [T, V], with the num_top best of each place."""
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), POSITIONS_AT_ONCE):
        last = first + POSITIONS_AT_ONCE
        found += _of_some(logits[first:last], token_ids[first:last], num_top)
    return tuple(found)


def _of_some(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    index = upload(list(token_ids), logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, index).squeeze(1).tolist()
    if num_top == 0:
        return [TokenLogprob(*pair) for pair in zip(token_ids, chosen, strict=True)]
    best = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            token_ids, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
