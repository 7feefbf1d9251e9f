"""Drafters propose what they say they do, whatever became of their earlier proposals."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafter.base import NO_PROPOSAL, DraftJob, Proposal
from engine.drafter.chain import DrafterChain
from engine.drafter.draft_model import DraftModelDrafter
from engine.drafter.prompt_lookup import NgramIndex, PromptLookupDrafter
from engine.kv_cache import KVCache
from engine.layout.plan import INVARIANT_PADDING
from engine.live_request import LiveRequest
from engine.model_runner import ModelRunner
from engine.noise import Stream
from engine.request import AcceptanceRule, SamplingParams
from engine.sampler import RowSampling, Sampler, TokenHistory
from engine.suitability import attention_shape
from tests.engine.driver import GREEDY, request
from tests.tiny import VOCAB_SIZE, tiny_llama

CPU = torch.device("cpu")


def live(
    request_id: str = "a",
    token_ids: Sequence[int] = (5, 6, 7, 8),
    sampling: SamplingParams = GREEDY,
    **options: object,
) -> LiveRequest:
    return LiveRequest(
        request(request_id, token_ids, sampling=sampling, max_tokens=200, **options),
        list(token_ids),
    )


# ---- prompt lookup ---------------------------------------------------------------------------


def expected_lookup(
    token_ids: list[int], min_ngram: int, max_ngram: int, max_drafts: int
) -> tuple[int, ...]:
    """By searching: what followed the latest earlier place of the longest suffix."""
    for length in range(min(max_ngram, len(token_ids) - 1), min_ngram - 1, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix:
                following = token_ids[start + length :]
                repeated = following * (max_drafts // len(following) + 1)
                return tuple(repeated[:max_drafts])
    return ()


@settings(deadline=None, max_examples=300)
@given(
    blocks=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8),
    min_ngram=st.integers(1, 3),
    extra=st.integers(0, 2),
    max_drafts=st.integers(1, 9),
)
def test_an_index_grown_by_blocks_finds_what_a_search_of_the_whole_does(
    blocks: list[list[int]], min_ngram: int, extra: int, max_drafts: int
) -> None:
    index = NgramIndex(min_ngram, min_ngram + extra)
    token_ids: list[int] = []
    for block in blocks:
        token_ids.extend(block)
        index.catch_up(token_ids)
        found = index.lookup(token_ids, max_drafts)
        assert found == expected_lookup(token_ids, min_ngram, min_ngram + extra, max_drafts)


class CountingTokens(list[int]):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.num_read += len(self)
        return super().__iter__()


class CountingDict(dict[tuple[int, ...], int]):
    """Counts its look-ups and entries."""

    num_operations = 0

    def get(self, key, default=None):  # type: ignore[no-untyped-def]
        self.num_operations += 1
        return super().get(key, default)

    def __setitem__(self, key: tuple[int, ...], value: int) -> None:
        self.num_operations += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("num_words", [3, 40, 50_000])
def test_a_token_costs_the_lookup_as_much_in_a_context_ten_times_as_long(num_words: int) -> None:
    generator = random.Random(num_words)

    def work_of_a_token(num_context: int) -> float:
        tokens = CountingTokens(generator.randrange(num_words) for _ in range(num_context))
        continuation = CountingDict()
        index = NgramIndex(2, 4, continuation=continuation)
        index.catch_up(tokens)
        before = tokens.num_read + continuation.num_operations
        for _ in range(100):
            tokens.append(generator.randrange(num_words))
            index.catch_up(tokens)
            index.lookup(tokens, 8)
        return (tokens.num_read + continuation.num_operations - before) / 100

    short, long = work_of_a_token(500), work_of_a_token(5_000)
    # Three n-grams of up to 4 tokens are entered and looked up, and 8 tokens are drafted.
    assert max(short, long) <= 2 * (2 + 3 + 4) + 2 * 3 + 8


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_drafted_to_its_full_length(period: int) -> None:
    loop = list(range(10, 10 + period))
    token_ids = [1, 2, 3, *loop * 3]
    drafter = PromptLookupDrafter(min_ngram=2, max_ngram=4)
    (proposal,) = drafter.propose([DraftJob(live(token_ids=token_ids), len(token_ids), 16)])
    assert proposal.token_ids == tuple((loop * 20)[:16])
    assert proposal.draft_probs is None
    assert proposal.num_positions == 0


def test_a_rows_proposal_comes_from_its_own_tokens_only() -> None:
    drafter = PromptLookupDrafter(min_ngram=2, max_ngram=3)
    one, other = live("one", [1, 2, 3, 4, 1, 2]), live("other", [9, 8, 1, 2])
    proposals = drafter.propose([DraftJob(one, 6, 2), DraftJob(other, 4, 2)])
    assert [p.token_ids for p in proposals] == [(3, 4), ()]
    drafter.forget("one")
    (proposal,) = drafter.propose([DraftJob(live("one", [7, 7, 1, 2]), 4, 2)])
    assert proposal.token_ids == (), "a finished request's text lived on under its name"


def test_a_row_that_may_not_draft_costs_nothing_and_loses_nothing() -> None:
    drafter = PromptLookupDrafter(min_ngram=2, max_ngram=3)
    row = live(token_ids=[1, 2, 3])
    assert drafter.propose([DraftJob(row, 3, 0)]) == [NO_PROPOSAL]
    row.token_ids.extend([4, 1, 2])
    (proposal,) = drafter.propose([DraftJob(row, 6, 3)])
    assert proposal.token_ids == (3, 4, 1)


# ---- the draft model -------------------------------------------------------------------------

DRAFT_SEED = 7
MAX_TOKENS = 160


def draft_model_drafter(
    *, num_rows: int = 4, block_size: int | None = None, num_blocks: int = 60
) -> DraftModelDrafter:
    model = tiny_llama(DRAFT_SEED)
    shape, _, _ = attention_shape("tiny", model, 32)
    cache = KVCache(
        shape,
        max_num_rows=num_rows,
        max_tokens=MAX_TOKENS,
        num_blocks=num_blocks if block_size else num_rows,
        block_size=block_size,
    )
    cache.fill_unwritten(1000.0)
    runner = ModelRunner(model, cache, INVARIANT_PADDING)
    return DraftModelDrafter(runner, Sampler(VOCAB_SIZE, CPU), max_step_tokens=64)


@pytest.fixture(scope="module")
def reference():  # type: ignore[no-untyped-def]
    """The same draft model by itself: what it would say after these tokens, computed whole."""
    model, sampler = tiny_llama(DRAFT_SEED), Sampler(VOCAB_SIZE, CPU)

    def continuation(
        token_ids: Sequence[int],
        num_tokens: int,
        sampling: SamplingParams = GREEDY,
        stream: Stream = Stream.TARGET,
    ) -> tuple[list[int], list[torch.Tensor]]:
        found, probs = list(token_ids), []
        for _ in range(num_tokens):
            with torch.inference_mode():
                logits = model(torch.tensor([found]), use_cache=False).logits[0, -1:]
            row = RowSampling(sampling, 1, len(found))
            drawn, _ = sampler.draw(logits, [row], [stream])
            probs.append(torch.softmax(sampler.process(logits.clone(), [row]), dim=-1)[0])
            found.append(int(drawn))
        return found[len(token_ids) :], probs

    return continuation


def propose(drafter: DraftModelDrafter, row: LiveRequest, max_drafts: int) -> Proposal:
    (proposal,) = drafter.propose([DraftJob(row, row.num_tokens, max_drafts)])
    drafter.check_integrity()
    return proposal


def commit(row: LiveRequest, proposal: Proposal, num_accepted: int) -> None:
    """Accept so many drafts; the token after them is one that the draft did not propose."""
    drafts = proposal.token_ids
    refused = drafts[num_accepted] if num_accepted < len(drafts) else 0
    row.token_ids.extend([*drafts[:num_accepted], (refused + 1) % VOCAB_SIZE])


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3, 4])
def test_after_any_acceptance_the_next_proposal_is_the_models_own(  # type: ignore[no-untyped-def]
    reference, num_accepted: int, block_size: int | None
) -> None:
    drafter, row = draft_model_drafter(block_size=block_size), live()
    for round_number in range(6):
        proposal = propose(drafter, row, 4)
        assert list(proposal.token_ids) == reference(row.token_ids, 4)[0]
        if round_number:
            caught_up = 2 if num_accepted == 4 else 1
            assert proposal.num_positions == caught_up + 3
        commit(row, proposal, num_accepted)


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_any_kind_leave_the_models_cache_right(  # type: ignore[no-untyped-def]
    reference, seed: int, block_size: int | None
) -> None:
    """Plain rounds, other drafters' tokens, chunks of a prompt, preemption, other rows."""
    chooser = random.Random(seed)
    drafter = draft_model_drafter(block_size=block_size)
    rows = [live(f"r{n}", [chooser.randrange(3, 300) for _ in range(5 + 9 * n)]) for n in range(3)]
    for _ in range(14):
        jobs = []
        for row in chooser.sample(rows, chooser.randint(1, 3)):
            kind = chooser.choice(["draft", "draft", "keep up", "target is behind"])
            end = row.num_tokens
            if kind == "target is behind":  # it computes a chunk again after a preemption
                end = chooser.randint(1, row.num_tokens)
            k = chooser.randint(1, 5) if kind == "draft" else 0
            jobs.append(DraftJob(row, end, k))
        for job, proposal in zip(jobs, drafter.propose(jobs), strict=True):
            row = job.live
            assert list(proposal.token_ids) == reference(row.token_ids, job.max_drafts)[0]
            if job.end < row.num_tokens:
                continue
            if chooser.random() < 0.3:  # another drafter's tokens were verified in this round
                row.token_ids.extend(chooser.randrange(3, 300) for _ in range(3))
            else:
                commit(row, proposal, chooser.randint(0, len(proposal.token_ids)))
        drafter.check_integrity()
    for row in rows:
        drafter.forget(row.request_id)
    drafter.check_integrity()
    assert drafter.cache.num_free_rows == drafter.cache.max_num_rows


