"""What goes wrong in one request ends that request and touches no other."""

import pytest
import torch

from engine.request import FinishReason, RequestError, SamplingParams
from engine.sampler import Sampler
from tests.engine.driver import Outcome, request, run, tiny_engine
from tests.engine.test_equality import generated, prompts
from tests.marks import thorough
from tests.tiny import EOS_TOKEN_ID

BAD_TOKEN_ID = 319


def requests_with(count: int = 8, max_tokens: int = 30):  # type: ignore[no-untyped-def]
    return [request(str(n), p, max_tokens=max_tokens) for n, p in enumerate(prompts(count))]


def test_non_finite_logits_end_only_the_request_that_has_them() -> None:
    engine = tiny_engine(max_num_rows=4)
    runner = engine._verifier.runner
    embedding = runner.model.get_input_embeddings()
    clean = embedding.weight[BAD_TOKEN_ID].clone()
    items = requests_with()
    bad = request("bad", [5, 6, BAD_TOKEN_ID, 7])
    embedding.weight[BAD_TOKEN_ID] = float("nan")
    items = [i for i in items if BAD_TOKEN_ID not in i.prompt_token_ids]
    try:
        outcome = run(engine, [items[0], bad, *items[1:]])
    finally:
        embedding.weight[BAD_TOKEN_ID] = clean
    assert outcome.stats["bad"].finish_reason is FinishReason.ERROR
    assert "not finite" in (outcome.stats["bad"].error or "")
    for item in items:
        number = int(item.request_id)
        expected = generated(8, 30)[number]
        if BAD_TOKEN_ID not in expected:
            assert outcome.token_ids[item.request_id] == expected
    # The place where NaN was computed serves the next request as if nothing had been there.
    again = run(engine, [request("again", prompts(8)[3], max_tokens=30)])
    assert again.token_ids["again"] == generated(8, 30)[3]


def test_a_forward_that_raises_for_one_row_ends_that_row_alone() -> None:
    engine = tiny_engine(max_num_rows=4)
    runner = engine._verifier.runner
    forward = runner.forward

    def failing(rows):  # type: ignore[no-untyped-def]
        if any(BAD_TOKEN_ID in row.token_ids for row in rows):
            raise MemoryError("planted")
        return forward(rows)

    runner.forward = failing  # type: ignore[method-assign]
    items = [i for i in requests_with() if BAD_TOKEN_ID not in i.prompt_token_ids]
    outcome = run(engine, [*items, request("bad", [5, BAD_TOKEN_ID])])
    assert outcome.stats["bad"].finish_reason is FinishReason.ERROR
    for item in items:
        expected = generated(8, 30)[int(item.request_id)]
        if BAD_TOKEN_ID not in expected:
            assert outcome.token_ids[item.request_id] == expected


