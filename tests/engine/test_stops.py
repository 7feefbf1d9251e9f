"""A request ends at its earliest completion, wherever that lies in an accepted block."""

import time
from functools import cache

import pytest

from engine.live_request import LiveRequest
from engine.request import FinishReason, RequestError, SamplingParams
from tests.engine.driver import Outcome, request, run, tiny_engine
from tests.tiny import EOS_TOKEN_ID, related_draft, tiny_llama, tiny_tokenizer

PROMPT = tiny_tokenizer()("the quick brown fox jumps over")["input_ids"]


@cache
def perfect_engine(max_draft_tokens: int = 8, **options: object):  # type: ignore[no-untyped-def]
    """Every draft is accepted, so blocks are as long as they get. One engine for many tests: each
    leaves it idle."""
    target = tiny_llama()
    return tiny_engine(
        target=target,
        draft=related_draft(target, noise=0.0),
        drafters=("draft_model",),
        max_draft_tokens=max_draft_tokens,
        **options,
    )


@cache
def _reference_output() -> list[int]:
    plain = request("a", PROMPT, max_tokens=400, ignore_eos=True, mode="off")
    outcome = run(tiny_engine(), [plain])
    return outcome.token_ids["a"]


def full_output(num_tokens: int = 40) -> list[int]:
    return _reference_output()[:num_tokens]


def check_counts(outcome: Outcome, request_id: str = "a") -> None:
    stats = outcome.stats[request_id]
    assert stats.num_output_tokens == (
        stats.num_plain_steps
        + stats.num_verify_steps
        + stats.num_emitted_accepted_tokens
        - stats.num_cut_tokens
    )
    assert 0 <= stats.num_emitted_accepted_tokens <= stats.num_accepted_tokens
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert sum(stats.drafted_per_position) == stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert sum(stats.accepted_per_length) == stats.num_accepted_tokens
    assert len(stats.accepted_per_length) == len(stats.drafted_per_position)
    num_drafts = [*stats.drafted_per_position, 0]
    for length, num_accepted in enumerate(stats.accepted_per_length, start=1):
        assert num_accepted <= length * (num_drafts[length - 1] - num_drafts[length])
    assert sum(stats.acceptance_histogram) == stats.num_verify_steps


def test_accepted_tokens_are_counted_by_the_length_of_their_draft() -> None:
    live = LiveRequest(request("a", PROMPT, max_tokens=64), list(PROMPT))
    for num_drafts, num_accepted in ((2, 1), (0, 0), (4, 1), (2, 2), (4, 3), (1, 0)):
        live.count_verification(num_drafts, num_accepted, num_accepted + 1)
    stats = live.stats(FinishReason.LENGTH, 1.0)
    assert stats.accepted_per_length == (0, 3, 0, 4)
    assert stats.drafted_per_position == (5, 4, 2, 2)


@pytest.mark.parametrize("max_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_exactly_max_tokens_are_emitted(max_tokens: int, max_draft_tokens: int) -> None:
    engine = perfect_engine(max_draft_tokens)
    outcome = run(engine, [request("a", PROMPT, max_tokens=max_tokens, ignore_eos=True)])
    assert outcome.token_ids["a"] == full_output()[:max_tokens]
    assert outcome.stats["a"].finish_reason is FinishReason.LENGTH
    check_counts(outcome)


def test_a_stop_token_ends_the_request_at_every_index_of_a_block() -> None:
    output = full_output()
    first_seen = [i for i, token_id in enumerate(output) if token_id not in output[:i]]
    assert len(first_seen) > 8
    for index in first_seen:
        engine = perfect_engine(8)
        stop = output[index]
        outcome = run(
            engine,
            [request("a", PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))],
        )
        assert outcome.token_ids["a"] == output[: index + 1]
        assert outcome.deltas[-1].stop_token_id == stop
        assert outcome.stats["a"].finish_reason is FinishReason.STOP_TOKEN
        check_counts(outcome)
        pool = engine._scheduler.cache.pool
        assert pool.num_available == pool.num_blocks


