"""A replay of what finished measures a head exactly, and no request sees anything of it."""

from pathlib import Path

import pytest

from engine.config import HeadSource, ShadowPlan
from engine.engine import Engine
from engine.request import AcceptanceRule, SamplingParams
from engine.shadow import ShadowFinding
from tests.engine.driver import GREEDY, Outcome, request, run, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.engine.head.test_head_drafter import PROMPTS, head_engine

pytestmark = pytest.mark.thorough

PENALISED = SamplingParams(temperature=0.7, seed=3, presence_penalty=0.5, top_k=40)


def _measured(engine: Engine, max_slices: int = 2000) -> list[ShadowFinding]:
    found: list[ShadowFinding] = []
    for _ in range(max_slices):
        part = engine.shadow_next()
        if part is None:
            return found
        found.extend(part)
    raise AssertionError("the replays do not end")


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=5), PENALISED])
@pytest.mark.parametrize("block_size", [None, 8])
def test_a_replay_counts_what_the_head_got_accepted_when_it_drafted_itself(
    tmp_path: Path, sampling: SamplingParams, block_size: int | None
) -> None:
    engine = head_engine(tmp_path, kv_block_size=block_size)
    engine.shadow([ShadowPlan(("head",), 1.0)])
    asked = [request(str(i), p, max_tokens=40, sampling=sampling) for i, p in enumerate(PROMPTS)]
    outcome = run(engine, asked)
    found = {finding.request_id: finding for finding in _measured(engine)}
    assert found.keys() == outcome.stats.keys()
    for request_id, stats in outcome.stats.items():
        finding = found[request_id]
        # The live rounds' first token comes from the prefill.
        rounds = stats.num_plain_steps + stats.num_verify_steps - 1
        assert finding.num_rounds == rounds
        assert finding.num_accepted_tokens == stats.num_emitted_accepted_tokens
    assert sum(f.num_accepted_tokens for f in found.values()) > 0, "nothing was compared"
    engine.check_integrity()


def test_a_head_that_drafts_for_nobody_is_measured_beside_the_one_that_does(
    tmp_path: Path,
) -> None:
    engine = head_engine(tmp_path)
    other = save_tiny_head(tmp_path / "other", tiny_head(deep_tiny_llama(), draft_vocab_size=100))
    engine.add_drafter(engine.load_head(HeadSource("chat@0002", str(other))))
    engine.shadow([ShadowPlan(("head:chat@0002", "head"), 1.0)])
    asked = [request(str(i), p, max_tokens=40) for i, p in enumerate(PROMPTS)]
    outcome = run(engine, asked)
    assert {stats.drafter for stats in outcome.stats.values()} == {"head"}
    found = _measured(engine)
    found.sort(key=lambda finding: finding.request_id)  # stable: the heads in the plan's order
    assert [(f.request_id, f.drafter) for f in found] == [
        (str(i), name) for i in range(4) for name in ("head:chat@0002", "head")
    ]
    named = run(
        head_engine(tmp_path, tiny_head(deep_tiny_llama(), draft_vocab_size=100)), asked
    ).stats
    for finding in found[::2]:
        assert finding.num_accepted_tokens == named[finding.request_id].num_emitted_accepted_tokens


def test_steps_put_a_replay_aside_and_it_ends_the_same(tmp_path: Path) -> None:
    first = [request(str(i), p, max_tokens=40) for i, p in enumerate(PROMPTS)]
    engine, calm = head_engine(tmp_path, max_num_rows=1), head_engine(tmp_path)
    for each in (engine, calm):
        each.shadow([ShadowPlan(("head",), 1.0)])
    run(calm, first)
    expected = _measured(calm)
    run(engine, first)
    found: list[ShadowFinding] = []
    plain = tiny_engine(target=deep_tiny_llama(), drafters=())
    for index in range(6):
        for _ in range(3 + index):
            found.extend(engine.shadow_next() or ())
        engine.shadow([])  # what comes now is not measured
        late = [request(f"late{index}", PROMPTS[index % 4], max_tokens=6)]
        outcome = run(engine, late)  # checks the integrity after every step
        assert outcome.token_ids == run(plain, late).token_ids
        assert outcome.stats[f"late{index}"].num_draft_tokens > 0, "the row was not given back"
    found.extend(_measured(engine))
    counts = {f.request_id: (f.num_rounds, f.num_accepted_tokens) for f in found}
    assert counts == {f.request_id: (f.num_rounds, f.num_accepted_tokens) for f in expected}


def test_what_is_not_measured_is_counted(tmp_path: Path) -> None:
    engine = head_engine(tmp_path)
    engine.shadow([ShadowPlan(("head",), 1.0)])
    engine._idle._shadow.queue._max_jobs = 2
    by_rejection = SamplingParams(temperature=0.8, seed=1, acceptance_rule=AcceptanceRule.REJECTION)
    run(engine, [request("x", PROMPTS[0], sampling=by_rejection)])
    run(engine, [request(str(i), p) for i, p in enumerate(PROMPTS)])
    found = _measured(engine)
    assert [f.num_given_up for f in found] == [3, 0]


def test_a_share_is_drawn_by_the_requests_ids_alone(tmp_path: Path) -> None:
    engine = head_engine(tmp_path, max_num_rows=8)
    engine.shadow([ShadowPlan(("head",), 0.3)])
    chosen = []
    for part in range(4):
        asked = [request(f"r{part * 16 + i}", PROMPTS[i % 4], max_tokens=3) for i in range(16)]
        run(engine, asked)
        chosen.append([f.request_id for f in _measured(engine)])
    run(engine, [request(f"r{i}", PROMPTS[i % 4], max_tokens=3) for i in range(16)])
    assert sorted(f.request_id for f in _measured(engine)) == sorted(chosen[0])
    assert 8 <= sum(map(len, chosen)) <= 32


def test_a_head_that_goes_takes_its_replay_with_it(tmp_path: Path) -> None:
    engine = head_engine(tmp_path)
    engine.shadow([ShadowPlan(("head",), 1.0)])
    run(engine, [request(str(i), p) for i, p in enumerate(PROMPTS)])
    assert engine.shadow_next() == ()  # a first slice: the replay is under way
    shadow = engine._idle._shadow
    replay, find = shadow._replay, shadow._find
    shadow._find = lambda name: None
    assert engine.shadow_next() is None
    assert shadow._replay is None is not replay
    shadow._find = find
    engine.shadow([ShadowPlan(("head",), 1.0)])
    run(engine, [request("later", PROMPTS[0])])
    (found,) = _measured(engine)
    assert found.num_given_up == len(PROMPTS)


def test_a_replay_that_fails_costs_its_finding_alone(tmp_path: Path) -> None:
    engine = head_engine(tmp_path)
    engine.shadow([ShadowPlan(("head",), 1.0)])
    run(engine, [request(str(i), p) for i, p in enumerate(PROMPTS)])
    engine._parts.roster.head("head").drafter._tap._states = _Broken()  # type: ignore[union-attr]
    assert _measured(engine) == []
    engine.check_integrity()
    outcome = Outcome()
    engine.shadow([])
    engine._parts.roster.head("head").drafter._tap._states = {}  # type: ignore[union-attr]
    engine.submit(request("after", PROMPTS[0]))
    while engine.has_work():
        outcome.add_step(engine)
    assert outcome.stats["after"].num_draft_tokens > 0


class _Broken(dict[int, object]):
    def __setitem__(self, key: int, value: object) -> None:
        raise RuntimeError("planted")
