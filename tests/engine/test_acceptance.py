"""The rejection rule keeps the target's distribution exactly: enumerated, not sampled.

Every draft path of K tokens over a vocabulary of V is laid out as one row. The probability
of each acceptance is found by bisection over the uniform number that the rule compares, and
the recovered token's from the distribution that the rule draws from. What comes out, summed
over all paths and continued with the target, must be the target's joint distribution of
K + 1 tokens. The same check must fail for every planted bug.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.acceptance import accept_by_rejection, accept_coupled, next_token_probs
from engine.noise import Stream, gumbel_noise, noise_key, uniform_noise
from engine.request import SamplingParams
from engine.sampler import RowSampling, Sampler, TokenHistory, uses_penalties
from tests.engine.sampling_reference import (
    PROCESSORS,
    PrefixModel,
    chi_square_p_value,
    joint_probs,
    reference_probs,
)

VOCAB = 4
K = 3
PROMPT = (0, 2)
CPU = torch.device("cpu")
SAMPLER = Sampler(VOCAB, CPU)
TARGET = PrefixModel(VOCAB, seed=11)
DRAFT = PrefixModel(VOCAB, seed=22)
PATHS = torch.tensor(list(itertools.product(range(VOCAB), repeat=K)))


@dataclass(frozen=True, slots=True)
class Rule:
    """The rejection rule and how its inputs are made; a planted bug replaces one part."""

    accept: Callable[..., tuple[torch.Tensor, torch.Tensor]] = accept_by_rejection
    next_probs: Callable[..., torch.Tensor] = next_token_probs
    target_history: Callable[[Sequence[int], int], Sequence[int]] = lambda path, _: path
    claimed_draft_probs: Callable[[torch.Tensor], torch.Tensor] = lambda probs: probs


def history_of(params: SamplingParams) -> TokenHistory | None:
    return TokenHistory.of_prompt(PROMPT, VOCAB, CPU) if uses_penalties(params) else None


def target_probs_of_path(params: SamplingParams, path: Sequence[int], rule: Rule) -> torch.Tensor:
    """[K + 1, V] as a verification computes them: all positions of the row at once."""
    logits = torch.stack([TARGET.logits((*PROMPT, *path[:j])) for j in range(K + 1)])
    row = RowSampling(
        params=params,
        num_positions=K + 1,
        first_position=len(PROMPT),
        draft_token_ids=rule.target_history(path, K),
        history=history_of(params),
    )
    return torch.softmax(SAMPLER.process(logits, [row]), dim=-1)


@cache
def draft_probs_after(params: SamplingParams, drafted: tuple[int, ...]) -> torch.Tensor:
    """[V] as a draft model computes them: token by token."""
    row = RowSampling(
        params=params,
        num_positions=1,
        first_position=len(PROMPT) + len(drafted),
        history=history_of(params),
        preceding_token_ids=drafted,
    )
    logits = DRAFT.logits((*PROMPT, *drafted)).unsqueeze(0)
    return torch.softmax(SAMPLER.process(logits, [row]), dim=-1)[0]


def draft_probs_of_path(params: SamplingParams, path: Sequence[int]) -> torch.Tensor:
    """[K, V]."""
    return torch.stack([draft_probs_after(params, tuple(path[:j])) for j in range(K)])


def one_hot_probs_of_path(path: Sequence[int]) -> torch.Tensor:
    """[K, V] of a drafter that always continues a prefix in the same way."""
    best = [int(DRAFT.logits((*PROMPT, *path[:j])).argmax()) for j in range(K)]
    return torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()


def acceptance_probs(rule: Rule, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """[N, K] probability that draft j passes once those before it did: the threshold of the
    uniform number below which the rule accepts."""
    num_paths = len(PATHS)
    found = []
    for j in range(K):
        low = torch.zeros(num_paths, dtype=torch.float64)
        high = torch.ones(num_paths, dtype=torch.float64)
        for _ in range(30):
            middle = (low + high) / 2
            uniform = torch.full((num_paths, K), 1e-30)
            uniform[:, j] = middle.float()
            num_accepted, _ = rule.accept(
                target,
                draft,
                PATHS,
                torch.full((num_paths,), K),
                uniform,
                torch.zeros(num_paths, K + 1, VOCAB),
            )
            passes = num_accepted > j
            low, high = torch.where(passes, middle, low), torch.where(passes, high, middle)
        found.append((low + high) / 2)
    return torch.stack(found, dim=1)


def emitted_law(rule: Rule, params: SamplingParams, *, one_hot: bool) -> torch.Tensor:
    """[V] * (K + 1): the law of the emitted block, continued with the target to full length."""
    paths = PATHS.tolist()
    target = torch.stack([target_probs_of_path(params, path, rule) for path in paths])
    drawn_from = torch.stack(
        [one_hot_probs_of_path(p) if one_hot else draft_probs_of_path(params, p) for p in paths]
    )
    claimed = rule.claimed_draft_probs(drawn_from)
    path_probs = drawn_from.double().gather(2, PATHS.unsqueeze(-1)).squeeze(-1).prod(dim=1)
    accepts = acceptance_probs(rule, target, claimed)
    law = torch.zeros([VOCAB] * (K + 1), dtype=torch.float64)
    joint = target_joint(params)
    for num_accepted in range(K + 1):
        next_probs = rule.next_probs(
            target,
            claimed,
            torch.full((len(paths),), num_accepted),
            torch.full((len(paths),), K),
        ).double()
        next_probs = next_probs / next_probs.sum(dim=1, keepdim=True)
        weights = path_probs * accepts[:, :num_accepted].prod(dim=1)
        if num_accepted < K:
            weights = weights * (1 - accepts[:, num_accepted])
        for path, weight, probs in zip(paths, weights.tolist(), next_probs, strict=True):
            if weight == 0:
                continue
            for token in range(VOCAB):
                emitted = (*path[:num_accepted], token)
                rest = joint[emitted]
                total = rest.sum()
                if total > 0:
                    law[emitted] += weight * probs[token] * rest / total
                elif probs[token] > 0:
                    law[emitted].view(-1)[0] += weight * probs[token]
    return law


@cache
def target_joint(params: SamplingParams) -> torch.Tensor:
    return joint_probs(
        lambda prefix: reference_probs(
            TARGET.logits((*PROMPT, *prefix)).tolist(), params, PROMPT, prefix
        ),
        VOCAB,
        K + 1,
    )


def distance(rule: Rule, params: SamplingParams, *, one_hot: bool) -> float:
    """Total variation between what is emitted and the target alone."""
    law = emitted_law(rule, params, one_hot=one_hot)
    return float((law - target_joint(params)).abs().sum() / 2)


@pytest.mark.parametrize("one_hot", [False, True], ids=["draft_model", "one_hot"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_rejection_rule_emits_the_targets_distribution(name: str, one_hot: bool) -> None:
    assert distance(Rule(), PROCESSORS[name], one_hot=one_hot) < 1e-6


def test_a_draft_that_was_drawn_may_be_claimed_as_certain() -> None:
    """Given the draft, it is a deterministic one: only acceptance is lost."""
    rule = Rule(claimed_draft_probs=lambda _: torch.nn.functional.one_hot(PATHS, VOCAB).float())
    assert distance(rule, PROCESSORS["temperature_high"], one_hot=False) < 1e-6


# ---- planted bugs -----------------------------------------------------------------------


def _accept_by(passes_of: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """The rule with another condition of acceptance."""

    def accept(target, draft, drafts, num_drafts, uniform, noise):  # type: ignore[no-untyped-def]
        index = drafts.unsqueeze(-1)
        target_at = target[:, :K].gather(2, index).squeeze(-1)
        draft_at = draft.gather(2, index).squeeze(-1)
        passes = passes_of(uniform, target_at, draft_at)
        return passes.long().cumprod(dim=1).sum(dim=1), drafts[:, 0]

    return accept


def _accept_scattered(target, draft, drafts, num_drafts, uniform, noise):  # type: ignore[no-untyped-def]
    """Counts drafts that pass after a refused one."""
    index = drafts.unsqueeze(-1)
    target_at = target[:, :K].gather(2, index).squeeze(-1)
    passes = uniform * draft.gather(2, index).squeeze(-1) < target_at
    return passes.long().sum(dim=1), drafts[:, 0]


def _residual_not_clamped(target, draft, num_accepted, num_drafts):  # type: ignore[no-untyped-def]
    rows = torch.arange(len(target))
    probs = target[rows, num_accepted]
    residual = (probs - draft[rows, num_accepted.clamp(max=K - 1)]).abs()
    is_usable = (num_accepted < num_drafts) & (residual.sum(dim=1) > 0)
    return torch.where(is_usable.unsqueeze(1), residual, probs)


def _residual_not_subtracted(target, draft, num_accepted, num_drafts):  # type: ignore[no-untyped-def]
    return target[torch.arange(len(target)), num_accepted]


def _residual_of_the_position_before(target, draft, num_accepted, num_drafts):  # type: ignore[no-untyped-def]
    shifted = torch.cat([draft[:, :1], draft[:, :-1]], dim=1)
    return next_token_probs(target, shifted, num_accepted, num_drafts)


def _bonus_from_the_draft(target, draft, num_accepted, num_drafts):  # type: ignore[no-untyped-def]
    probs = next_token_probs(target, draft, num_accepted, num_drafts)
    return torch.where((num_accepted == num_drafts).unsqueeze(1), draft[:, -1], probs)


def _bonus_less_the_last_draft(target, draft, num_accepted, num_drafts):  # type: ignore[no-untyped-def]
    return next_token_probs(target, draft, num_accepted, num_drafts + 1)


MUTANTS: dict[str, Rule] = {
    "accepted with the target's probability alone": Rule(
        accept=_accept_by(lambda uniform, target, draft: uniform < target)
    ),
    "the ratio upside down": Rule(
        accept=_accept_by(lambda uniform, target, draft: uniform * target < draft)
    ),
    "accepted when the draft is likely enough": Rule(
        accept=_accept_by(lambda uniform, target, draft: target > 0.2)
    ),
    "the smaller of the two probabilities instead of their ratio": Rule(
        accept=_accept_by(lambda uniform, target, draft: uniform < torch.minimum(target, draft))
    ),
    "drafts counted behind a refused one": Rule(accept=_accept_scattered),
    "the residual not clamped": Rule(next_probs=_residual_not_clamped),
    "the target's own distribution instead of the residual": Rule(
        next_probs=_residual_not_subtracted
    ),
    "the residual with the draft of the position before": Rule(
        next_probs=_residual_of_the_position_before
    ),
    "the bonus token from the draft": Rule(next_probs=_bonus_from_the_draft),
    "the bonus token from a residual": Rule(next_probs=_bonus_less_the_last_draft),
    "the draft's probabilities before its processors": Rule(
        claimed_draft_probs=lambda probs: torch.softmax(probs.log().clamp(min=-20) * 0.5, dim=-1)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_in_the_rule_is_seen(name: str) -> None:
    assert distance(MUTANTS[name], PROCESSORS["temperature_high"], one_hot=False) > 1e-3


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize(
    "history",
    [
        pytest.param(lambda path, k: (), id="no drafts counted"),
        pytest.param(lambda path, k: [path[-1]] * k, id="last token only"),
        pytest.param(lambda path, k: [path[0], path[0], *path[1:-1]], id="late by one"),
    ],
)
def test_a_history_that_is_not_the_positions_own_is_seen(
    name: str, history: Callable[[Sequence[int], int], Sequence[int]]
) -> None:
    rule = replace(Rule(), target_history=history)
    assert distance(rule, PROCESSORS[name], one_hot=False) > 1e-3


# ---- draws with real noise ----------------------------------------------------------------


def emitted_first_tokens(
    num_rows: int, streams: tuple[Stream, Stream, Stream]
) -> tuple[torch.Tensor, torch.Tensor]:
    """First emitted tokens of one-draft rows, every row with its own seed: [R], and the target.

    streams give the noise of the draft, of the acceptance and of the recovered token.
    """
    draft_stream, accept_stream, recover_stream = streams
    target = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draft = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens = torch.arange(VOCAB)
    seeds = range(num_rows)
    drafted = gumbel_noise([noise_key(s, 5, draft_stream) for s in seeds], tokens)
    drafts = (draft.log() + drafted).argmax(dim=1, keepdim=True)
    uniform = uniform_noise(
        [noise_key(s, 5, accept_stream) for s in seeds], torch.zeros(1, dtype=torch.long)
    )
    noise = gumbel_noise(
        [noise_key(s, p, recover_stream) for s in seeds for p in (5, 6)], tokens
    ).view(num_rows, 2, VOCAB)
    num_accepted, token_ids = accept_by_rejection(
        target.expand(num_rows, 2, VOCAB),
        draft.expand(num_rows, 1, VOCAB),
        drafts,
        torch.ones(num_rows, dtype=torch.long),
        uniform,
        noise,
    )
    return torch.where(num_accepted > 0, drafts[:, 0], token_ids), target


def test_draws_of_the_rejection_rule_follow_the_target() -> None:
    tokens, target = emitted_first_tokens(40_000, (Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER))
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert chi_square_p_value(counts, target) > 1e-4


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param((Stream.ACCEPT, Stream.ACCEPT, Stream.RECOVER), id="accept knows the draft"),
        pytest.param((Stream.DRAFT, Stream.ACCEPT, Stream.DRAFT), id="recover knows the draft"),
    ],
)
def test_noise_that_is_used_twice_is_seen(streams: tuple[Stream, Stream, Stream]) -> None:
    tokens, target = emitted_first_tokens(40_000, streams)
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert chi_square_p_value(counts, target) < 1e-9


# ---- rows of a batch ------------------------------------------------------------------------


def random_batch(num_rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.softmax(torch.randn(num_rows, K + 1, VOCAB, generator=generator), dim=-1)
    draft = torch.softmax(torch.randn(num_rows, K, VOCAB, generator=generator), dim=-1)
    drafts = torch.randint(VOCAB, (num_rows, K), generator=generator)
    num_drafts = torch.randint(K + 1, (num_rows,), generator=generator)
    uniform = torch.rand(num_rows, K, generator=generator)
    noise = -torch.rand(num_rows, K + 1, VOCAB, generator=generator).log().neg().log()
    return target, draft, drafts, num_drafts, uniform, noise


def test_a_row_decides_alone_whatever_its_place_in_the_batch() -> None:
    batch = random_batch(64, seed=1)
    accepted, token_ids = accept_by_rejection(*batch)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    shuffled = accept_by_rejection(*(part[order] for part in batch))
    assert torch.equal(shuffled[0], accepted[order])
    assert torch.equal(shuffled[1], token_ids[order])
    for row in range(64):
        alone = accept_by_rejection(*(part[row : row + 1] for part in batch))
        assert (int(alone[0]), int(alone[1])) == (int(accepted[row]), int(token_ids[row]))


def test_what_lies_beyond_a_short_proposal_is_never_accepted_nor_read() -> None:
    target, draft, drafts, num_drafts, uniform, noise = random_batch(256, seed=3)
    accepted, token_ids = accept_by_rejection(target, draft, drafts, num_drafts, uniform, noise)
    assert bool((accepted <= num_drafts).all())
    is_padding = torch.arange(K) >= num_drafts.unsqueeze(1)
    other_draft = torch.where(is_padding.unsqueeze(-1), torch.zeros(()), draft)
    other_drafts = torch.where(is_padding, 0, drafts)
    again = accept_by_rejection(target, other_draft, other_drafts, num_drafts, uniform, noise)
    assert torch.equal(again[0], accepted)
    assert torch.equal(again[1], token_ids)


def test_without_any_draft_the_target_draws() -> None:
    target, _, _, _, _, noise = random_batch(8, seed=4)
    empty = torch.zeros(8, 0, dtype=torch.long)
    accepted, token_ids = accept_by_rejection(
        target[:, :1], torch.zeros(8, 0, VOCAB), empty, empty.sum(dim=1), empty.float(), noise
    )
    assert not accepted.any()
    assert torch.equal(token_ids, (target[:, 0].log() + noise[:, 0]).argmax(dim=1))


def test_equal_distributions_accept_every_draft() -> None:
    target, _, drafts, _, uniform, noise = random_batch(64, seed=5)
    full = torch.full((64,), K)
    accepted, _ = accept_by_rejection(target, target[:, :K], drafts, full, uniform, noise)
    assert bool((accepted == K).all())


def test_an_impossible_draft_is_refused_and_replaced_by_a_possible_token() -> None:
    target = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 2, VOCAB)
    draft = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(1, 1, VOCAB)
    for seed in range(50):
        uniform = uniform_noise([noise_key(seed, 0, Stream.ACCEPT)], torch.zeros(1).long())
        noise = gumbel_noise([noise_key(seed, p, Stream.RECOVER) for p in (0, 1)], torch.arange(4))
        accepted, token_ids = accept_by_rejection(
            target, draft, torch.tensor([[2]]), torch.tensor([1]), uniform, noise.unsqueeze(0)
        )
        assert int(accepted) == 0
        assert int(token_ids) in (0, 1)


# ---- the coupled rule -------------------------------------------------------------------------

Rows = list[tuple[list[int], list[int]]]  # the target's draws and the drafts of each row
ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=5, max_size=5), st.lists(st.integers(0, 2), max_size=4)
    ),
    min_size=1,
    max_size=6,
)


def coupled_disagreements(accept: Callable[..., torch.Tensor], rows: Rows) -> int:
    """Rows whose count is not the length of the common prefix of draws and drafts."""
    longest = max(len(drafts) for _, drafts in rows)
    # Padding repeats the target's own draw: it must not count although it matches.
    padded = [[*drafts, *target[len(drafts) : longest]] for target, drafts in rows]
    accepted = accept(
        torch.tensor([target[: longest + 1] for target, _ in rows]),
        torch.tensor(padded).view(len(rows), longest),
        torch.tensor([len(drafts) for _, drafts in rows]),
    )
    wrong = 0
    for count, (target, drafts) in zip(accepted.tolist(), rows, strict=True):
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(drafts, target, strict=False)
        )
        wrong += count != len(list(same))
    return wrong


@settings(deadline=None)
@given(ROWS)
def test_the_coupled_rule_accepts_the_common_prefix(
    rows: Rows,
) -> None:
    assert coupled_disagreements(accept_coupled, rows) == 0


def _coupled_matches(target, drafts, num_drafts):  # type: ignore[no-untyped-def]
    return (target[:, : drafts.shape[1]] == drafts) & (
        torch.arange(drafts.shape[1]) < num_drafts.unsqueeze(1)
    )


COUPLED_MUTANTS: dict[str, Callable[..., torch.Tensor]] = {
    "padding accepted": lambda target, drafts, num_drafts: (
        (target[:, : drafts.shape[1]] == drafts).long().cumprod(dim=1).sum(dim=1)
    ),
    "drafts counted behind a mismatch": lambda *inputs: _coupled_matches(*inputs).sum(dim=1),
    "compared with the next position": lambda target, drafts, num_drafts: (
        _coupled_matches(target.roll(-1, dims=1), drafts, num_drafts)
        .long()
        .cumprod(dim=1)
        .sum(dim=1)
    ),
    "the first mismatch accepted": lambda target, drafts, num_drafts: torch.minimum(
        _coupled_matches(target, drafts, num_drafts).long().cumprod(dim=1).sum(dim=1) + 1,
        num_drafts,
    ),
    "all or nothing": lambda target, drafts, num_drafts: torch.where(
        _coupled_matches(target, drafts, num_drafts).sum(dim=1) == num_drafts, num_drafts, 0
    ),
}


@pytest.mark.parametrize("name", COUPLED_MUTANTS)
def test_a_planted_bug_in_the_coupled_rule_is_seen(name: str) -> None:
    rows = [
        ([0, 1, 2, 0, 1], [0, 1, 2, 0]),
        ([0, 1, 2, 0, 1], [0, 1]),
        ([0, 1, 2, 0, 1], [0, 2, 2, 0]),
        ([1, 1, 1, 1, 1], [2, 1, 1]),
    ]
    assert coupled_disagreements(accept_coupled, rows) == 0
    assert coupled_disagreements(COUPLED_MUTANTS[name], rows) > 0
