"""What each utility of a draft path rewards."""

import itertools

import pytest
import torch

from engine.training.errors import TrainingError
from engine.training.utilities import UTILITIES, accept_probs, find_utility

ACCEPT = torch.tensor([[0.9, 0.5, 0.4], [0.2, 1.0, 1.0]])
LIKELY = torch.tensor([[-0.1, -0.2, -0.3], [-2.0, -1.0, -1.0]])


def of(name: str, logprobs: torch.Tensor = LIKELY) -> torch.Tensor:
    return find_utility(name)(ACCEPT, logprobs)


def test_expected_length_integrates_the_verifiers_coins_out() -> None:
    by_hand = []
    for accept in ACCEPT.tolist():
        total = 0.0
        for coins in itertools.product((True, False), repeat=3):
            chance = 1.0
            for coin, a in zip(coins, accept, strict=True):
                chance *= a if coin else 1 - a
            length = coins.index(False) if False in coins else 3
            total += chance * length
        by_hand.append(total)
    assert of("expected_length").tolist() == pytest.approx(by_hand)


def test_all_accepted_is_the_chance_that_no_draft_is_rejected() -> None:
    assert of("all_accepted").tolist() == pytest.approx([0.9 * 0.5 * 0.4, 0.2])


def test_cost_aware_takes_the_price_of_the_drafts_off_and_stays_positive() -> None:
    gap = of("expected_length") - of("cost_aware")
    assert gap.tolist() == pytest.approx([0.36, 0.36])
    worthless = find_utility("cost_aware")(torch.zeros(1, 3), LIKELY[:1])
    assert 0 < float(worthless) < 1e-3


def test_fidelity_prefers_the_likelier_of_two_paths_of_the_same_length() -> None:
    likely, unlikely = of("with_fidelity"), of("with_fidelity", LIKELY - 3.0)
    assert (likely > unlikely).all()
    assert torch.equal(of("expected_length"), of("expected_length", LIKELY - 3.0))
    certain = of("with_fidelity", torch.zeros(2, 3))
    assert torch.equal(certain, of("expected_length"))


def test_a_draft_is_accepted_as_far_as_the_target_wants_it_too() -> None:
    target, draft = torch.tensor([0.2, 0.6, 0.0]).log(), torch.tensor([0.4, 0.3, 0.5]).log()
    assert accept_probs(target, draft).tolist() == pytest.approx([0.5, 1.0, 0.0])


def test_an_unknown_utility_is_refused_by_its_field() -> None:
    with pytest.raises(TrainingError, match=r"variational\.utility.*expected_length"):
        find_utility("best")
    assert set(UTILITIES) == {"expected_length", "cost_aware", "all_accepted", "with_fidelity"}
