"""How much each of several draft paths of a context counts, and each position of a path.

The bound that training maximises is E_q[log U] - KL(q || p) with q the head, p the target
and U a path's utility; its maximum over all distributions is q*(z) ~ p(z) U(z). The E-step
approximates q* by paths drawn from a mixture of the tempered head and the target and
weighted by p(z) U(z) / proposal(z), normalised within each context (self-normalised
importance sampling, the proposal density being the whole mixture's: Veach and Guibas 1995,
balance heuristic). The objective is that of Variational Speculative Decoding (arXiv
2602.05774), whose formulas for weights and regularisers are unpublished: those here are ours.
"""

import math
from dataclasses import dataclass

import torch

_FREQUENCY_FADE = 0.95
_MIN_FREQUENCY = 1e-3
_ARW_RANGE = (0.25, 4.0)


@dataclass(frozen=True, slots=True)
class WeightedPaths:
    """weights [C, S] sum to one per context; effective_share [C] is ESS / S."""

    weights: torch.Tensor
    effective_share: torch.Tensor


def log_mixture(
    target_logprobs: torch.Tensor, tempered_logprobs: torch.Tensor, target_share: float
) -> torch.Tensor:
    """[C, S] log density of the proposal: target_share of the paths come from the target.

    Both arguments [C, S]: the log-probability of each whole path.
    """
    parts = []
    if target_share > 0:
        parts.append(target_logprobs + math.log(target_share))
    if target_share < 1:
        parts.append(tempered_logprobs + math.log(1.0 - target_share))
    return torch.logsumexp(torch.stack(parts), dim=0)


def importance_weights(
    target_logprobs: torch.Tensor,
    proposal_logprobs: torch.Tensor,
    utility: torch.Tensor,
    *,
    clip: float,
    uses_correction: bool = True,
) -> WeightedPaths:
    """w ~ p(z) U(z) / proposal(z), all [C, S], normalised per context.

    The ratio p / proposal is clipped to [1 / clip, clip] times its context's geometric mean:
    variance for a little bias. A context whose paths all have no utility falls back to equal
    weights. uses_correction=False leaves p / proposal out: what a naive reward weighting does,
    kept to show that it is worse.
    """
    log_ratio = target_logprobs - proposal_logprobs
    if uses_correction:
        bound = math.log(clip)
        centre = log_ratio.mean(-1, keepdim=True)
        log_ratio = centre + (log_ratio - centre).clamp(-bound, bound)
    else:
        log_ratio = torch.zeros_like(log_ratio)
    log_weights = log_ratio + utility.clamp(min=1e-12).log()
    weights = torch.softmax(log_weights, dim=-1)
    hopeless = utility.sum(-1, keepdim=True) <= 0
    weights = torch.where(hopeless, torch.full_like(weights, 1.0 / weights.shape[-1]), weights)
    return WeightedPaths(weights, effective_share(weights))


def effective_share(weights: torch.Tensor) -> torch.Tensor:
    """Effective sample size over sample size: 1 / (S * sum w^2) (Kong 1992). weights [C, S]."""
    return 1.0 / (weights.square().sum(-1) * weights.shape[-1])


def chain_moves(
    log_desired: torch.Tensor,
    proposal_logprobs: torch.Tensor,
    num_moves: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """[C, S] weights by Metropolis-Hastings over a context's own paths: a chain per path starts
    there and proposes other paths of the context, accepting z -> z' with
    min(1, pi(z') g(z) / (pi(z) g(z'))), pi the unnormalised desired density and g the
    proposal's. The share of chains that end at a path is its weight.
    """
    num_contexts, num_paths = log_desired.shape
    log_ratio = log_desired - proposal_logprobs
    device = log_ratio.device
    place = torch.arange(num_paths, device=device).expand(num_contexts, num_paths).clone()
    for _ in range(num_moves):
        proposed = torch.randint(num_paths, place.shape, generator=generator).to(device)
        gain = log_ratio.gather(1, proposed) - log_ratio.gather(1, place)
        accepted = torch.rand(place.shape, generator=generator).to(device).log() < gain
        place = torch.where(accepted, proposed, place)
    counts = torch.zeros_like(log_desired).scatter_add_(1, place, torch.ones_like(log_desired))
    return counts / num_paths


def position_weights(accept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight of imitating draft k, weight of learning the target's correction at k), [..., K].

    Draft k is imitated as far as it is reached and accepted; where a path is first rejected,
    the target's own distribution is the lesson; behind that nothing is.
    """
    reached = accept.cumprod(-1)
    before = torch.ones_like(reached)
    before[..., 1:] = reached[..., :-1]
    return reached, before * (1 - accept)


class RejectionBalance:
    """Adaptive rejection weighting: the lesson at depth k weighs the inverse square root of how
    often paths are first rejected there, within [0.25, 4], so that the common rejections at
    the first depths do not drown the rare deep ones."""

    def __init__(self, num_steps: int) -> None:
        self.frequency = torch.full((num_steps,), 1.0 / num_steps)

    def weights(self, first_rejection: torch.Tensor) -> torch.Tensor:
        """[K] for a batch whose probabilities of a first rejection are [..., K]; learns them."""
        seen = first_rejection.reshape(-1, first_rejection.shape[-1]).mean(0)
        known = self.frequency.to(seen.device)
        self.frequency = _FREQUENCY_FADE * known + (1 - _FREQUENCY_FADE) * seen
        balance = (len(self.frequency) * self.frequency.clamp(min=_MIN_FREQUENCY)).rsqrt()
        return balance.clamp(*_ARW_RANGE)


def confidence_penalty(
    confidence: torch.Tensor, accepted: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Confidence-aware regularisation: the weighted mean of the binary cross-entropy between the
    head's confidence in its best token and whether the target accepts it. It grows without
    bound with the confidence where the target disagrees, and vanishes where both are sure."""
    sure = confidence.clamp(1e-5, 1 - 1e-5)
    loss = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
    return (loss * weights).sum() / weights.sum().clamp(min=1e-6)
