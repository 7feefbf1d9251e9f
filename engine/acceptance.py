"""The acceptance rules: pure tensor functions that keep the target's distribution.

Words. A row drafts K tokens after its newest one; the target computes K + 1 positions.
  accepted    the longest prefix of the drafts that the rule lets pass
  recovered   the token that replaces the first refused draft
  bonus       the token after K accepted drafts
  emitted     accepted tokens plus the recovered or bonus token: 1 to K + 1
R is the number of rows, K the longest proposal; shorter ones are padded and num_drafts says
where they end.
"""

import torch


def accept_coupled(
    target_token_ids: torch.Tensor,  # [R, K + 1] what the target draws at each position
    draft_token_ids: torch.Tensor,  # [R, K]
    num_drafts: torch.Tensor,  # [R]
) -> torch.Tensor:
    """[R] accepted drafts: those before the first that is not the target's own draw.

    The emitted tokens are target_token_ids[:, : accepted + 1], for any drafts at all: the
    output cannot depend on the drafter. Greedy decoding is the case without noise.
    """
    num_positions = draft_token_ids.shape[1]
    is_drafted = torch.arange(num_positions, device=num_drafts.device) < num_drafts.unsqueeze(1)
    is_match = (target_token_ids[:, :num_positions] == draft_token_ids) & is_drafted
    return is_match.long().cumprod(dim=1).sum(dim=1)


def accept_by_rejection(
    target_probs: torch.Tensor,  # [R, K + 1, V] float32
    draft_probs: torch.Tensor,  # [R, K, V] float32, the distribution each draft was drawn from
    draft_token_ids: torch.Tensor,  # [R, K]
    num_drafts: torch.Tensor,  # [R]
    uniform: torch.Tensor,  # [R, K] in (0, 1)
    noise: torch.Tensor,  # [R, K + 1, V] Gumbel noise of each position
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] accepted drafts and [R] the recovered or bonus token (Leviathan et al. 2023, Alg. 1).

    A draft passes with probability min(1, target / draft); the first refused one is replaced
    by a draw from the residual max(target - draft, 0), normalised. Deterministic drafters
    have one-hot draft_probs.
    """
    num_rows, num_positions = draft_token_ids.shape
    index = draft_token_ids.unsqueeze(-1)
    target_at_draft = target_probs[:, :num_positions].gather(2, index).squeeze(-1)
    draft_at_draft = draft_probs.gather(2, index).squeeze(-1)
    is_drafted = torch.arange(num_positions, device=num_drafts.device) < num_drafts.unsqueeze(1)
    passes = (uniform * draft_at_draft < target_at_draft) & is_drafted
    num_accepted = passes.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(num_rows, device=num_drafts.device)
    next_probs = next_token_probs(target_probs, draft_probs, num_accepted, num_drafts)
    scores = next_probs.log() + noise[rows, num_accepted]
    return num_accepted, scores.argmax(dim=1)


def next_token_probs(
    target_probs: torch.Tensor,  # [R, K + 1, V]
    draft_probs: torch.Tensor,  # [R, K, V]
    num_accepted: torch.Tensor,  # [R]
    num_drafts: torch.Tensor,  # [R]
) -> torch.Tensor:
    """[R, V] what the recovered or bonus token is drawn from, up to a factor per row.

    After a refusal the residual max(target - draft, 0), after full acceptance the target's
    own probabilities of the next position.
    """
    num_rows, num_positions = draft_probs.shape[:2]
    rows = torch.arange(num_rows, device=num_drafts.device)
    next_probs = target_probs[rows, num_accepted]
    if num_positions == 0:
        return next_probs
    refused_at = num_accepted.clamp(max=num_positions - 1)
    residual = (next_probs - draft_probs[rows, refused_at]).clamp(min=0)
    # The residual is zero everywhere only when both distributions are equal up to rounding.
    is_usable = (num_accepted < num_drafts) & (residual.sum(dim=1) > 0)
    return torch.where(is_usable.unsqueeze(1), residual, next_probs)
