"""What an engine would have drafted over a logged answer, seed and all.

Under the coupled rule target and drafter draw with the same noise, which follows from the
request's seed and the position. So the drafts of any head over an answer that was sampled are
known without a server, and a draft is accepted where it is the answer's own token.
"""

from collections.abc import Sequence

import torch

from engine.noise import Stream, gumbel_noise, noise_key
from engine.training.unrolled import Batch


@torch.inference_mode()
def coupled_matches(
    outputs: Sequence[torch.Tensor],
    batch: Batch,
    output_weight: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    temperature: float,
    seed: int,
) -> list[list[bool]]:
    """is_match of `walk_rounds` for one conversation, sampled with `seed` at temperature > 0.

    outputs: of `unroll` over a batch of this conversation alone, [1, A, H] per step.
    output_weight [Vd, H], draft_token_ids [Vd].
    """
    anchors, limits = batch.anchors[0], batch.depth_limits[0]
    last = len(batch.token_ids) - 1
    matches = []
    for step, output in enumerate(outputs):
        drafted = anchors + 2 + step  # [A] places in the text
        keys = [noise_key(seed, place, Stream.TARGET) for place in drafted.tolist()]
        logits = torch.matmul(output[0], output_weight.to(output.dtype).t()).float() / temperature
        choice = (logits + gumbel_noise(keys, draft_token_ids)).argmax(dim=-1)
        matches.append(draft_token_ids[choice] == batch.token_ids[drafted.clamp(max=last)])
    rows = torch.stack(matches, dim=1).tolist()  # [A, K]
    return [row[:limit] for row, limit in zip(rows, limits.tolist(), strict=True) if limit]
