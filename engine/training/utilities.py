"""What a draft path is worth, from the acceptance probabilities along it.

accept [..., K]: a_k, the probability that draft k is accepted given that those before it
were. reached_k is their running product: the probability that the first k are accepted.
"""

from collections.abc import Callable

import torch

from engine.training.errors import TrainingError

# (accept [..., K], target log-probabilities of the drafts [..., K]) -> utility [...]
Utility = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COST_PER_DRAFT = 0.12  # of a verification step's time, drafting and verifying one more token
_FIDELITY_WEIGHT = 0.05
_MIN_UTILITY = 1e-6


def accept_probs(target_logprobs: torch.Tensor, draft_logprobs: torch.Tensor) -> torch.Tensor:
    """a = min(1, target probability / draft probability), elementwise (Leviathan et al. 2023)."""
    return torch.exp((target_logprobs - draft_logprobs).clamp(max=0.0))


def expected_length(accept: torch.Tensor, target_logprobs: torch.Tensor) -> torch.Tensor:
    """Expected accepted drafts: the sum of reached_k. The verifier's coins are integrated out."""
    return accept.cumprod(-1).sum(-1)


def cost_aware(accept: torch.Tensor, target_logprobs: torch.Tensor) -> torch.Tensor:
    """Expected accepted drafts, less what drafting and verifying the path costs in tokens."""
    num_drafts = accept.shape[-1]
    return (expected_length(accept, target_logprobs) - _COST_PER_DRAFT * num_drafts).clamp(
        min=_MIN_UTILITY
    )


def all_accepted(accept: torch.Tensor, target_logprobs: torch.Tensor) -> torch.Tensor:
    """The probability that the whole path is accepted (the kappa of arXiv 2602.05774)."""
    return accept.prod(-1)


def with_fidelity(accept: torch.Tensor, target_logprobs: torch.Tensor) -> torch.Tensor:
    """Expected accepted drafts times a power of the path's probability under the target: the
    fidelity term made explicit, on top of the one in the bound."""
    fidelity = torch.exp(_FIDELITY_WEIGHT * target_logprobs.clamp(min=-50.0).sum(-1))
    return expected_length(accept, target_logprobs) * fidelity


UTILITIES: dict[str, Utility] = {
    "expected_length": expected_length,
    "cost_aware": cost_aware,
    "all_accepted": all_accepted,
    "with_fidelity": with_fidelity,
}


def find_utility(name: str) -> Utility:
    """Raises TrainingError for a name that is none."""
    try:
        return UTILITIES[name]
    except KeyError:
        known = ", ".join(sorted(UTILITIES))
        raise TrainingError(f"variational.utility: {name!r} is none of {known}") from None