def test_the_models_own_end_token_stops_unless_it_is_ignored() -> None:
    sampling = SamplingParams(temperature=0, logit_bias=((EOS_TOKEN_ID, 30.0),))
    stopped = run(perfect_engine(), [request("a", PROMPT, sampling=sampling)])
    assert stopped.token_ids["a"] == [EOS_TOKEN_ID]
    guarded = run(perfect_engine(), [request("a", PROMPT, sampling=sampling, min_tokens=6)])
    assert len(guarded.token_ids["a"]) == 7
    assert EOS_TOKEN_ID not in guarded.token_ids["a"][:6]
    ignored = run(
        perfect_engine(), [request("a", PROMPT, sampling=sampling, ignore_eos=True, max_tokens=9)]
    )
    assert ignored.token_ids["a"] == [EOS_TOKEN_ID] * 9


def test_an_end_token_that_only_the_drafter_wants_does_not_stop() -> None:
    target = tiny_llama()
    draft = related_draft(target, noise=0.0)
    draft.lm_head.weight.data[:] = 0  # all logits equal: every draft is token 0
    engine = tiny_engine(target=target, draft=draft, drafters=("draft_model",))
    outcome = run(
        engine, [request("a", PROMPT, max_tokens=20, stop_token_ids=(0,), ignore_eos=True)]
    )
    output = full_output(20)
    expected = output[: output.index(0) + 1] if 0 in output else output
    assert outcome.token_ids["a"] == expected
    assert outcome.stats["a"].num_draft_tokens > 0


def test_the_earlier_of_length_and_stop_wins_inside_one_block() -> None:
    output = full_output()
    index = next(i for i in range(3, 8) if output[i] not in output[:i])
    for max_tokens, reason in ((index, FinishReason.LENGTH), (index + 1, FinishReason.STOP_TOKEN)):
        outcome = run(
            perfect_engine(8),
            [
                request(
                    "a",
                    PROMPT,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    stop_token_ids=(output[index],),
                )
            ],
        )
        assert outcome.stats["a"].finish_reason is reason
        assert outcome.token_ids["a"] == output[:max_tokens]


def test_a_stop_string_across_tokens_and_blocks_cuts_ids_logprobs_and_text_alike() -> None:
    output = full_output()
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(output, skip_special_tokens=True)
    for start in range(2, 12):
        stop = text[start : start + 4]
        if "\ufffd" in stop or text.index(stop) != start:
            continue
        outcome = run(
            perfect_engine(8),
            [
                request(
                    "a",
                    PROMPT,
                    max_tokens=40,
                    ignore_eos=True,
                    stop_strings=(stop,),
                    sampling=SamplingParams(temperature=0, num_top_logprobs=0),
                )
            ],
        )
        assert outcome.text["a"] == text[:start]
        assert outcome.deltas[-1].stop_string == stop
        kept = outcome.token_ids["a"]
        assert kept == output[: len(kept)]
        assert [item.token_id for d in outcome.deltas for item in d.logprobs] == kept
        decoded = tokenizer.decode(kept, skip_special_tokens=True)
        assert stop in decoded
        assert stop not in tokenizer.decode(kept[:-1], skip_special_tokens=True)
        check_counts(outcome)


def test_the_context_fills_in_the_middle_of_a_draft() -> None:
    for max_draft_tokens in (1, 4, 16):
        engine = perfect_engine(max_draft_tokens, max_model_tokens=64)
        outcome = run(engine, [request("a", PROMPT, max_tokens=500, ignore_eos=True)])
        assert outcome.stats["a"].finish_reason is FinishReason.CONTEXT_FULL
        assert len(PROMPT) + len(outcome.token_ids["a"]) == 64


def test_a_prompt_without_room_for_output_is_refused_by_name() -> None:
    engine = tiny_engine(max_model_tokens=16)
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", [5] * 16))
    assert caught.value.field == "prompt"
    engine.submit(request("b", [5] * 15, max_tokens=9))
    outcome = Outcome()
    while engine.has_work():
        outcome.add_step(engine)
    assert len(outcome.token_ids["b"]) == 1


def test_a_time_limit_keeps_the_output_so_far() -> None:

    engine = tiny_engine()
    item = request(
        "a",
        PROMPT,
        max_tokens=400,
        ignore_eos=True,
        time_limit_seconds=0.2,
        arrived_at=time.monotonic(),
    )
    outcome = run(engine, [item], max_steps=100_000)
    assert outcome.stats["a"].finish_reason is FinishReason.TIME_LIMIT
    assert outcome.token_ids["a"] == full_output(400)[: len(outcome.token_ids["a"])]
