"""Log probabilities that a client sees: of the model's own logits, before any processor."""

from collections.abc import Sequence

import torch

from engine.request import TokenLogprob
from engine.upload import upload


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Log probabilities of token_ids under logits [T, V], with the num_top best of each place."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    index = upload(list(token_ids), logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, index).squeeze(1).tolist()
    if num_top == 0:
        return tuple(
            TokenLogprob(token_id, logprob)
            for token_id, logprob in zip(token_ids, chosen, strict=True)
        )
    best = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    return tuple(
        TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            token_ids, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    )
