"""Draws follow the processed distribution, and a seed's tokens depend on nothing but the seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.acceptance import accept_coupled
from engine.noise import Stream
from engine.request import SamplingParams
from engine.sampler import RowSampling, Sampler, TokenHistory, uses_penalties
from tests.engine.sampling_reference import (
    PROCESSORS,
    PrefixModel,
    chi_square_p_value,
    reference_probs,
)

VOCAB = 6
CPU = torch.device("cpu")
SAMPLER = Sampler(VOCAB, CPU)
TARGET = PrefixModel(VOCAB, seed=5)
PROMPT = (0, 2, 3)
OUTPUT = (1, 1, 4)
NUM_DRAWS = 20_000


def history_of(params: SamplingParams, output: Sequence[int] = ()) -> TokenHistory | None:
    if not uses_penalties(params):
        return None
    history = TokenHistory.of_prompt(PROMPT, VOCAB, CPU)
    if output:
        history.append(output)
    return history


def p_value_of(params: SamplingParams, token_ids: torch.Tensor, logits: torch.Tensor) -> float:
    expected = torch.tensor(reference_probs(logits.tolist(), params, PROMPT, OUTPUT))
    return chi_square_p_value(torch.bincount(token_ids, minlength=VOCAB), expected)


@pytest.mark.parametrize("name", PROCESSORS)
def test_draws_along_one_seed_follow_the_distribution(name: str) -> None:
    params = replace(PROCESSORS[name], seed=77)
    logits = TARGET.logits(PROMPT)
    row = RowSampling(params, NUM_DRAWS, 6, history=history_of(params, OUTPUT))
    token_ids, is_sound = SAMPLER.draw(logits.expand(NUM_DRAWS, VOCAB), [row])
    assert is_sound.all()
    assert p_value_of(params, token_ids, logits) > 1e-4


@pytest.mark.parametrize("name", PROCESSORS)
def test_draws_of_many_seeds_at_one_position_follow_the_distribution(name: str) -> None:
    params = PROCESSORS[name]
    logits = TARGET.logits(PROMPT)
    history = history_of(params, OUTPUT)
    rows = [RowSampling(replace(params, seed=s), 1, 6, history=history) for s in range(3000)]
    token_ids, _ = SAMPLER.draw(logits.expand(len(rows), VOCAB), rows)
    assert p_value_of(params, token_ids, logits) > 1e-4


@pytest.mark.parametrize("name", [n for n in PROCESSORS if n != "plain"])
def test_draws_from_logits_without_the_processor_are_seen(name: str) -> None:
    params = PROCESSORS[name]
    logits = TARGET.logits(PROMPT)
    row = RowSampling(SamplingParams(seed=77), NUM_DRAWS, 6)
    token_ids, _ = SAMPLER.draw(logits.expand(NUM_DRAWS, VOCAB), [row])
    assert p_value_of(params, token_ids, logits) < 1e-9


def test_repeated_noise_is_seen() -> None:
    """A draw whose noise ignores the position: the check of draws must fail."""
    params = SamplingParams(seed=3)
    rows = [RowSampling(params, 1, 6) for _ in range(4000)]
    logits = TARGET.logits(PROMPT)
    token_ids, _ = SAMPLER.draw(logits.expand(len(rows), VOCAB), rows)
    assert p_value_of(params, token_ids, logits) < 1e-9


# ---- a seed's text is the same with any drafts --------------------------------------------

MakeRow = Callable[[SamplingParams, Sequence[int], Sequence[int], TokenHistory | None], RowSampling]
Propose = Callable[[Sequence[int]], Sequence[int]]


def engine_row(
    params: SamplingParams,
    output: Sequence[int],
    drafts: Sequence[int],
    history: TokenHistory | None,
) -> RowSampling:
    return RowSampling(
        params=params,
        num_positions=len(drafts) + 1,
        first_position=len(PROMPT) + len(output),
        draft_token_ids=drafts,
        history=history,
    )


def decode(
    params: SamplingParams, num_tokens: int, propose: Propose, make_row: MakeRow = engine_row
) -> list[int]:
    """Verify proposals until num_tokens are emitted."""
    output: list[int] = []
    history = history_of(params)
    while len(output) < num_tokens:
        drafts = list(propose(output))
        logits = torch.stack(
            [TARGET.logits((*PROMPT, *output, *drafts[:j])) for j in range(len(drafts) + 1)]
        )
        token_ids, _ = SAMPLER.draw(logits, [make_row(params, output, drafts, history)])
        accepted = accept_coupled(
            token_ids.unsqueeze(0),
            torch.tensor(drafts, dtype=torch.long).unsqueeze(0),
            torch.tensor([len(drafts)]),
        )
        emitted = token_ids[: int(accepted) + 1].tolist()
        output.extend(emitted)
        if history is not None:
            history.append(emitted)
    return output[:num_tokens]


def nothing(output: Sequence[int]) -> Sequence[int]:
    return ()


def partly_right(params: SamplingParams, num_tokens: int) -> Propose:
    """Proposals that know the answer and are wrong at every fifth place."""
    answer = decode(params, num_tokens + 8, nothing)

    def propose(output: Sequence[int]) -> Sequence[int]:
        known = answer[len(output) : len(output) + 4]
        return [
            (token + 1) % VOCAB if (len(output) + j) % 5 == 4 else token
            for j, token in enumerate(known)
        ]

    return propose


@pytest.mark.parametrize("name", [*PROCESSORS, "greedy", "greedy_with_penalties"])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**63 - 1), script=st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_any_drafts_give_the_same_tokens(name: str, seed: int, script: list[int]) -> None:
    greedy = {
        "greedy": SamplingParams(temperature=0),
        "greedy_with_penalties": SamplingParams(
            temperature=0, frequency_penalty=0.8, repetition_penalty=1.5
        ),
    }
    params = replace({**PROCESSORS, **greedy}[name], seed=seed)
    plain = decode(params, 12, nothing)
    lengths = [len(script) % 5, 1, 3]

    def scripted(output: Sequence[int]) -> Sequence[int]:
        start = len(output)
        return script[start : start + lengths[start % 3]]

    assert decode(params, 12, scripted) == plain
    assert decode(params, 12, partly_right(params, 12)) == plain


def _history_shared_by_the_block(params, output, drafts, history):  # type: ignore[no-untyped-def]
    return replace(engine_row(params, output, drafts, history), draft_token_ids=())


def _history_of_the_whole_block(params, output, drafts, history):  # type: ignore[no-untyped-def]
    row = engine_row(params, output, drafts, history)
    return replace(row, draft_token_ids=(), preceding_token_ids=drafts)


def _noise_by_place_in_the_block(params, output, drafts, history):  # type: ignore[no-untyped-def]
    return replace(engine_row(params, output, drafts, history), first_position=0)


def _noise_by_number_of_steps(params, output, drafts, history):  # type: ignore[no-untyped-def]
    row = engine_row(params, output, drafts, history)
    return replace(row, first_position=len(output) + len(drafts))


def _noise_late_by_one(params, output, drafts, history):  # type: ignore[no-untyped-def]
    position = len(PROMPT) + len(output) - (len(drafts) > 0)
    return replace(engine_row(params, output, drafts, history), first_position=position)


def _drafts_without_processors(params, output, drafts, history):  # type: ignore[no-untyped-def]
    row = engine_row(params, output, drafts, history)
    return row if not drafts else replace(row, params=SamplingParams(seed=params.seed))


@pytest.mark.parametrize(
    "make_row",
    [
        _history_shared_by_the_block,
        _history_of_the_whole_block,
        _noise_by_place_in_the_block,
        _noise_by_number_of_steps,
        _noise_late_by_one,
        _drafts_without_processors,
    ],
)
def test_a_planted_bug_changes_the_tokens(make_row: MakeRow) -> None:
    def differs(seed: int) -> bool:
        params = replace(PROCESSORS["frequency_penalty"], frequency_penalty=1.5, seed=seed)
        plain = decode(params, 12, nothing, make_row)
        return decode(params, 12, partly_right(params, 12), make_row) != plain

    assert any(differs(seed) for seed in range(20))


# ---- rows --------------------------------------------------------------------------------------


def mixed_rows() -> list[RowSampling]:
    rows = []
    for index, params in enumerate([*PROCESSORS.values(), SamplingParams(temperature=0)] * 2):
        drafts = tuple(range(index % 4))
        params = replace(params, seed=index // 3)
        rows.append(RowSampling(params, len(drafts) + 1, 3 + index, drafts, history_of(params)))
    return rows


def test_a_row_draws_the_same_alone_and_anywhere_in_a_batch() -> None:
    rows = mixed_rows()
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(row.num_positions, VOCAB, generator=generator) for row in rows]
    alone = [SAMPLER.draw(part, [row])[0].tolist() for part, row in zip(logits, rows, strict=True)]
    for order in (range(len(rows)), range(len(rows) - 1, -1, -1)):
        together, _ = SAMPLER.draw(torch.cat([logits[i] for i in order]), [rows[i] for i in order])
        assert together.tolist() == [token for i in order for token in alone[i]]


def test_drawing_leaves_the_logits_as_they_were() -> None:
    rows = mixed_rows()
    logits = torch.randn(sum(row.num_positions for row in rows), VOCAB)
    before = logits.clone()
    SAMPLER.draw(logits, rows)
    assert torch.equal(logits, before)


def test_greedy_is_the_bare_argmax_and_ignores_the_seed() -> None:
    logits = torch.randn(50, VOCAB)
    rows = [RowSampling(SamplingParams(temperature=0, seed=s), 1, s) for s in range(50)]
    token_ids, _ = SAMPLER.draw(logits, rows)
    assert torch.equal(token_ids, logits.argmax(dim=1))


def test_a_drafter_with_the_same_logits_draws_what_the_target_will() -> None:
    logits = torch.randn(200, VOCAB)
    rows = [RowSampling(SamplingParams(seed=s), 1, 9) for s in range(200)]
    target, _ = SAMPLER.draw(logits, rows)
    coupled, _ = SAMPLER.draw(logits, rows, [Stream.TARGET] * 200)
    apart, _ = SAMPLER.draw(logits, rows, [Stream.DRAFT] * 200)
    assert torch.equal(coupled, target)
    assert not torch.equal(apart, target)


def test_half_precision_logits_are_processed_in_float32() -> None:
    row = RowSampling(SamplingParams(temperature=0.7), 3, 0)
    assert SAMPLER.process(torch.randn(3, VOCAB).bfloat16(), [row]).dtype is torch.float32


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=4)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unsound_logits_are_reported_at_their_position_only(
    params: SamplingParams, bad: float
) -> None:
    logits = torch.randn(5, VOCAB)
    logits[2, 3] = bad
    rows = [RowSampling(params, 3, 0, (1, 2)), RowSampling(params, 2, 0, (1,))]
    _, is_sound = SAMPLER.draw(logits, rows)
    assert is_sound.tolist() == [True, True, False, True, True]


def test_allowed_tokens_do_not_hide_that_a_model_is_unsound() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = math.nan
    row = RowSampling(SamplingParams(allowed_token_ids=(1, 2)), 1, 0)
    assert not SAMPLER.draw(logits, [row])[1].any()


def test_a_token_that_the_model_itself_excludes_is_sound() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = -math.inf
    for params in (SamplingParams(temperature=0), SamplingParams()):
        _, is_sound = SAMPLER.draw(logits, [RowSampling(params, 1, 0)])
        assert is_sound.all()


def test_a_position_where_nothing_can_be_drawn_is_unsound() -> None:
    params = SamplingParams(allowed_token_ids=(1,), temperature=0)
    row = RowSampling(params, 2, 0, (1,), num_guarded_positions=1, guarded_token_ids=(1,))
    _, is_sound = SAMPLER.draw(torch.zeros(2, VOCAB), [row])
    assert is_sound.tolist() == [False, True]


def test_a_guarded_greedy_row_takes_the_best_other_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, 0.0, 0.0]] * 2)
    row = RowSampling(
        SamplingParams(temperature=0), 2, 0, (2,), num_guarded_positions=1, guarded_token_ids=(1,)
    )
    token_ids, _ = SAMPLER.draw(logits, [row])
    assert token_ids.tolist() == [2, 1]
