"""All layouts give the tokens of the target alone; they differ in what moves, not in what comes."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine import aligned_runner
from engine.audit import AuditVerdict
from engine.config import EngineConfig
from engine.engine import Engine
from engine.layout import aligned
from engine.layout.rectangle import Rectangle
from engine.request import FinishReason
from engine.stats import StepStats
from tests.engine.driver import Outcome, request, run, tiny_engine
from tests.engine.test_audit import audited_engine, findings, greedy_and_seeded
from tests.engine.test_equality import SEEDED, alone, generated, prompts
from tests.marks import thorough

LAYOUTS = ("aligned", "grouped")  # test_equality has the ragged one
DRAFTERS = (("prompt_lookup",), ("draft_model",))


def engine_with(layout: str, **options: object) -> Engine:
    return tiny_engine(layout=layout, **options)


@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
@pytest.mark.parametrize("batch_size", [thorough(1), thorough(2), thorough(5), 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_equal_generate_and_our_plain_decoding(
    layout: str, batch_size: int, drafters: tuple[str, ...]
) -> None:
    engine = engine_with(
        layout, drafters=drafters, max_num_rows=batch_size, max_step_tokens=96, max_draft_tokens=5
    )
    greedy = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    assert [greedy.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    seeded = run(
        engine,
        [request(str(n), p, max_tokens=24, sampling=SEEDED) for n, p in enumerate(prompts(8))],
    )
    assert [seeded.token_ids[str(n)] for n in range(8)] == alone(24, torch.float32, SEEDED)
    if "draft_model" in drafters:  # rows kept different numbers of tokens, so some had to move
        stats = greedy.stats.values()
        assert len({s.acceptance_histogram for s in stats}) > 1
        cache = engine._scheduler.cache
        assert (cache.num_moved_rows > 0) == (batch_size > 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cancelling_disturbs_no_neighbour_and_leaves_nothing_behind(layout: str) -> None:
    for cancelled_after in range(1, 10, 2):
        engine = engine_with(layout, drafters=("draft_model",), max_num_rows=4, max_step_tokens=32)
        outcome = Outcome()
        for number, prompt in enumerate(prompts(8)):
            engine.submit(request(str(number), prompt, max_tokens=30))
        for _ in range(cancelled_after):
            outcome.add_step(engine)
        for request_id in ("0", "3", "7"):
            engine.cancel(request_id)
        while engine.has_work():
            outcome.add_step(engine)
        for number in range(8):
            got, expected = outcome.token_ids.get(str(number), []), generated(8, 30)[number]
            is_cut = outcome.stats[str(number)].finish_reason is FinishReason.CANCELLED
            assert got == (expected[: len(got)] if is_cut else expected)
        cache = engine._scheduler.cache
        assert cache.pool.num_available == cache.pool.num_blocks
        assert not cache._rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_bf16_every_difference_is_a_tie_that_the_auditor_explains(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lean layers of so small a model keep their bits in rectangles, too.
    monkeypatch.setattr("engine.assembly.can_be_lean", lambda model: False)
    engine = audited_engine(torch.bfloat16, layout=layout)
    assert engine.info.guarantee == "rounding"
    run(engine, greedy_and_seeded())
    found = findings(engine).values()
    assert len(found) == 8
    assert AuditVerdict.DIVERGENCE not in {finding.verdict for finding in found}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_that_raises_leaves_every_row_as_it_was(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are first moved into their rectangle, then the model fails; each row is tried alone."""
    engine = engine_with(layout, drafters=("draft_model",), max_num_rows=4)
    runner = engine._verifier.runner
    model_forward = runner._forward  # type: ignore[attr-defined]
    num_failures = 0

    def failing(rows):  # type: ignore[no-untyped-def]
        nonlocal num_failures
        if len(rows) > 1 and num_failures < 3:
            num_failures += 1
            runner.cache.batch([row.row for row in rows])  # type: ignore[attr-defined]
            raise MemoryError("planted")
        return model_forward(rows)

    monkeypatch.setattr(runner, "_forward", failing)
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    assert num_failures == 3
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)


