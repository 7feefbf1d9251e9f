"""The M-step's loss: its gradient is that of its definition, with the E-step's weights frozen."""

import math

import pytest
import torch

from engine.training.path_loss import path_loss
from engine.training.path_sampling import SampledPaths
from engine.training.path_weights import (
    RejectionBalance,
    importance_weights,
    log_mixture,
    position_weights,
)
from engine.training.recipe import VariationalRecipe
from engine.training.scores import Teacher
from engine.training.unrolled import Batch
from engine.training.utilities import expected_length

CONTEXTS, PATHS, STEPS, DRAFTABLE, VOCABULARY, HIDDEN = 2, 3, 3, 6, 9, 4


def _paths(generator: torch.Generator) -> tuple[SampledPaths, Teacher, torch.Tensor]:
    """Random paths, one with a draft that the head cannot draw; the target's rows [V, H]."""
    rows = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    states = torch.randn(CONTEXTS * PATHS * STEPS, HIDDEN, generator=generator)
    index = torch.randint(DRAFTABLE, (CONTEXTS, PATHS, STEPS), generator=generator)
    index[0, 0, 1] = -1
    token_ids = torch.where(index < 0, VOCABULARY - 1, index)
    logits = states @ rows.t()
    logprobs = torch.log_softmax(logits, -1).gather(1, token_ids.view(-1, 1))
    tempered = -torch.rand(CONTEXTS, PATHS, generator=generator) * 5
    tempered[0, 0] = float("-inf")
    none = torch.zeros(1, 1, dtype=torch.long)
    paths = SampledPaths(
        Batch(none, none, none, none, none, none, none, none, none),
        token_ids,
        index,
        logprobs.view(token_ids.shape),
        tempered,
        states,
        torch.logsumexp(logits, -1),
    )
    return paths, Teacher(rows[:DRAFTABLE], torch.arange(DRAFTABLE)), rows


class Definition:
    """The loss as a sum over paths and steps, in plain numbers; weights are those at `logits`."""

    def __init__(self, paths: SampledPaths, rows: torch.Tensor, logits: torch.Tensor) -> None:
        self.paths = paths
        logprobs = torch.log_softmax(logits, -1)  # [K, C * S, Vd]
        shape = paths.token_ids.shape
        index = paths.draft_index.clamp(min=0).permute(2, 0, 1).reshape(STEPS, -1, 1)
        drafted = logprobs.gather(-1, index).view(STEPS, CONTEXTS, PATHS).permute(1, 2, 0)
        reachable = (paths.draft_index >= 0).cumprod(-1)
        accept = (paths.target_logprobs - drafted).exp().clamp(max=1) * reachable
        whole = paths.target_logprobs.sum(-1)
        self.weights = importance_weights(
            whole,
            log_mixture(whole, paths.tempered_logprobs, 1 / PATHS),
            expected_length(accept, whole),
            clip=10.0,
        ).weights
        imitate, correct = position_weights(accept)
        self.imitate = imitate * reachable
        self.correct = correct * RejectionBalance(STEPS).weights(correct)
        target = torch.softmax(paths.node_states @ rows.t(), -1)[:, :DRAFTABLE]
        self.lesson = (target / target.sum(1, keepdim=True)).view(*shape, DRAFTABLE)

    def __call__(self, logits: torch.Tensor) -> float:
        total = 0.0
        for context in range(CONTEXTS):
            for path in range(PATHS):
                for step in range(STEPS):
                    place = (context, path, step)
                    row = logits[step, context * PATHS + path].tolist()
                    norm = math.log(sum(math.exp(x) for x in row))
                    drafted = row[max(0, int(self.paths.draft_index[place]))] - norm
                    taught = self.lesson[place].tolist()
                    correction = -sum(p * (x - norm) for p, x in zip(taught, row, strict=True))
                    part = float(self.correct[place]) * correction
                    part -= float(self.imitate[place]) * drafted
                    total += float(self.weights[context, path]) * part
        return total / CONTEXTS


@pytest.fixture(scope="module")
def found() -> tuple[torch.Tensor, torch.Tensor, Definition, float]:
    """Logits, the loss's gradient there, the definition, the loss."""
    generator = torch.Generator().manual_seed(4)
    paths, teacher, rows = _paths(generator)
    logits = torch.randn(STEPS, CONTEXTS * PATHS, DRAFTABLE, generator=generator).requires_grad_()
    recipe = VariationalRecipe(num_paths=PATHS)
    loss, _ = path_loss(logits, paths, teacher, recipe, RejectionBalance(STEPS), generator)
    (gradient,) = torch.autograd.grad(loss, logits)
    plain = logits.detach()
    return plain, gradient, Definition(paths, rows, plain), float(loss.detach())


def test_the_loss_is_its_definition(
    found: tuple[torch.Tensor, torch.Tensor, Definition, float],
) -> None:
    logits, _, definition, loss = found
    assert loss == pytest.approx(definition(logits), rel=1e-5)


def test_its_gradient_is_that_of_finite_differences(
    found: tuple[torch.Tensor, torch.Tensor, Definition, float],
) -> None:
    logits, gradient, definition, _ = found
    wide, size = logits.double(), 1e-4
    for place in torch.cartesian_prod(*(torch.arange(n) for n in logits.shape)).tolist():
        ends = []
        for sign in (1, -1):
            moved = wide.clone()
            moved[tuple(place)] += sign * size
            ends.append(definition(moved))
        slope = (ends[0] - ends[1]) / (2 * size)
        assert float(gradient[tuple(place)]) == pytest.approx(slope, abs=2e-5), place
    assert float(gradient.abs().max()) > 0.01