def test_a_draw_that_raises_for_one_row_ends_that_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory behind the forward; logprobs of prompts were booked by then."""
    engine = tiny_engine(max_num_rows=4)
    draw = engine._verifier.sampler.draw

    def failing(self, logits, rows, streams=None):  # type: ignore[no-untyped-def]
        if any(row.params.seed == 13 for row in rows):
            raise torch.OutOfMemoryError("planted")
        return draw(logits, rows, streams)

    monkeypatch.setattr(Sampler, "draw", failing)
    with_logprobs = SamplingParams(temperature=0, num_top_logprobs=0, prompt_logprobs=True)
    items = [
        request(str(n), p, max_tokens=30, sampling=with_logprobs) for n, p in enumerate(prompts(8))
    ]
    bad = request("bad", [5, 6], sampling=SamplingParams(seed=13))
    outcome = run(engine, [items[0], bad, *items[1:]])
    assert outcome.stats["bad"].finish_reason is FinishReason.ERROR
    assert "planted" in (outcome.stats["bad"].error or "")
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    for number, prompt in enumerate(prompts(8)):
        first = next(d for d in outcome.deltas if d.request_id == str(number))
        assert [item.token_id for item in first.prompt_logprobs] == prompt[1:]


def test_a_drafter_that_raises_is_switched_off_and_costs_no_request() -> None:
    engine = tiny_engine(drafters=("draft_model", "prompt_lookup"), max_num_rows=4)
    drafter = engine._drafters._drafters[0]
    calls = 0

    def failing(rows):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        raise RuntimeError("planted")

    drafter.runner.forward = failing
    outcome = run(engine, requests_with())
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    assert calls == 1
    assert "planted" in engine._drafters.failures["draft_model"]


def test_garbage_drafts_change_nothing() -> None:
    engine = tiny_engine(drafters=("draft_model",), max_num_rows=4)
    drafter = engine._drafters._drafters[0]
    with torch.no_grad():
        for parameter in drafter.runner.model.parameters():
            parameter.mul_(-3)
    outcome = run(engine, requests_with())
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)


@pytest.mark.parametrize("block_size", [thorough(None), 16])
def test_cancelling_frees_the_row_within_one_step_and_disturbs_no_neighbour(
    block_size: int | None,
) -> None:
    for cancelled_after in range(0, 12, 2):
        engine = tiny_engine(
            drafters=("draft_model",),
            max_num_rows=4,
            max_step_tokens=32,
            kv_block_size=block_size,
        )
        outcome = Outcome()
        for item in requests_with():
            engine.submit(item)
        for _ in range(cancelled_after):
            outcome.add_step(engine)
        for request_id in ("0", "3", "7"):
            engine.cancel(request_id)
            engine.cancel(request_id)
        engine.cancel("unknown")
        outcome.add_step(engine)
        assert not {"0", "3", "7"} & set(engine._scheduler.running)
        while engine.has_work():
            outcome.add_step(engine)
        for number in range(8):
            stats = outcome.stats[str(number)]
            expected = generated(8, 30)[number]
            if stats.finish_reason is FinishReason.CANCELLED:
                got = outcome.token_ids[str(number)]
                assert got == expected[: len(got)]
            else:
                assert outcome.token_ids[str(number)] == expected
        pool = engine._scheduler.cache.pool
        assert pool.num_available == pool.num_blocks
        assert engine._scheduler.cache.num_free_rows == 4


@pytest.mark.thorough
def test_a_thousand_requests_leave_nothing_behind() -> None:
    engine = tiny_engine(drafters=("draft_model",), max_num_rows=8, kv_block_size=16)
    outcome = run(
        engine,
        [request(str(n), [3 + n % 300, 4, 5], max_tokens=2) for n in range(1000)],
        max_steps=5000,
    )
    assert len(outcome.stats) == 1000
    drafter = engine._drafters._drafters[0]
    for cache in (engine._scheduler.cache, drafter.cache):
        assert cache.num_free_rows == 8
        assert cache.pool.num_available == cache.pool.num_blocks
    assert not drafter._places
    assert not engine._lengths._estimates


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": [5, 320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"stop_token_ids": (9999,)}, "stopping.stop_token_ids"),
        ({"sampling": SamplingParams(banned_token_ids=(320,))}, "sampling.banned_token_ids"),
        ({"sampling": SamplingParams(logit_bias=((777, 1.0),))}, "sampling.logit_bias"),
        ({"drafter": "oracle"}, "speculation.drafter"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_by_name_before_the_step_loop(
    options: dict, field: str
) -> None:
    engine = tiny_engine()
    prompt = options.pop("prompt", [5, 6])
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", prompt, **options))
    assert caught.value.field == field
    assert not engine.has_work()


def test_a_request_id_that_runs_already_is_refused() -> None:
    engine = tiny_engine()
    engine.submit(request("a", [5, 6]))
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", [5, 6]))
    assert caught.value.field == "request_id"


def test_a_position_where_nothing_may_be_drawn_ends_in_an_error_and_not_in_a_token() -> None:
    engine = tiny_engine()
    sampling = SamplingParams(temperature=0, allowed_token_ids=(EOS_TOKEN_ID,))
    stuck = request("a", [5, 6], sampling=sampling, min_tokens=3)
    outcome = run(engine, [stuck, request("b", [5, 6])])
    assert outcome.stats["a"].finish_reason is FinishReason.ERROR
    assert outcome.stats["b"].finish_reason is not FinishReason.ERROR
