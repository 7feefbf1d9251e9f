"""What one training step computes: a module, so that it can run in several processes at once."""

from dataclasses import dataclass

import torch
from torch import nn

from engine.drafter.head.model import Eagle3Head
from engine.training.objectives import Objective, expected_accepted
from engine.training.precision import mixed_precision
from engine.training.scores import DraftScores, Teacher, score
from engine.training.unrolled import Batch, unroll


@dataclass(frozen=True, slots=True)
class StepReport:
    """Of one batch. acceptance_length is 1 + expected accepted drafts per round at T = 1;
    greedy_accept_cond[k] the share of matches among anchors whose earlier steps matched."""

    loss: float
    acceptance_length: float
    greedy_accept_cond: tuple[float, ...]
    num_anchors: int


class Distillation(nn.Module):
    """forward(batch) is the loss; the head runs in bfloat16 where `autocast_dtype` says so."""

    def __init__(
        self,
        head: Eagle3Head,
        teacher: Teacher,
        objective: Objective,
        num_steps: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.head = head
        self.objective = objective
        self.num_steps = num_steps
        self._teacher = teacher
        self._autocast_dtype = autocast_dtype
        self.report: StepReport | None = None

    def scores(self, batch: Batch, *, needs_confidence_gradient: bool = False) -> DraftScores:
        return score(
            self.outputs(batch),
            batch,
            self.head.lm_head.weight,
            self._teacher,
            needs_overlap_gradient=self.objective.needs_overlap_gradient,
            needs_confidence_gradient=needs_confidence_gradient,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        scores = self.scores(batch)
        loss = self.objective.loss(scores)
        reached = scores.is_valid[0]
        cond = []
        for step in range(self.num_steps):
            reached = reached & scores.is_valid[step]
            total = int(reached.sum())
            reached = reached & scores.is_match[step]
            cond.append(int(reached.sum()) / max(1, total))
        self.report = StepReport(
            float(loss.detach()),
            1 + expected_accepted(scores.overlap, scores.is_valid),
            tuple(cond),
            int(scores.is_valid[0].sum()),
        )
        return loss

    def outputs(self, batch: Batch) -> list[torch.Tensor]:
        """Of `unroll`, in the dtype that the teacher's states have."""
        with mixed_precision(self.head.device, self._autocast_dtype):
            outputs = unroll(self.head, batch, self.num_steps)
        return [output.to(batch.last.dtype) for output in outputs]
