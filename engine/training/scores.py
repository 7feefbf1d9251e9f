"""How close a head's distribution is to the target's, for all anchors and draft steps.

The draft vocabulary is reduced. For the overlap, the target's probabilities are restricted to
it and not renormalised: a token that cannot be drafted is lost acceptance. For the
cross-entropy they are renormalised, so that what cannot be drafted teaches nothing.

Vocabulary-wide tensors exist for a chunk of anchors at a time. The gradients of both scores
with respect to the head's states are computed in the forward pass (they are linear in what
comes from above, one number per anchor and step), so nothing of that size is kept.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.training.unrolled import Batch

_CHUNK = 192


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target as the head sees it: output rows [Vd, H] of the draft vocabulary, and the
    token id of each [Vd]. temperature scales the target's logits."""

    output_rows: torch.Tensor
    draft_token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftScores:
    """Per draft step k and anchor m, all [K, M]. M anchors that have a teacher at step 0.

    cross_entropy: -sum p log q over the draft vocabulary, p renormalised there.
    overlap: sum min(p, q), the acceptance probability of a draft drawn from q.
    is_match: the head's best token is the target's best token. confidence: the head's
    probability of its best token. is_valid: the step has a teacher.
    """

    cross_entropy: torch.Tensor
    overlap: torch.Tensor
    is_match: torch.Tensor
    confidence: torch.Tensor
    is_valid: torch.Tensor


def score(
    outputs: list[torch.Tensor],
    batch: Batch,
    output_weight: torch.Tensor,
    teacher: Teacher,
    *,
    needs_overlap_gradient: bool,
    needs_confidence_gradient: bool = False,
) -> DraftScores:
    """outputs: of `unroll`, [B, A, H] per step. output_weight [Vd, H]: the head's own layer."""
    chosen = batch.depth_limits > 0  # [B, A]
    rows = batch.teacher_rows[chosen]  # [M]
    limits = batch.depth_limits[chosen]
    states = torch.stack([output[chosen] for output in outputs])  # [K, M, H]
    steps = torch.arange(len(outputs), device=limits.device).unsqueeze(1)
    is_valid = steps < limits
    teacher_rows = (rows + steps).clamp(max=len(batch.last) - 1)  # [K, M]
    cross_entropy, overlap, is_match, confidence = _Scores.apply(  # type: ignore[no-untyped-call]
        states,
        output_weight,
        batch.last,
        batch.log_normalizer,
        batch.best_token_ids,
        teacher_rows,
        teacher.output_rows,
        teacher.draft_token_ids,
        needs_overlap_gradient,
        needs_confidence_gradient,
    )
    return DraftScores(cross_entropy, overlap, is_match, confidence, is_valid)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,  # [K, M, H]
        output_weight: torch.Tensor,  # [Vd, H]
        last: torch.Tensor,  # [N, H]
        log_normalizer: torch.Tensor,  # [N]
        best_token_ids: torch.Tensor,  # [N]
        teacher_rows: torch.Tensor,  # [K, M]
        teacher_weight: torch.Tensor,  # [Vd, H]
        draft_token_ids: torch.Tensor,  # [Vd]
        needs_overlap_gradient: bool,
        needs_confidence_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_steps, num_anchors, _ = states.shape
        shape = (num_steps, num_anchors)
        device = states.device
        cross_entropy = torch.zeros(shape, device=device)
        overlap, confidence = torch.zeros_like(cross_entropy), torch.zeros_like(cross_entropy)
        is_match = torch.zeros(shape, dtype=torch.bool, device=device)
        by_cross_entropy = torch.zeros_like(states) if states.requires_grad else None
        by_overlap = (
            torch.zeros_like(states) if states.requires_grad and needs_overlap_gradient else None
        )
        by_confidence = (
            torch.zeros_like(states) if states.requires_grad and needs_confidence_gradient else None
        )
        weight = output_weight.to(states.dtype)
        for start in range(0, num_anchors, _CHUNK):
            part = slice(start, min(start + _CHUNK, num_anchors))
            needed, place = torch.unique(teacher_rows[:, part], return_inverse=True)
            logits = torch.matmul(last[needed], teacher_weight.t()).float()
            probs_of_rows = torch.exp(logits - log_normalizer[needed].unsqueeze(1))  # [U, Vd]
            for step in range(num_steps):
                target_probs = probs_of_rows[place[step]]  # [C, Vd]
                logits = torch.matmul(states[step, part], weight.t()).float()
                log_norm = torch.logsumexp(logits, dim=1, keepdim=True)
                mass = target_probs.sum(1, keepdim=True).clamp(min=1e-9)
                cross_entropy[step, part] = log_norm.squeeze(1) - (target_probs * logits).sum(
                    1
                ) / mass.squeeze(1)
                best, best_index = logits.max(dim=1)
                confidence[step, part] = torch.exp(best - log_norm.squeeze(1))
                wanted = best_token_ids[teacher_rows[step, part]]
                is_match[step, part] = draft_token_ids[best_index] == wanted
                draft_probs = logits.sub_(log_norm).exp_()
                if by_confidence is not None:
                    pull = weight[best_index] - draft_probs.to(weight.dtype) @ weight
                    by_confidence[step, part] = confidence[step, part].unsqueeze(1) * pull
                smaller = torch.minimum(target_probs, draft_probs)
                overlap[step, part] = smaller.sum(1)
                if by_overlap is not None:
                    is_below = draft_probs < target_probs
                    share = (draft_probs * is_below).sum(1, keepdim=True)
                    slope = draft_probs * (is_below.float() - share)
                    by_overlap[step, part] = slope.to(weight.dtype) @ weight
                if by_cross_entropy is not None:
                    slope = draft_probs.sub_(target_probs.div_(mass))
                    by_cross_entropy[step, part] = slope.to(weight.dtype) @ weight
        ctx.gradients = (by_cross_entropy, by_overlap, by_confidence)
        ctx.mark_non_differentiable(is_match)
        return cross_entropy, overlap, is_match, confidence

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        upstream = (grads[0], grads[1], grads[3])
        found = torch.zeros_like(ctx.gradients[0])
        for grad, slope in zip(upstream, ctx.gradients, strict=True):
            if grad is not None and slope is not None:
                found += grad.unsqueeze(-1).to(slope.dtype) * slope
        return found, None, None, None, None, None, None, None, None, None