# ---- planted bugs: each has to change tokens, or the tests above could not fail -------------


def tokens_with_bug(layout: str) -> list[list[int]]:
    engine = engine_with(layout, drafters=("draft_model",), max_num_rows=4)
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    return [outcome.token_ids[str(n)] for n in range(8)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bug", ["a stale key after repadding", "positions", "a hole", "no mask"])
def test_planted_desynchronisation_changes_tokens(
    bug: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(layout, drafters=("draft_model",), max_num_rows=4)  # checked while sound
    if bug == "a stale key after repadding":
        copy = aligned.copy

        def shifted(places, shape, pad_value):  # type: ignore[no-untyped-def]
            made = copy(places, shape, pad_value)
            roll = [torch.roll(layer, 1, dims=2) for layer in made.keys]
            return Rectangle(tuple(roll), made.values, made.pads, made.num_columns)

        monkeypatch.setattr(aligned, "copy", shifted)
    else:
        arguments_of = aligned_runner.AlignedRunner._arguments

        def changed(self, rows, rectangle, width):  # type: ignore[no-untyped-def]
            arguments = arguments_of(self, rows, rectangle, width)
            if bug == "positions":
                arguments["position_ids"] += (arguments["position_ids"] > 5).long()
            elif bug == "a hole":
                for row, pad in zip(arguments["attention_mask"], rectangle.pads, strict=True):
                    row[pad + 1 : pad + 2] = 0
            else:
                arguments["attention_mask"][:] = 1
            return arguments

        monkeypatch.setattr(aligned_runner.AlignedRunner, "_arguments", changed)
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    assert [outcome.token_ids[str(n)] for n in range(8)] != generated(8, 30)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_length_that_no_forward_has_computed_is_refused(layout: str) -> None:
    """One key too many: the store notices before a token is wrong."""
    engine = engine_with(layout, max_num_rows=2)
    verify = engine._verifier.verify

    def longer(plan, proposals):  # type: ignore[no-untyped-def]
        found = verify(plan, proposals)
        outcomes = [
            replace(o, token_ids=(*o.token_ids, 5, 5), num_accepted=o.num_drafts + 1)
            for o in found.outcomes
        ]
        return replace(found, outcomes=outcomes)

    engine._verifier.verify = longer  # type: ignore[method-assign]
    engine.submit(request("a", [5, 6, 7], max_tokens=20))
    with pytest.raises(ValueError, match="computed"):
        engine.step()


def test_a_row_that_does_not_start_at_its_length_is_refused() -> None:
    engine = engine_with("aligned", max_num_rows=2)
    runner, cache = engine._verifier.runner, engine._scheduler.cache
    row, _ = cache.allocate_row([5])
    with pytest.raises(ValueError, match="starts at 3"):
        runner.forward([aligned_runner.ForwardRow(row, [5], 3, 1)])


# ---- what each layout spends ---------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ragged", *LAYOUTS])
def test_the_time_of_laying_rows_out_is_part_of_a_step(layout: str) -> None:
    engine = engine_with(layout, max_num_rows=4)
    outcome = run(engine, [request(str(n), p, max_tokens=12) for n, p in enumerate(prompts(6))])
    assert all(0 < s.align_nanoseconds < s.duration_nanoseconds for s in outcome.steps)
    for s in outcome.steps:
        parts = s.propose_nanoseconds + s.verify_nanoseconds + s.align_nanoseconds
        assert parts + s.sample_nanoseconds <= s.duration_nanoseconds


def test_a_single_row_is_never_moved() -> None:
    engine = engine_with("aligned", drafters=("draft_model",), max_num_rows=1)
    run(engine, [request("a", prompts(8)[4], max_tokens=40)])
    assert engine._scheduler.cache.num_moved_rows == 0  # type: ignore[attr-defined]


def test_grouped_rows_of_one_length_run_without_padding() -> None:
    engine = engine_with("grouped", max_num_rows=8, group_rows=4)
    items = [request(str(n), [9, 8, n + 3], max_tokens=20, mode="off") for n in range(8)]
    runner = engine._verifier.runner
    num_padding = runner.num_row_tokens - runner.num_positions
    run(engine, items)
    scheduler = engine._scheduler
    assert scheduler.num_uniform_groups == scheduler.num_groups > 0
    assert runner.num_row_tokens - runner.num_positions == num_padding


def test_no_more_rows_decode_in_a_step_than_a_group_has_and_none_starves() -> None:
    engine = engine_with("grouped", drafters=("draft_model",), max_num_rows=9, group_rows=2)
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(9))])
    assert all(sum(r.num_decode_positions for r in s.rows) <= 2 for s in outcome.steps)
    last_run: dict[str, int] = {}
    for step in outcome.steps:
        for row in step.rows:
            waited = step.step_index - last_run.get(row.request_id, step.step_index)
            assert waited <= 3 + 5  # the skips a row is allowed, and the groups of those before it
            last_run[row.request_id] = step.step_index


