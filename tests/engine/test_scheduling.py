"""Who runs when: budgets, order, preemption, and the reuse of prefixes."""

from collections import Counter
from functools import cache

import pytest

from engine.request import SamplingParams
from tests.engine.driver import Outcome, request, run, tiny_engine
from tests.engine.test_equality import generated, prompts

SEEDED = SamplingParams(temperature=0.9, seed=11)


def items(count: int = 8, max_tokens: int = 30, **options: object):  # type: ignore[no-untyped-def]
    return [
        request(str(n), p, max_tokens=max_tokens, **options) for n, p in enumerate(prompts(count))
    ]


@pytest.mark.parametrize("max_step_tokens", [8, 13, 64])
def test_no_step_computes_more_tokens_than_its_budget(max_step_tokens: int) -> None:
    engine = tiny_engine(drafters=("draft_model",), max_num_rows=6, max_step_tokens=max_step_tokens)
    outcome = run(engine, items())
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    assert all(sum(row.num_positions for row in s.rows) <= max_step_tokens for s in outcome.steps)


def test_a_long_prompt_does_not_stop_running_streams() -> None:
    engine = tiny_engine(max_num_rows=2, max_step_tokens=16)
    outcome = Outcome()
    engine.submit(request("short", [5, 6, 7], max_tokens=30, ignore_eos=True, mode="off"))
    outcome.add_step(engine)
    engine.submit(request("long", [9] * 200, max_tokens=4))
    before = len(outcome.token_ids["short"])
    for _ in range(10):
        outcome.add_step(engine)
    assert "long" not in outcome.token_ids
    assert len(outcome.token_ids["short"]) == before + 10


@pytest.mark.parametrize("num_blocks", [32, 40, 200])
@pytest.mark.parametrize("drafters", [("prompt_lookup",), ("draft_model",)], ids="+".join)
def test_preempted_requests_recompute_and_give_the_same_tokens(
    drafters: tuple[str, ...], num_blocks: int
) -> None:
    """Six requests grow to ten blocks each; small pools hold three or four of them."""
    engine = tiny_engine(
        drafters=drafters,
        max_num_rows=8,
        max_step_tokens=64,
        kv_block_size=16,
        kv_cache_memory=num_blocks * 16 * bytes_per_token(drafters) + 1,
    )
    assert engine._scheduler.cache.pool.num_blocks == num_blocks
    outcome = run(
        engine,
        [
            request(str(n), p, max_tokens=130, ignore_eos=True, sampling=SEEDED)
            for n, p in enumerate(prompts(6))
        ],
    )
    assert [outcome.token_ids[str(n)] for n in range(6)] == unhurried()
    num_preemptions = engine._scheduler.num_preemptions
    assert (num_preemptions > 0) == (num_blocks < 200)
    assert sum(s.num_preemptions for s in outcome.stats.values()) == num_preemptions
    assert (sum(s.num_recomputed_tokens for s in outcome.stats.values()) > 0) == (
        num_preemptions > 0
    )
    assert outcome.stats["0"].num_preemptions == 0, "the oldest keeps running"
    told = Counter(name for step in outcome.steps for name in step.preempted_request_ids)
    assert told == Counter({name: s.num_preemptions for name, s in outcome.stats.items()})


@cache
def unhurried() -> list[list[int]]:
    found = []
    for prompt in prompts(6):
        item = request("a", prompt, max_tokens=130, ignore_eos=True, sampling=SEEDED, mode="off")
        found.append(run(tiny_engine(), [item]).token_ids["a"])
    return found


def bytes_per_token(drafters: tuple[str, ...]) -> int:
    tiny = 2 * 2 * 2 * 8 * 4  # layers x key heads x (key + value) x head size x float32
    return tiny * (2 if "draft_model" in drafters else 1)


def test_the_smallest_pool_serves_every_request() -> None:
    engine = tiny_engine(
        max_num_rows=8,
        max_model_tokens=128,
        kv_block_size=16,
        kv_cache_memory=8 * 16 * bytes_per_token(()) + 1,
    )
    long_ones = [request(str(n), [3 + n] * 100, max_tokens=28, ignore_eos=True) for n in range(6)]
    outcome = run(engine, long_ones)
    assert {s.num_output_tokens for s in outcome.stats.values()} == {28}


