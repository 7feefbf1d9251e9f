"""Forwards in buckets: a few shapes, the same tokens, and nothing but the scratch block written
by what fills them up. Without graphs on a CPU; what a graph adds is replayed by a stand-in that,
as a graph does, computes from the same memory and knows nothing of the step."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bucketed_forward import MAX_RECORDED, BucketedForward, Compute, Computed
from engine.graphs import try_recorder, use_graphs
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.buckets import choose_bucket, lay_out
from engine.layout.plan import INVARIANT_PADDING, MAX_SHARED_WIDTH, NO_PADDING, ForwardRow
from engine.model_runner import ModelRunner
from engine.request import SamplingParams
from tests.engine.driver import request, run, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.engine.test_equality import prompts
from tests.tiny import tiny_llama

SAMPLINGS = (SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=30, seed=7))


def runner_of(engine: object) -> ModelRunner:
    runner = engine._verifier.runner  # type: ignore[attr-defined]
    assert isinstance(runner, ModelRunner)
    return runner


class Replayed:
    """Computes into the memory of the first time, as a graph does."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, compute: Compute) -> Compute:
        written = compute()

        def replay() -> Computed:
            self.num_replays += 1
            again = compute()
            written.logits.copy_(again.logits)
            for layer, states in again.states.items():
                written.states[layer].copy_(states)
            return written

        return replay


class NeverAgain:
    def record(self, compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing")


def cache_of(num_rows: int, num_blocks: int, max_tokens: int = 2048) -> KVCache:
    shape = KVCacheShape(1, 1, 2, 2, torch.float32, torch.device("cpu"))
    return KVCache(
        shape, max_num_rows=num_rows, max_tokens=max_tokens, num_blocks=num_blocks, block_size=16
    )


@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 20)), min_size=1, max_size=40),
    st.sampled_from([NO_PADDING, INVARIANT_PADDING]),
)
@settings(deadline=None)
def test_a_bucket_holds_its_rows_and_wastes_little(rows, padding) -> None:  # type: ignore[no-untyped-def]
    cache = cache_of(40, 130)
    asked = [ForwardRow(n, [1] * count, start, count) for n, (start, count) in enumerate(rows)]
    bucket = choose_bucket(asked, cache, padding)
    num_asked = sum(count for _, count in rows)
    if bucket is None:
        widest = max(count for _, count in rows)
        assert widest > MAX_SHARED_WIDTH or widest * len(rows) * 2 > num_asked
        return
    assert bucket.num_rows >= len(rows)
    assert bucket.width == max(count for _, count in rows)
    assert max(start + count for start, count in rows) <= bucket.num_keys <= 2304
    assert bucket.num_tokens % padding.tokens == 0
    assert bucket.num_tokens <= max(64, 2 * num_asked)


def test_a_server_meets_few_buckets() -> None:
    cache = cache_of(64, 2048, 16384)
    found = {
        choose_bucket([ForwardRow(0, [1], start, 1)] * count, cache, INVARIANT_PADDING)
        for count in range(1, 65)
        for start in range(0, 16000, 50)
    }
    assert len(found) <= 11 * 15


@given(st.data())
@settings(deadline=None)
def test_what_fills_a_bucket_up_touches_the_scratch_block_alone(data: st.DataObject) -> None:
    cache = cache_of(6, 40, 256)
    rows: list[ForwardRow] = []
    for _ in range(data.draw(st.integers(1, 5))):
        start, count = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 5))
        row, _ = cache.allocate_row([1] * (start + count))
        cache.reserve(row, start + count)
        rows.append(ForwardRow(row, [7] * count, start, data.draw(st.integers(0, count))))
    bucket = choose_bucket(rows, cache, INVARIANT_PADDING)
    assert bucket is not None
    numbers, places, wanted = lay_out(rows, cache, bucket)
    assert len(numbers) == bucket.num_numbers(16)
    size = bucket.num_tokens
    slots, key_blocks = numbers[2 * size : 3 * size], numbers[3 * size :]
    real = [slot for r in rows for slot in cache.slots(r.row, r.start, r.start + len(r.token_ids))]
    assert [slots[place] for place in places] == real
    assert {slots[n] for n in range(size) if n not in places} <= {cache.scratch_block * 16}
    assert len(wanted) == sum(row.num_logits for row in rows)
    per_row = len(key_blocks) // bucket.num_rows
    for at in range(bucket.num_rows):
        read = set(key_blocks[at * per_row : (at + 1) * per_row])
        own = set(cache.block_table(rows[at].row)) if at < len(rows) else {cache.scratch_block}
        assert read <= own, "a row reads its own blocks, one that fills up the scratch block"
    assert cache.scratch_block not in {b for r in rows for b in cache.block_table(r.row)}