@pytest.mark.thorough
def test_a_finished_row_is_replaced_at_once_and_no_cache_is_thrown_away_for_the_new_one() -> None:
    engine = engine_with("grouped", max_num_rows=4, group_rows=2)
    items = [
        request(str(n), [9 + n, 8, *range(3, 4 + n)], max_tokens=4 + 3 * (n % 4), ignore_eos=True)
        for n in range(12)
    ]
    num_positions = engine._verifier.runner.num_positions
    outcome = run(engine, items)
    ended: dict[int, int] = {}
    for stats in outcome.stats.values():
        last = max(s.step_index for s in outcome.steps if _has(s, stats.request_id))
        ended[last] = ended.get(last, 0) + 1
    for before, step in itertools.pairwise(outcome.steps):
        if before.num_waiting:  # somebody was there to take the place
            assert step.num_running + ended.get(step.step_index, 0) == 4
    assert len(ended) > 3, "they ended at different times"
    # Every token was computed once: of the prompts, of the output but the newest, and the drafts.
    for stats in outcome.stats.values():
        assert stats.num_recomputed_tokens == stats.num_preemptions == 0
        assert stats.num_prefill_positions == stats.num_prompt_tokens
    computed = engine._verifier.runner.num_positions - num_positions
    rows = [row for step in outcome.steps for row in step.rows]
    assert computed == sum(row.num_positions for row in rows)
    num_decoded = sum(row.num_decode_positions + row.num_accepted_tokens for row in rows)
    num_output = sum(stats.num_output_tokens for stats in outcome.stats.values())
    num_cut = sum(stats.num_accepted_tokens - stats.num_emitted_accepted_tokens
                  + stats.num_cut_tokens for stats in outcome.stats.values())  # fmt: skip
    assert num_decoded == num_output - len(items) + num_cut


def _has(step: StepStats, request_id: str) -> bool:
    return any(row.request_id == request_id for row in step.rows)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"layout": "aligned", "kv_block_size": 16}, "kv_block_size"),
        ({"layout": "grouped", "numerics": "invariant"}, "numerics"),
        ({"layout": "ragged", "group_rows": 2}, "group_rows"),
        ({"layout": "grouped", "group_rows": 0}, "group_rows"),
        ({"layout": "grouped", "max_num_rows": 4, "group_rows": 5}, "group_rows"),
    ],
)
def test_what_a_layout_cannot_do_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        EngineConfig(target="tiny", **options)


def test_prefixes_are_not_reused_and_that_is_what_the_statistics_say() -> None:
    engine = engine_with("aligned", max_num_rows=2)
    run(engine, [request("a", [5] * 64)])
    again = run(engine, [request("b", [5] * 64)])
    assert again.stats["b"].num_cached_prompt_tokens == 0
    assert again.stats["b"].num_prefill_positions == 64