def test_a_long_prompt_is_caught_up_in_steps_before_anything_is_drafted(  # type: ignore[no-untyped-def]
    reference,
) -> None:
    drafter, row = draft_model_drafter(), live(token_ids=[n % 290 + 3 for n in range(100)])
    assert propose(drafter, row, 4).token_ids == ()  # 64 of 100
    assert list(propose(drafter, row, 4).token_ids) == reference(row.token_ids, 4)[0]


def test_a_coupled_draft_is_drawn_with_the_targets_noise(reference) -> None:  # type: ignore[no-untyped-def]
    sampling = SamplingParams(temperature=0.9, top_k=20, seed=5)
    row = live(sampling=sampling)
    proposal = propose(draft_model_drafter(), row, 4)
    assert list(proposal.token_ids) == reference(row.token_ids, 4, sampling)[0]
    assert proposal.draft_probs is None


def test_the_rejection_rule_gets_the_very_distribution_each_draft_was_drawn_from(  # type: ignore[no-untyped-def]
    reference,
) -> None:
    sampling = SamplingParams(
        temperature=0.9, top_k=20, seed=5, acceptance_rule=AcceptanceRule.REJECTION
    )
    row = live(sampling=sampling)
    proposal = propose(draft_model_drafter(), row, 4)
    token_ids, probs = reference(row.token_ids, 4, sampling, Stream.DRAFT)
    assert list(proposal.token_ids) == token_ids
    assert proposal.draft_probs is not None
    torch.testing.assert_close(proposal.draft_probs, torch.stack(probs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_drafts_count_in_the_penalties_of_the_drafts_after_them(penalty: float) -> None:
    row = live(sampling=SamplingParams(temperature=0, frequency_penalty=penalty))
    row.history = TokenHistory.of_prompt(row.token_ids, VOCAB_SIZE, CPU)
    drafts = propose(draft_model_drafter(), row, 6).token_ids
    assert len(set(drafts)) == (6 if penalty > 0 else 1)
    assert not row.history.output_counts.any(), "a draft is not yet part of the output"


def test_a_row_without_room_in_the_draft_models_context_goes_on_without_it() -> None:
    drafter, row = draft_model_drafter(), live(token_ids=[n % 290 + 3 for n in range(60)])
    propose(drafter, row, 2)
    row.token_ids.extend([9] * (MAX_TOKENS - 62))
    assert len(propose(drafter, row, 4).token_ids) <= 4  # one more chunk of the catching up
    assert len(propose(drafter, row, 4).token_ids) == 2  # as many as still fit
    row.token_ids.extend([9] * 10)
    assert propose(drafter, row, 4).token_ids == ()


def test_a_row_without_a_place_or_blocks_gets_no_proposal_and_the_others_do() -> None:
    drafter = draft_model_drafter(num_rows=2)
    rows = [live(f"r{n}", [5 + n, 6, 7]) for n in range(3)]
    found = drafter.propose([DraftJob(row, 3, 2) for row in rows])
    assert [len(p.token_ids) for p in found] == [2, 2, 0]
    drafter.forget("r0")
    assert len(propose(drafter, rows[2], 2).token_ids) == 2
    short = draft_model_drafter(block_size=8, num_blocks=20)
    first, second = live("f", [n % 290 + 3 for n in range(140)]), live("s", [7] * 40)
    for _ in range(3):
        propose(short, first, 2)
    assert propose(short, second, 2).token_ids == ()
    short.forget("f")
    assert len(propose(short, second, 2).token_ids) == 2


# ---- the chain -------------------------------------------------------------------------------


class Scripted:
    """A drafter that answers what it is told to, and remembers what it was asked."""

    def __init__(self, name: str, answers: dict[str, Proposal], error: str = "") -> None:
        self.name = name
        self.answers = answers
        self.error = error
        self.asked: list[list[str]] = []
        self.forgotten: list[str] = []

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        self.asked.append([job.live.request_id for job in jobs])
        if self.error:
            raise RuntimeError(self.error)
        return [self.answers.get(job.live.request_id, NO_PROPOSAL) for job in jobs]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def check_integrity(self) -> None: ...


def test_the_first_drafter_with_a_proposal_wins_and_all_work_is_counted() -> None:
    first = Scripted("first", {"a": Proposal((1,), num_positions=2), "b": Proposal((), None, 3)})
    second = Scripted("second", {"b": Proposal((2,), num_positions=4, drafter="second")})
    chain = DrafterChain([first, second])
    jobs = [DraftJob(live(name), 4, 2) for name in ("a", "b", "c")]
    found = chain.propose(jobs)
    assert [p.token_ids for p in found] == [(1,), (2,), ()]
    assert [p.num_positions for p in found] == [2, 7, 0]
    assert second.asked == [["b", "c"]]
    chain.forget("b")
    assert first.forgotten == second.forgotten == ["b"]


def test_a_drafter_that_fails_is_not_asked_again_and_the_next_takes_over() -> None:
    broken = Scripted("broken", {}, error="out of order")
    sound = Scripted("sound", {"a": Proposal((2,))})
    chain = DrafterChain([broken, sound])
    for _ in range(3):
        (found,) = chain.propose([DraftJob(live(), 4, 2)])
        assert found.token_ids == (2,)
    assert len(broken.asked) == 1
    assert chain.failures == {"broken": "RuntimeError: out of order"}


def test_a_request_names_its_drafter_and_one_without_speculation_is_never_drafted() -> None:
    first = Scripted("first", {name: Proposal((1,)) for name in "abc"})
    second = Scripted("second", {name: Proposal((2,)) for name in "abc"})
    rows = [live("a", drafter="second"), live("b", mode="off"), live("c")]
    found = DrafterChain([first, second]).propose([DraftJob(row, 4, 2) for row in rows])
    assert [p.token_ids for p in found] == [(2,), (), (1,)]
    assert first.asked == [["c"]]
    assert second.asked == [["a"]]
