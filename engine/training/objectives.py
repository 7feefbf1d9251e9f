"""The losses a head can be trained with, as functions of its scores.

Names and sources. alpha_k is the overlap of step k: the probability that a draft drawn there
is accepted.
  soft_cross_entropy  -sum p log q (EAGLE-3; Li et al. 2025), weights 0.8^k
  kl                  the same up to the target's entropy, which no gradient sees
  nla                 -log alpha_k, weights 0.8^k (its gradient is that of 1 - alpha over alpha)
  lk_hybrid           lambda KL + (1 - lambda)(1 - alpha), lambda = exp(-3 sg[alpha])
                      (arXiv 2602.23881), weights 0.8^k
  griffin             soft cross-entropy of steps whose previous token the head ranked first
                      (after Hu et al. 2025, GRIFFIN, which masks by its top three)
  d_pace              weights: the running product of the smoothed overlaps before a step
  path                -sum_j sg[w_j] log alpha'_j with w_j = sum_{k >= j} prod_{i <= k} alpha'_i,
                      the derivative of the expected accepted length by log alpha_j, and
                      alpha' = (1 - s) alpha + s. This weighting is ours (level A of the
                      variational stage); published code has none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.training.errors import TrainingError
from engine.training.scores import DraftScores

STEP_DECAY = 0.8
_LK_SHARPNESS = 3.0
_SMOOTHING = 0.5
_MIN_OVERLAP = 1e-6


@dataclass(frozen=True, slots=True)
class Objective:
    """loss(scores) -> scalar. needs_overlap_gradient says which scores it reads."""

    name: str
    loss: Callable[[DraftScores], torch.Tensor]
    needs_overlap_gradient: bool


def _decay(scores: DraftScores) -> torch.Tensor:
    """[K, M] weights 0.8^k, 0 where there is no teacher."""
    valid = scores.is_valid
    steps = torch.arange(len(valid), dtype=torch.float32, device=valid.device).unsqueeze(1)
    return STEP_DECAY**steps * valid


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def soft_cross_entropy(scores: DraftScores) -> torch.Tensor:
    return _mean(scores.cross_entropy, _decay(scores))


def negative_log_overlap(scores: DraftScores) -> torch.Tensor:
    return _mean(-scores.overlap.clamp(min=_MIN_OVERLAP).log(), _decay(scores))


def lk_hybrid(scores: DraftScores) -> torch.Tensor:
    share = torch.exp(-_LK_SHARPNESS * scores.overlap.detach())
    return _mean(share * scores.cross_entropy + (1 - share) * (1 - scores.overlap), _decay(scores))


def griffin(scores: DraftScores) -> torch.Tensor:
    reached = torch.ones_like(scores.overlap)
    reached[1:] = scores.is_match[:-1].float().cumprod(0)
    return _mean(scores.cross_entropy, _decay(scores) * reached)


def d_pace(scores: DraftScores) -> torch.Tensor:
    smooth = _smooth(scores).detach()
    before = torch.ones_like(smooth)
    before[1:] = smooth[:-1].cumprod(0)
    return _mean(scores.cross_entropy, before * scores.is_valid)


def path_weights(overlap: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
    """[K, M] w_j = sum over k >= j of the product of overlaps up to k: d(expected accepted
    length) / d(log overlap_j). overlap and is_valid [K, M]."""
    reached = (overlap * is_valid).cumprod(0)
    return reached.flip(0).cumsum(0).flip(0)


def _smooth(scores: DraftScores) -> torch.Tensor:
    return (1 - _SMOOTHING) * scores.overlap + _SMOOTHING


def path(scores: DraftScores) -> torch.Tensor:
    smooth = _smooth(scores)
    weights = path_weights(smooth.detach(), scores.is_valid)
    loss = -(weights * smooth.log()).sum() / scores.is_valid[0].sum().clamp(min=1)
    return loss + 0.1 * soft_cross_entropy(scores)


OBJECTIVES = {
    "soft_cross_entropy": Objective("soft_cross_entropy", soft_cross_entropy, False),
    "kl": Objective("kl", soft_cross_entropy, False),
    "nla": Objective("nla", negative_log_overlap, True),
    "lk_hybrid": Objective("lk_hybrid", lk_hybrid, True),
    "griffin": Objective("griffin", griffin, False),
    "d_pace": Objective("d_pace", d_pace, False),
    "path": Objective("path", path, True),
}


def find_objective(name: str) -> Objective:
    """Raises TrainingError for a name that is none."""
    try:
        return OBJECTIVES[name]
    except KeyError:
        raise TrainingError(
            f"objective: {name!r} is none of {', '.join(sorted(OBJECTIVES))}"
        ) from None


def expected_accepted(overlap: torch.Tensor, is_valid: torch.Tensor) -> float:
    """Mean over anchors of sum_k prod_{j <= k} alpha_j: accepted drafts per round."""
    reached = (overlap * is_valid).cumprod(0).sum(0)
    mean = float(reached.detach().mean())
    return mean if math.isfinite(mean) else 0.0
