"""The E-step's weights on a toy whose every path can be enumerated."""

import itertools

import pytest
import torch

from engine.training.path_weights import (
    RejectionBalance,
    chain_moves,
    confidence_penalty,
    effective_share,
    importance_weights,
    log_mixture,
    position_weights,
)
from engine.training.utilities import accept_probs, expected_length

V, K = 4, 3
PATHS = list(itertools.product(range(V), repeat=K))


class Toy:
    """Distributions over paths of K tokens out of V, one table row per prefix."""

    def __init__(self, seed: int, sharpness: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables = {
            prefix: torch.softmax(sharpness * torch.randn(V, generator=generator), 0)
            for length in range(K)
            for prefix in itertools.product(range(V), repeat=length)
        }

    def step_logprobs(self) -> torch.Tensor:
        """[V ** K, K] of every path."""
        return torch.stack(
            [torch.stack([self.tables[p[:k]][p[k]] for k in range(K)]) for p in PATHS]
        ).log()

    def refit(self, weights: torch.Tensor, smoothing: float = 1e-3) -> "Toy":
        """The M-step in full: the tables of highest weighted likelihood. weights [V ** K]."""
        fitted = Toy(0, 1.0)
        for prefix in fitted.tables:
            counts = torch.full((V,), smoothing)
            for path, weight in zip(PATHS, weights, strict=True):
                if path[: len(prefix)] == prefix:
                    counts[path[len(prefix)]] += weight
            fitted.tables[prefix] = counts / counts.sum()
        return fitted


def expected_accepted(target: Toy, draft: Toy) -> float:
    """E_q[sum of reached_k], by enumeration."""
    p, q = target.step_logprobs(), draft.step_logprobs()
    return float((q.sum(-1).exp() * expected_length(accept_probs(p, q), p)).sum())


def posterior(target: Toy, draft: Toy) -> torch.Tensor:
    """[V ** K] p(z) U(z), normalised: the maximum of the bound."""
    p, q = target.step_logprobs(), draft.step_logprobs()
    desired = p.sum(-1).exp() * expected_length(accept_probs(p, q), p)
    return desired / desired.sum()


def weighted_histogram(
    target: Toy, draft: Toy, num_contexts: int, num_paths: int, seed: int, *, corrected: bool = True
) -> torch.Tensor:
    """[contexts, V ** K] weights that the E-step gives to each path, from sampled paths: the
    first from the target, the others from the draft."""
    p, q = target.step_logprobs(), draft.step_logprobs()
    generator = torch.Generator().manual_seed(seed)
    from_draft = torch.multinomial(
        q.sum(-1).exp(), num_contexts * num_paths, replacement=True, generator=generator
    ).view(num_contexts, num_paths)
    if corrected:
        from_draft[:, 0] = torch.multinomial(
            p.sum(-1).exp(), num_contexts, replacement=True, generator=generator
        )
    utility = expected_length(accept_probs(p, q), p)[from_draft]
    proposal = log_mixture(p.sum(-1), q.sum(-1), 1 / num_paths)[from_draft]
    weighted = importance_weights(
        p.sum(-1)[from_draft], proposal, utility, clip=1e9, uses_correction=corrected
    )
    return torch.zeros(num_contexts, V**K).scatter_add_(1, from_draft, weighted.weights)


def test_the_estimate_of_the_posterior_is_right_within_its_standard_error() -> None:
    target, draft = Toy(1, 1.5), Toy(2, 1.0)
    found = weighted_histogram(target, draft, num_contexts=400, num_paths=512, seed=3)
    exact = posterior(target, draft)
    error = found.std(0) / len(found) ** 0.5
    # Self-normalisation biases by O(1 / S), which the added term covers.
    assert ((found.mean(0) - exact).abs() <= 4 * error + 1.0 / 512).all()
    # The planted bug: without the correction the estimate is elsewhere.
    wrong = weighted_histogram(target, draft, 400, 512, seed=3, corrected=False)
    assert ((wrong.mean(0) - exact).abs() > 4 * error + 1.0 / 512).any()


def test_rounds_of_em_raise_the_expected_accepted_length() -> None:
    target, draft = Toy(1, 2.0), Toy(2, 1.0)
    lengths = [expected_accepted(target, draft)]
    for number in range(3):
        weights = weighted_histogram(target, draft, 200, 16, seed=number).mean(0)
        draft = draft.refit(weights)
        lengths.append(expected_accepted(target, draft))
    assert lengths[1] > lengths[0]
    assert lengths[-1] > 0.9 * K


def test_without_the_correction_em_learns_far_slower() -> None:
    target, start = Toy(1, 2.0), Toy(2, 1.0)
    reached = {}
    for corrected in (True, False):
        draft = start
        for number in range(3):
            weights = weighted_histogram(
                target, draft, 200, 16, seed=number, corrected=corrected
            ).mean(0)
            draft = draft.refit(weights)
        reached[corrected] = expected_accepted(target, draft)
    assert reached[True] > reached[False] + 0.5


def test_weights_sum_to_one_and_a_hopeless_context_weighs_all_paths_alike() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    utility = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    found = importance_weights(logprobs, torch.zeros(2, 3), utility, clip=10)
    assert torch.allclose(found.weights.sum(-1), torch.ones(2))
    assert found.weights[0, 2] < 1e-6
    assert torch.allclose(found.weights[1], torch.full((3,), 1 / 3))


def test_clipping_bounds_what_one_path_can_weigh() -> None:
    logprobs = torch.tensor([[0.0, -30.0]])
    free = importance_weights(logprobs, torch.zeros(1, 2), torch.ones(1, 2), clip=1e9)
    clipped = importance_weights(logprobs, torch.zeros(1, 2), torch.ones(1, 2), clip=2.0)
    assert free.weights[0, 1] < 1e-8
    assert clipped.weights[0, 1] == pytest.approx(0.2, abs=1e-4)


def test_effective_share_is_one_for_equal_weights_and_one_in_s_for_a_single_one() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert effective_share(weights).tolist() == [1.0, 0.25]


def test_chains_converge_to_the_desired_distribution() -> None:
    target, draft = Toy(1, 1.5), Toy(2, 1.0)
    p, q = target.step_logprobs().sum(-1), draft.step_logprobs().sum(-1)
    log_desired = posterior(target, draft).log()
    # Every path once: the proposal over places is uniform.
    rows = log_desired.expand(200, -1)
    found = chain_moves(rows, torch.zeros_like(rows), 60, torch.Generator().manual_seed(0))
    assert (found.mean(0) - log_desired.exp()).abs().max() < 0.01
    assert p.shape == q.shape


def test_chains_keep_to_the_desired_distribution_when_the_proposal_prefers_some_paths() -> None:
    """Every path as often in a context as the proposal is likely to draw it: what chains reach is
    known by enumeration."""
    copies = torch.tensor([1, 2, 3, 10])
    desired = torch.tensor([0.4, 0.3, 0.2, 0.1])
    drawn = torch.arange(4).repeat_interleave(copies)  # [S]
    log_desired = desired.log()[drawn].expand(400, -1)
    log_proposal = (copies / copies.sum()).log()[drawn].expand(400, -1)

    def shares(proposal: torch.Tensor, seed: int) -> torch.Tensor:
        found = chain_moves(log_desired, proposal, 40, torch.Generator().manual_seed(seed))
        of_path = torch.zeros(400, 4).index_add_(1, drawn, found)
        return of_path.mean(0)

    assert (shares(log_proposal, 0) - desired).abs().max() < 0.02
    # The planted bug: a ratio without the proposal's own probabilities goes elsewhere.
    assert (shares(torch.zeros_like(log_proposal), 1) - desired).abs().max() > 0.1


def test_a_path_teaches_up_to_its_first_rejection_and_the_correction_there() -> None:
    accept = torch.tensor([[1.0, 0.0, 1.0], [0.5, 1.0, 1.0]])
    imitate, correct = position_weights(accept)
    assert imitate.tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5]]
    assert correct.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]]


def test_rare_rejections_weigh_more_within_their_bounds() -> None:
    balance = RejectionBalance(3)
    for _ in range(200):
        weights = balance.weights(torch.tensor([[0.9, 0.09, 0.0]]))
    assert weights[0] < weights[1] < weights[2]
    assert weights[2] == 4.0


def test_confidence_is_pulled_back_only_where_the_target_disagrees() -> None:
    confidence = torch.tensor([0.9, 0.9, 0.1], requires_grad=True)
    accepted = torch.tensor([1.0, 0.0, 0.0])
    confidence_penalty(confidence, accepted, torch.ones(3)).backward()
    assert confidence.grad is not None
    assert confidence.grad[0] < 0  # may grow
    assert confidence.grad[1] > confidence.grad[2] > 0  # pulled back, the surer the harder