def test_a_cache_too_small_for_one_request_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_cache_memory"):
        tiny_engine(kv_block_size=16, kv_cache_memory=5000)


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("drafters", [("prompt_lookup",), ("draft_model",)], ids="+".join)
def test_a_known_prefix_is_not_recomputed_and_changes_nothing(
    drafters: tuple[str, ...], block_size: int | None
) -> None:
    system = [(7 * n) % 300 + 3 for n in range(96)]
    asked = [[*system, *p] for p in prompts(4)]
    cold = []
    for number, prompt in enumerate(asked):
        engine = tiny_engine(drafters=drafters, kv_block_size=block_size)
        outcome = run(engine, [request(str(number), prompt, sampling=SEEDED)])
        cold.append((outcome.token_ids[str(number)], outcome.stats[str(number)]))
    engine = tiny_engine(drafters=drafters, kv_block_size=block_size)
    for number, prompt in enumerate(asked):
        outcome = run(engine, [request(str(number), prompt, sampling=SEEDED)])
        warm = outcome.stats[str(number)]
        assert outcome.token_ids[str(number)] == cold[number][0]
        assert warm.acceptance_histogram == cold[number][1].acceptance_histogram
        assert (warm.num_cached_prompt_tokens >= 96) == (number > 0)
        assert warm.num_prefill_positions == len(prompt) - warm.num_cached_prompt_tokens
        if drafters == ("draft_model",):  # its cache knows the prefix, too
            num_spared = cold[number][1].num_drafter_positions - warm.num_drafter_positions
            assert (num_spared >= 95) == (number > 0)


@pytest.mark.parametrize("block_size", [None, 16])
def test_a_running_request_lends_its_prefix(block_size: int | None) -> None:
    engine = tiny_engine(kv_block_size=block_size)
    shared = [(7 * n) % 300 + 3 for n in range(64)]
    outcome = Outcome()
    engine.submit(request("first", [*shared, 9], max_tokens=40, ignore_eos=True))
    outcome.add_step(engine)
    engine.submit(request("second", [*shared, 8], max_tokens=5))
    while engine.has_work():
        outcome.add_step(engine)
    assert outcome.stats["second"].num_cached_prompt_tokens == 64
    fresh = run(tiny_engine(), [request("second", [*shared, 8], max_tokens=5)])
    assert outcome.token_ids["second"] == fresh.token_ids["second"]


@pytest.mark.parametrize("block_size", [None, 16])
def test_prefixes_are_not_shared_between_tenants(block_size: int | None) -> None:
    engine = tiny_engine(kv_block_size=block_size)
    prompt = [5] * 64
    run(engine, [request("a", prompt, tenant="red")])
    other = run(engine, [request("b", prompt, tenant="blue")])
    same = run(engine, [request("c", prompt, tenant="red")])
    assert other.stats["b"].num_cached_prompt_tokens == 0
    assert same.stats["c"].num_cached_prompt_tokens > 0


def first_steps(outcome: Outcome) -> dict[str, int]:
    found: dict[str, int] = {}
    for step in outcome.steps:
        for row in step.rows:
            found.setdefault(row.request_id, step.step_index)
    return found


def test_a_higher_priority_is_admitted_earlier() -> None:
    engine = tiny_engine(max_num_rows=1)
    outcome = run(
        engine,
        [
            request("low", [5], priority=-5, arrived_at=1000.0),
            request("middle", [5], arrived_at=1000.0),
            request("high", [5], priority=5, arrived_at=1000.0),
        ],
    )
    first = first_steps(outcome)
    assert first["high"] < first["middle"] < first["low"]


def test_waiting_raises_a_priority() -> None:
    engine = tiny_engine(max_num_rows=1)
    scheduler = engine._scheduler
    engine.submit(request("old", [5], priority=0, arrived_at=0.0))
    engine.submit(request("new", [5], priority=5, arrived_at=100.0))
    plan = scheduler.schedule(100.0, {})
    assert [row.live.request_id for row in plan] == ["old"]


def test_a_tenant_with_many_requests_does_not_keep_out_another() -> None:
    engine = tiny_engine(max_num_rows=3)
    crowd = [request(f"crowd{n}", [5], tenant="crowd", arrived_at=1.0) for n in range(10)]
    outcome = run(engine, [*crowd, request("single", [5], tenant="other", arrived_at=1.0)])
    first = first_steps(outcome)
    assert first["single"] <= sorted(first[f"crowd{n}"] for n in range(10))[1]


def test_speculation_off_never_calls_a_drafter() -> None:
    engine = tiny_engine(drafters=("draft_model",))
    drafter = engine._drafters._drafters[0]
    before = drafter.runner.num_forwards
    outcome = run(engine, items(mode="off"))
    assert drafter.runner.num_forwards == before
    assert all(s.num_draft_tokens == 0 and s.drafter == "" for s in outcome.stats.values())


def test_a_requests_own_limit_of_drafts_is_kept() -> None:
    engine = tiny_engine(drafters=("draft_model",), max_draft_tokens=8)
    outcome = run(
        engine,
        [request(str(n), p, max_draft_tokens=n) for n, p in enumerate(prompts(4))],
    )
    for number in range(4):
        assert len(outcome.stats[str(number)].drafted_per_position) <= number
