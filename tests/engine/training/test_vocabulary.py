"""Which tokens can be drafted, and how many of them pay."""

import pytest
import torch

from engine.training.errors import TrainingError
from engine.training.vocabulary import choose_size, count_tokens, coverage, select_vocabulary


def zipf(size: int) -> torch.Tensor:
    return (1e6 / torch.arange(1, size + 1)).long()


def test_the_most_frequent_tokens_and_those_that_end_a_turn_are_chosen() -> None:
    counts = count_tokens([[5, 5, 5, 7, 7, 9], [7, 2]], 12)
    chosen = select_vocabulary(counts, 4, always=[11])
    assert chosen.tolist() == [2, 5, 7, 11]  # 2 and 9 occur as often: the lower id wins
    assert coverage(counts, chosen) == pytest.approx(7 / 8)


def test_a_size_that_cannot_be_had_is_refused_by_its_name() -> None:
    with pytest.raises(TrainingError, match="draft_vocab_size"):
        select_vocabulary(torch.ones(8, dtype=torch.int64), 9)


def test_a_small_target_wants_a_small_vocabulary_and_a_large_one_a_larger() -> None:
    counts = zipf(49152)
    sizes = [
        choose_size(
            counts,
            counts,
            num_body_parameters=body,
            hidden_size=hidden,
            num_target_parameters=target,
            num_drafts=4,
        )
        for body, hidden, target in (
            (5_000_000, 576, 134_000_000),
            (400_000_000, 4096, 8_000_000_000),
        )
    ]
    assert sizes[0] < sizes[1]
    assert 2048 <= sizes[0] <= 16384


def test_text_of_few_tokens_wants_no_more_than_those() -> None:
    counts = torch.zeros(49152, dtype=torch.int64)
    counts[:1000] = 10
    size = choose_size(
        counts,
        counts,
        num_body_parameters=5_000_000,
        hidden_size=576,
        num_target_parameters=134_000_000,
        num_drafts=4,
    )
    assert size == 1024
