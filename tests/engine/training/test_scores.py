"""Scores and their gradients against a plain computation by autograd."""

import pytest
import torch

from engine.training import objectives
from engine.training.capture import Capturer
from engine.training.objectives import OBJECTIVES, path_weights
from engine.training.scores import Teacher, score
from engine.training.unrolled import Batch, make_batch, unroll
from tests.engine.head.heads import deep_tiny_llama, tiny_head

TEXTS = ([5, 9, 17, 30, 8, 44, 45, 46, 47, 12, 13], [40, 41, 42, 250, 43, 300, 2, 7])
K = 3


def material() -> tuple[Batch, Teacher, torch.Tensor, list[torch.Tensor]]:
    target = deep_tiny_llama()
    head = tiny_head(target)
    capturer = Capturer(target, head.config.captured_layers)
    batch = make_batch(capturer.capture([(text, 3) for text in TEXTS]))
    capturer.close()
    ids = head.draft_token_ids
    teacher = Teacher(target.get_output_embeddings().weight.detach()[ids], ids)
    return batch, teacher, head.lm_head.weight.detach(), unroll(head, batch, K)


def plain_scores(
    batch: Batch, teacher: Teacher, weight: torch.Tensor, outputs: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy, overlap and confidence [K, M], by the definitions."""
    chosen = batch.depth_limits > 0
    rows = batch.teacher_rows[chosen]
    found = []
    for step, output in enumerate(outputs):
        teacher_rows = (rows + step).clamp(max=len(batch.last) - 1)
        logits = batch.last[teacher_rows] @ teacher.output_rows.T
        target_probs = (logits - batch.log_normalizer[teacher_rows, None]).exp()
        draft_logprobs = torch.log_softmax(output[chosen] @ weight.T, -1)
        share = target_probs / target_probs.sum(1, keepdim=True)
        found.append(
            (
                -(share * draft_logprobs).sum(1),
                torch.minimum(target_probs, draft_logprobs.exp()).sum(1),
                draft_logprobs.max(1).values.exp(),
            )
        )
    return tuple(torch.stack(part) for part in zip(*found, strict=True))  # type: ignore[return-value]


def test_scores_and_gradients_are_those_of_the_definitions() -> None:
    batch, teacher, weight, outputs = material()
    ours = [output.detach().requires_grad_() for output in outputs]
    plain = [output.detach().clone().requires_grad_() for output in outputs]
    scores = score(
        ours, batch, weight, teacher, needs_overlap_gradient=True, needs_confidence_gradient=True
    )
    expected = plain_scores(batch, teacher, weight, plain)
    for mine, theirs in zip(
        (scores.cross_entropy, scores.overlap, scores.confidence), expected, strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-4)
    factors = [
        torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(i)) for i in range(3)
    ]
    mine_total = (
        (scores.cross_entropy * factors[0]).sum()
        + (scores.overlap * factors[1]).sum()
        + (scores.confidence * factors[2]).sum()
    )
    mine_total.backward()
    sum((value * factor).sum() for value, factor in zip(expected, factors, strict=True)).backward()  # type: ignore[union-attr]
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=2e-3), "a gradient is wrong"  # type: ignore[arg-type]


def test_overlap_uses_the_targets_own_probabilities_not_renormalised_ones() -> None:
    """What cannot be drafted is lost acceptance (SpecForge and speculators differ in this)."""
    batch, teacher, weight, outputs = material()
    scores = score(outputs, batch, weight, teacher, needs_overlap_gradient=False)
    rows = batch.teacher_rows[batch.depth_limits > 0]
    mass = (
        (batch.last[rows] @ teacher.output_rows.T - batch.log_normalizer[rows, None]).exp().sum(1)
    )
    assert bool((mass < 0.999).any())
    assert bool((scores.overlap[0] <= mass + 1e-5).all())


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_falls_when_its_own_gradient_is_followed(name: str) -> None:
    batch, teacher, weight, outputs = material()
    states = [output.detach().clone().requires_grad_() for output in outputs]
    losses = []
    objective = OBJECTIVES[name]
    for _ in range(4):
        scores = score(
            states, batch, weight, teacher, needs_overlap_gradient=objective.needs_overlap_gradient
        )
        loss = objective.loss(scores)
        losses.append(float(loss.detach()))
        grads = torch.autograd.grad(loss, states)
        states = [
            (s - 0.05 * g / (g.norm() + 1e-9)).detach().requires_grad_()
            for s, g in zip(states, grads, strict=True)
        ]
    assert losses[-1] < losses[0]


def test_path_weights_are_the_derivative_of_the_expected_accepted_length() -> None:
    overlap = torch.tensor([[0.8], [0.5], [0.3]], requires_grad=True)
    valid = torch.ones(3, 1, dtype=torch.bool)
    length = overlap.cumprod(0).sum()
    (slope,) = torch.autograd.grad(length, overlap)
    by_log = slope * overlap.detach()  # d / d log alpha
    assert torch.allclose(path_weights(overlap.detach(), valid), by_log)


def test_griffin_leaves_out_steps_that_would_not_be_reached() -> None:
    batch, teacher, weight, outputs = material()
    states = [output.detach().clone().requires_grad_() for output in outputs]
    scores = score(states, batch, weight, teacher, needs_overlap_gradient=False)
    grads = torch.autograd.grad(objectives.griffin(scores), states)
    chosen = batch.depth_limits > 0
    wrong_at_first = ~scores.is_match[0]
    assert bool(wrong_at_first.any())
    assert float(grads[1][chosen][wrong_at_first].abs().max()) == 0.0