@pytest.mark.parametrize("drafters", [("prompt_lookup",), ("draft_model",)], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tokens_are_those_without_buckets(dtype: torch.dtype, drafters: tuple[str, ...]) -> None:
    found = []
    for graphs in ("off", "bucketed"):
        engine = tiny_engine(
            dtype=dtype, drafters=drafters, max_num_rows=5, kv_block_size=16, graphs=graphs
        )
        assert engine.info.guarantee == "bit_exact"
        asked = [
            request(str(n), p, max_tokens=20, sampling=SAMPLINGS[n % 2])
            for n, p in enumerate(prompts(8))
        ]
        outcome = run(engine, asked)
        found.append(outcome.token_ids)
        assert all(0 < s.align_nanoseconds < s.duration_nanoseconds for s in outcome.steps)
        assert (runner_of(engine).buckets is not None) == (graphs == "bucketed")
    assert found[0] == found[1]


@pytest.mark.parametrize("num_blocks", [34, 200])
def test_replayed_forwards_write_and_read_what_belongs_to_the_step(num_blocks: int) -> None:
    """Rows come, leave and are preempted, so that slots change owners between two replays."""
    bytes_per_token = 2 * 2 * 2 * 8 * 4
    found = []
    for is_replayed in (False, True):
        engine = tiny_engine(
            max_num_rows=5,
            kv_block_size=16,
            kv_cache_memory=num_blocks * 16 * bytes_per_token + 1,
        )
        recorder = Replayed()
        if is_replayed:
            runner_of(engine).use_buckets(recorder)
        asked = [
            request(str(n), p, max_tokens=90, ignore_eos=True, sampling=SAMPLINGS[n % 2])
            for n, p in enumerate(prompts(8))
        ]
        outcome = run(engine, asked)
        found.append(outcome.token_ids)
        assert (recorder.num_replays > 50) == is_replayed
        assert (engine._scheduler.num_preemptions > 0) == (num_blocks == 34)
    assert found[0] == found[1]


def test_numbers_of_an_earlier_step_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a bucket is recorded, and so computed, before the step's numbers arrive."""

    def stale(self: BucketedForward, rows: Sequence[ForwardRow], bucket: object) -> torch.Tensor:
        entry = self._entry(bucket)  # type: ignore[arg-type]
        if entry.num_runs:
            entry.run()
        return forward(self, rows, bucket)  # type: ignore[arg-type]

    forward = BucketedForward.forward
    plain = tiny_engine(max_num_rows=3, kv_block_size=16)
    engine = tiny_engine(max_num_rows=3, kv_block_size=16, graphs="bucketed")
    monkeypatch.setattr(BucketedForward, "forward", stale)
    asked = [
        request(str(n), p, max_tokens=n % 5 * 9 + 4, ignore_eos=True)
        for n, p in enumerate(prompts(24))
    ]
    assert run(engine, asked).token_ids != run(plain, asked).token_ids


def test_a_head_hears_of_the_rows_tokens_alone(tmp_path: Path) -> None:
    save_tiny_head(tmp_path, tiny_head(deep_tiny_llama()))
    found = []
    for is_replayed in (False, True):
        engine = tiny_engine(
            target=deep_tiny_llama(),
            drafters=("head",),
            head=str(tmp_path),
            max_num_rows=3,
            kv_block_size=16,
        )
        if is_replayed:
            runner_of(engine).use_buckets(Replayed())
        outcome = run(engine, [request(str(n), p, max_tokens=20) for n, p in enumerate(prompts(5))])
        histograms = {name: s.acceptance_histogram for name, s in outcome.stats.items()}
        found.append((outcome.token_ids, histograms))
        assert sum(s.num_draft_tokens for s in outcome.stats.values()) > 0
    assert found[0] == found[1], "what is drafted depends on the states that were heard"


def test_where_nothing_can_be_recorded_buckets_go_on_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = tiny_engine(max_num_rows=3, kv_block_size=16)
    runner_of(engine).use_buckets(NeverAgain())
    expected = run(tiny_engine(max_num_rows=3), [request("a", prompts(1)[0])])
    assert run(engine, [request("a", prompts(1)[0])]).token_ids == expected.token_ids
    buckets = runner_of(engine).buckets
    assert buckets is not None
    assert (buckets.is_recording, buckets.num_recorded) == (False, 0)
    assert caplog.text.count("cannot be a CUDA graph") == 1


def test_graphs_that_change_logits_stay_off(caplog: pytest.LogCaptureFixture) -> None:
    class Frozen:
        """Never computes again: every replay gives the logits of the first."""

        def record(self, compute: Compute) -> Compute:
            computed = compute()
            return lambda: computed

    engine = tiny_engine(max_num_rows=3, kv_block_size=16)
    runner = runner_of(engine)
    try_recorder(runner, Frozen())
    assert runner.buckets is None
    assert "they stay off" in caplog.text
    try_recorder(runner, Replayed())
    assert runner.buckets is not None
    engine.check_integrity()


def test_buckets_used_longest_ago_give_way() -> None:
    engine = tiny_engine(max_num_rows=2, kv_block_size=16, graphs="bucketed")
    buckets = runner_of(engine).buckets
    assert buckets is not None
    bucket = buckets.choose([ForwardRow(0, [1], 0, 1)])
    assert bucket is not None
    for num_keys in range(2 * MAX_RECORDED):
        buckets._entry(type(bucket)(1, 1, num_keys + 1))
    assert len(buckets._entries) == MAX_RECORDED


def test_where_there_are_no_small_blocks_buckets_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="graphs"):
        tiny_engine(graphs="bucketed")
    with pytest.raises(ValueError, match="graphs"):
        tiny_engine(graphs="bucketed", layout="aligned")
    engine = tiny_engine(target=tiny_llama(), kv_block_size=16)
    use_graphs(runner_of(engine), "auto")
    assert runner_of(engine).buckets is None, "there is no CUDA here"
