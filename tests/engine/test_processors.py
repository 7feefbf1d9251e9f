"""Every processor is what its definition says, at every position with that position's history."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.processors import (
    filter_min_p,
    filter_top_k,
    filter_top_p,
    filter_typical_p,
    penalize,
)
from engine.request import SamplingParams
from engine.sampler import RowSampling, Sampler, TokenHistory, uses_penalties
from tests.engine.sampling_reference import PROCESSORS, reference_probs

VOCAB = 8
CPU = torch.device("cpu")
SAMPLER = Sampler(VOCAB, CPU)


def history_of(
    params: SamplingParams, prompt: list[int], output: list[int], vocab_size: int = VOCAB
) -> TokenHistory | None:
    if not uses_penalties(params):
        return None
    history = TokenHistory.of_prompt(prompt, vocab_size, CPU)
    for token_id in output:
        history.append([token_id])
    return history


def processed_probs(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    drafts: list[int],
) -> torch.Tensor:
    row = RowSampling(
        params=params,
        num_positions=len(drafts) + 1,
        first_position=len(prompt) + len(output),
        draft_token_ids=drafts,
        history=history_of(params, prompt, output),
    )
    return torch.softmax(SAMPLER.process(logits.clone(), [row]), dim=-1)


TOKEN_LISTS = st.lists(st.integers(0, VOCAB - 1), max_size=5)


@pytest.mark.parametrize("name", PROCESSORS)
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    prompt=TOKEN_LISTS.filter(len),
    output=TOKEN_LISTS,
    drafts=TOKEN_LISTS,
)
def test_every_position_of_a_block_follows_the_definition(
    name: str, seed: int, prompt: list[int], output: list[int], drafts: list[int]
) -> None:
    params = PROCESSORS[name]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=generator) * 2
    found = processed_probs(logits, params, prompt, output, drafts)
    for position in range(len(drafts) + 1):
        expected = reference_probs(
            logits[position].tolist(), params, prompt, [*output, *drafts[:position]]
        )
        assert found[position].tolist() == pytest.approx(expected, abs=1e-5)


def test_rows_with_different_processors_share_a_batch_without_touching_each_other() -> None:
    drafts = [1, 2, 1]
    rows, expected = [], []
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(PROCESSORS) * 4, VOCAB, generator=generator)
    for index, params in enumerate(PROCESSORS.values()):
        row = RowSampling(
            params=params,
            num_positions=4,
            first_position=2,
            draft_token_ids=drafts,
            history=history_of(params, [3, 4], []),
        )
        rows.append(row)
        expected.append(SAMPLER.process(logits[index * 4 : index * 4 + 4].clone(), [row]))
    together = torch.softmax(SAMPLER.process(logits.clone(), rows), dim=-1)
    alone = torch.softmax(torch.cat(expected), dim=-1)
    assert torch.equal(together, alone)


def test_drafts_leave_the_committed_history_as_it_was() -> None:
    params = PROCESSORS["all_together"]
    history = history_of(params, [1, 2], [3])
    assert history is not None
    seen, counts = history.seen.clone(), history.output_counts.clone()
    row = RowSampling(params, 4, 3, (5, 6, 7), history=history, preceding_token_ids=(0, 4))
    SAMPLER.process(torch.randn(4, VOCAB), [row])
    assert torch.equal(history.seen, seen)
    assert torch.equal(history.output_counts, counts)


def test_tokens_that_precede_a_drafted_position_count_as_if_they_were_committed() -> None:
    params = PROCESSORS["all_together"]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    row = RowSampling(
        params, 1, 6, history=history_of(params, [1, 2], [3]), preceding_token_ids=(5, 5, 0)
    )
    found = torch.softmax(SAMPLER.process(logits.clone(), [row]), dim=-1)[0]
    expected = reference_probs(logits[0].tolist(), params, [1, 2], [3, 5, 5, 0])
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_history_after_a_block_is_a_recount_from_the_start() -> None:
    history = history_of(PROCESSORS["frequency_penalty"], [1, 1, 2], [])
    assert history is not None
    history.append([3, 3, 1])
    history.append([3])
    assert history.output_counts.tolist() == [0, 1, 0, 3, 0, 0, 0, 0]
    assert history.seen.nonzero().flatten().tolist() == [1, 2, 3]


def test_greedy_takes_constraints_bias_and_penalties_but_no_filter_and_no_temperature() -> None:
    params = replace(PROCESSORS["all_together"], temperature=0.0, top_k=1, typical_p=0.1)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, VOCAB, generator=generator) * 2
    row = RowSampling(params, 1, 2, history=history_of(params, [3, 4], [4]))
    found = torch.softmax(SAMPLER.process(logits.clone(), [row]), dim=-1)[0]
    plain = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
    assert found.tolist() == pytest.approx(
        reference_probs(logits[0].tolist(), plain, [3, 4], [4]), abs=1e-6
    )


def test_a_greedy_row_keeps_its_logits_beside_sampled_ones() -> None:
    greedy = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.9, typical_p=0.1)
    logits = torch.randn(2, VOCAB)
    rows = [RowSampling(greedy, 1, 0), RowSampling(PROCESSORS["all_together"], 1, 0)]
    assert torch.equal(SAMPLER.process(logits.clone(), rows)[0], logits[0])


def test_a_row_without_a_filter_keeps_its_rarest_token_beside_rows_with_one() -> None:
    logits = torch.full((2, 5000), -30.0)  # far below what a float32 sum near one resolves
    logits[:, 0] = 10.0
    one_and_less = torch.tensor([[1.0], [0.5]])
    for filtered in (
        filter_top_p(logits, one_and_less),
        filter_typical_p(logits, one_and_less),
        filter_min_p(logits, torch.tensor([[0.0], [0.5]])),
        filter_top_k(logits, torch.tensor([[0], [1]]), 1),
    ):
        assert filtered[0].isfinite().all()
        assert kept(filtered[1:]) == [[0]]


def test_guarded_tokens_are_excluded_at_the_first_positions_only() -> None:
    row = RowSampling(
        SamplingParams(), 4, 0, (1, 1, 1), num_guarded_positions=2, guarded_token_ids=(5, 6)
    )
    logits = SAMPLER.process(torch.zeros(4, VOCAB), [row])
    assert logits[:2, [5, 6]].eq(-math.inf).all()
    assert logits[2:].isfinite().all()
    assert logits[:, :5].isfinite().all()


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(5, 1)


def test_top_k_keeps_each_positions_own_number_and_ties() -> None:
    top_k = torch.tensor([[0], [1], [2], [4], [9]])
    assert [len(row) for row in kept(filter_top_k(LOGITS, top_k, 9))] == [4, 1, 2, 4, 4]
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert kept(filter_top_k(tied, torch.tensor([[2]]), 2)) == [[0, 1, 2]]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    found = kept(filter_top_p(LOGITS, column(1.0, 0.01, 0.49, 0.6, 0.94)))
    assert found == [[0, 1, 2, 3], [0], [0], [0, 1], [0, 1, 2]]


def test_min_p_is_relative_to_the_best_token() -> None:
    found = kept(filter_min_p(LOGITS, column(0.0, 0.05, 0.2, 0.5, 1.0)))
    assert found == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]


def test_typical_p_prefers_a_typical_token_to_the_most_likely_one() -> None:
    # Entropy 1.14 nats: token 1 (1.20) is nearest, then 0 (0.69), then 2 (1.90).
    found = kept(filter_typical_p(LOGITS, column(1.0, 0.01, 0.29, 0.31, 0.9)))
    assert found == [[0, 1, 2, 3], [1], [1], [0, 1], [0, 1, 2]]


def test_excluded_tokens_stay_excluded_through_every_filter() -> None:
    logits = LOGITS.clone()
    logits[:, 0] = -math.inf
    for filtered in (
        filter_top_k(logits, torch.full((5, 1), 3), 3),
        filter_top_p(logits, column(*[0.99] * 5)),
        filter_min_p(logits, column(*[0.01] * 5)),
        filter_typical_p(logits, column(*[0.99] * 5)),
    ):
        assert not filtered.isnan().any()
        assert kept(filtered) == [[1, 2, 3]] * 5


def test_a_single_possible_token_survives_every_filter() -> None:
    logits = torch.full((1, 4), -math.inf)
    logits[0, 2] = 1.0
    for filtered in (
        filter_top_k(logits, torch.tensor([[1]]), 1),
        filter_top_p(logits, column(0.1)),
        filter_min_p(logits, column(1.0)),
        filter_typical_p(logits, column(0.1)),
    ):
        assert kept(filtered) == [[2]]


def test_the_repetition_penalty_makes_a_seen_token_less_likely_whatever_its_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    zero = column(0.0)
    found = penalize(logits, seen, torch.zeros(1, 4), column(2.0), zero, zero)
    assert found.tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_presence_counts_once_and_frequency_every_time_and_neither_the_prompt() -> None:
    counts = torch.tensor([[0.0, 1.0, 3.0, 0.0]])
    seen = torch.tensor([[True, True, True, False]])  # token 0 only in the prompt
    found = penalize(torch.zeros(1, 4), seen, counts, column(1.0), column(0.5), column(0.25))
    assert found.tolist() == [[0.0, -0.75, -1.25, 0.0]]
