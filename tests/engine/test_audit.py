"""The auditor finds every planted desynchronisation, calls none a tie, and accuses nobody else."""

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from engine import model_runner
from engine.audit import AuditFinding, AuditJob, Auditor, AuditQueue, AuditVerdict
from engine.breaker import BreakerState, SpeculationBreaker
from engine.config import AuditConfig
from engine.engine import Engine
from engine.planned_attention import PlannedAttention
from engine.request import (
    AcceptanceRule,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StructuredOutput,
    StructuredOutputKind,
)
from tests.engine.driver import GREEDY, Outcome, request, run, tiny_engine
from tests.engine.test_equality import prompts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEEDED = SamplingParams(temperature=0.8, seed=3)


def audited_engine(dtype: torch.dtype = torch.float32, **options: object) -> Engine:
    return tiny_engine(
        dtype=dtype,
        drafters=("draft_model",),
        max_num_rows=4,
        max_step_tokens=64,
        audit=AuditConfig(share=1.0),
        **options,
    )


def findings(engine: Engine) -> dict[str, AuditFinding]:
    found: dict[str, AuditFinding] = {}
    while (finding := engine.audit_next()) is not None:
        found[finding.request_id] = finding
    return found


def greedy_and_seeded() -> list[GenerationRequest]:
    return [
        request(str(n), p, max_tokens=24, sampling=SEEDED if n % 2 else GREEDY)
        for n, p in enumerate(prompts(8))
    ]


@cache
def sound_outputs(dtype: torch.dtype) -> dict[str, list[int]]:
    return run(audited_engine(dtype), greedy_and_seeded()).token_ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_requests_of_every_kind_are_exact_or_explained_ties(dtype: str) -> None:
    engine = audited_engine(DTYPES[dtype])
    by_rejection = AcceptanceRule.REJECTION
    kinds = [
        GREEDY,
        SEEDED,
        SamplingParams(temperature=1.2, seed=4, top_k=20, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5),
        SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.8, min_p=0.02),
        SamplingParams(temperature=0.9, seed=6, acceptance_rule=by_rejection),
        SamplingParams(temperature=0.9, seed=7, acceptance_rule=by_rejection, top_k=8),
        SamplingParams(temperature=0, logit_bias=((9, 2.0),), banned_token_ids=(5, 6)),
    ]
    regex = StructuredOutput(StructuredOutputKind.REGEX, "[a-f]{3,30}")
    items = [
        request(
            f"{n}-{m}", prompt, max_tokens=80 if n == 0 else 20, sampling=sampling, min_tokens=m
        )
        for n, sampling in enumerate(kinds)
        for m, prompt in enumerate(prompts(8)[:4])
    ]
    items += [
        request("regex", prompts(8)[0], sampling=SEEDED, structured_output=regex),
        request("stop", prompts(8)[3], stop_strings=("a", "e"), max_tokens=40),
    ]
    run(engine, items)
    found = findings(engine)
    assert len(found) == len(items)
    assert {f.verdict for f in found.values()} <= {AuditVerdict.EXACT, AuditVerdict.NUMERIC_TIE}
    num_exact = sum(f.verdict is AuditVerdict.EXACT for f in found.values())
    assert num_exact >= 0.9 * len(found)
    assert engine.breaker.num_trips == 0


@cache
def edge_auditor() -> Auditor:
    auditor = tiny_engine(max_num_rows=1)._parts.auditor
    auditor._epsilon, auditor._is_bit_exact = 0.01, False
    return auditor


def edge_finding(below: float, sampling: SamplingParams, emitted: int, swap: bool = False):  # type: ignore[no-untyped-def]
    """The audit of one token where top_k = 2 keeps tokens 5 and 6, and 7 misses it by `below`."""
    auditor = edge_auditor()
    logits = torch.full((1, 320), -10.0)
    logits[0, [5, 6, 7]] = torch.tensor([3.0, 2.0, 2.0 - below])
    if swap:
        logits[0, [6, 7]] = logits[0, [7, 6]]
    reading = SimpleNamespace(read=lambda token_ids, num_logits: logits.clone())
    auditor._runner.own_reading = lambda *, is_whole: reading
    return auditor.audit(AuditJob(request("a", [9], sampling=sampling), (emitted,)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_epsilon_is_more_than_rounding_moves_a_logit(dtype: str) -> None:
    """Of sequences of many lengths: kernels, and so roundings, change with the length."""
    auditor = audited_engine(DTYPES[dtype])._parts.auditor
    for length in (2, 5, 9, 16, 33, 70, 100):
        token_ids = [3 + (n * 31 + length) % 200 for n in range(length)]
        own = auditor._read(auditor._own_reading(), token_ids)
        ours = auditor._read(auditor._runner.fresh_reading(length), token_ids)
        assert (own.float() - ours.float()).abs().max().item() < auditor.epsilon


def test_a_token_at_the_edge_of_a_filter_is_a_tie_and_one_beyond_it_is_not() -> None:
    by_rejection = SamplingParams(
        temperature=1, top_k=2, seed=1, acceptance_rule=AcceptanceRule.REJECTION
    )
    assert edge_finding(0.005, by_rejection, 7).verdict is AuditVerdict.NUMERIC_TIE
    assert edge_finding(0.1, by_rejection, 7).verdict is AuditVerdict.DIVERGENCE
    # Coupled: some seeds draw 7 as soon as it is kept instead of 6, the others draw 5 anyway.
    found, swapped = set(), set()
    for seed in range(40):
        coupled = SamplingParams(temperature=1, top_k=2, seed=seed)
        assert edge_finding(0.1, coupled, 7).verdict is AuditVerdict.DIVERGENCE
        found.add(edge_finding(0.005, coupled, 7).verdict)
        # The other way round: 7 is kept by the target and 6 by what emitted the token.
        swapped.add(edge_finding(0.005, coupled, 6, swap=True).verdict)
    assert found == swapped == {AuditVerdict.NUMERIC_TIE, AuditVerdict.DIVERGENCE}


def shift_positions(plan):  # type: ignore[no-untyped-def]
    return replace(plan, position_ids=plan.position_ids + (plan.position_ids > 20).long())


def swap_neighbours(plan):  # type: ignore[no-untyped-def]
    slots = plan.slots.clone()
    if plan.num_tokens > 6:
        slots[0], slots[-1] = plan.slots[-1].item(), plan.slots[0].item()
    return replace(plan, slots=slots)


def keep_stale_key(plan):  # type: ignore[no-untyped-def]
    """The second token of every forward is written where nobody looks."""
    slots = plan.slots.clone()
    if plan.num_tokens > 1:
        slots[1] = slots[0]
    return replace(plan, slots=slots)


PLANS: dict[str, Callable[[object], object]] = {
    "position off by one": shift_positions,
    "a neighbour's slot": swap_neighbours,
    "a stale key": keep_stale_key,
}


def plant_mask(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[torch.Tensor, object], torch.Tensor],
) -> None:
    """In serving alone: the audit computes in a cache of its own."""
    mask = PlannedAttention._mask
    cache = engine._verifier.runner.cache

    def changed(self, index, group, *rest):  # type: ignore[no-untyped-def]
        found = mask(self, index, group, *rest)
        return change(found.clone(), group) if self._cache is cache else found

    monkeypatch.setattr(PlannedAttention, "_mask", changed)


def hole(mask: torch.Tensor, group: object) -> torch.Tensor:
    mask[:, :, :, 2] = float("-inf")
    mask[:, :, :, 0] = 0
    return mask


def one_too_long(mask: torch.Tensor, group: object) -> torch.Tensor:
    visible = mask == 0
    later = torch.roll(visible, 1, dims=-1)
    later[..., 0] = True
    return mask.masked_fill(later, 0.0)


def plant_draft_bonus(engine: Engine) -> None:
    verifier = engine._verifier
    verify = verifier.verify

    def changed(plan, proposals):  # type: ignore[no-untyped-def]
        verification = verify(plan, proposals)
        outcomes = [
            replace(o, token_ids=(*o.token_ids[:-1], (o.token_ids[-1] + 1) % 300 + 3))
            if o.num_drafts and o.num_accepted == o.num_drafts
            else o
            for o in verification.outcomes
        ]
        return replace(verification, outcomes=outcomes)

    verifier.verify = changed  # type: ignore[method-assign]


def check_all_found(engine: Engine, dtype: torch.dtype) -> None:
    outcome = run(engine, greedy_and_seeded())
    if engine._verifier.runner is not engine._parts.auditor._runner:
        raise AssertionError("the auditor must run on the engine's own model")
    found = findings(engine)
    sound = sound_outputs(dtype)
    wrong = {n for n in sound if outcome.token_ids[n] != sound[n]}
    assert wrong, "the planted bug changed nothing"
    for number, finding in found.items():
        if number in wrong:
            assert finding.verdict is AuditVerdict.DIVERGENCE, number
            index = finding.first_mismatch_index
            assert index is not None
            assert outcome.token_ids[number][:index] == sound[number][:index]
            assert outcome.token_ids[number][index] != finding.expected_token_id
        else:
            assert finding.verdict is not AuditVerdict.DIVERGENCE
    assert engine.breaker.num_trips >= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bug", [*PLANS, "a hole in the mask", "one key too many", "draft's bonus"])
def test_every_planted_desynchronisation_is_a_divergence_and_no_tie(
    bug: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound_outputs(DTYPES[dtype])
    engine = audited_engine(DTYPES[dtype])
    _ = engine._parts.auditor.epsilon  # calibrated while all was well
    if bug in PLANS:
        plan_forward = model_runner.plan_forward
        serving = engine._verifier.runner

        def changed(rows, cache, padding, costs):  # type: ignore[no-untyped-def]
            plan = plan_forward(rows, cache, padding, costs)
            return PLANS[bug](plan) if cache is serving.cache else plan

        monkeypatch.setattr(model_runner, "plan_forward", changed)
    elif bug == "draft's bonus":
        plant_draft_bonus(engine)
    else:
        plant_mask(engine, monkeypatch, hole if bug == "a hole in the mask" else one_too_long)
    check_all_found(engine, DTYPES[dtype])


def test_a_divergence_switches_speculation_off_and_requests_go_on() -> None:
    engine = audited_engine()
    plant_draft_bonus(engine)
    run(engine, greedy_and_seeded())
    findings(engine)
    assert engine.breaker.num_trips == 1
    plain = run(engine, greedy_and_seeded())
    assert all(s.num_draft_tokens == 0 for s in plain.stats.values())
    assert plain.token_ids == sound_outputs(torch.float32)


def test_only_the_share_of_requests_is_audited_and_the_queue_is_bounded() -> None:
    engine = tiny_engine(audit=AuditConfig(share=0.3, max_jobs=1000))
    run(engine, [request(f"request-{n}", [5, 6], max_tokens=1) for n in range(200)])
    assert 30 <= engine.load().num_audits_waiting <= 90
    small = tiny_engine(audit=AuditConfig(share=1.0, max_jobs=2))
    steps = run(small, [request(str(n), [5, 6], max_tokens=1) for n in range(5)]).steps
    load = small.load()
    assert (load.num_audits_waiting, load.num_audits_dropped) == (2, 3)
    assert steps[-1].num_audits_dropped == 3
    silent = tiny_engine()
    run(silent, [request("a", [5, 6])])
    assert silent.audit_next() is None
    queue = AuditQueue(2)
    for number in range(5):
        queue.add(AuditJob(request(str(number), [5]), (1,)))
    assert (len(queue), queue.num_dropped) == (2, 3)
    assert [job.request.request_id for job in iter(queue.take, None)] == ["3", "4"]


def test_cancelled_requests_are_audited_and_failed_ones_are_not() -> None:
    engine = audited_engine()
    outcome = Outcome()
    engine.submit(request("cancelled", [5, 6], max_tokens=40, ignore_eos=True))
    engine.submit(request("failed", [5, 6]))
    outcome.add_step(engine)
    engine.cancel("cancelled")
    live = engine._scheduler.find("failed")
    assert live is not None
    engine._committer.finish(live, FinishReason.ERROR, "planted")
    while engine.has_work():
        outcome.add_step(engine)
    found = findings(engine)
    assert set(found) == {"cancelled"}
    assert json.dumps(found["cancelled"].verdict) == '"exact"'


def test_an_audit_that_fails_costs_its_finding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(audit=AuditConfig(share=1.0))
    slices = Auditor.slices

    def failing(self: Auditor, job: AuditJob) -> Generator[None, None, AuditFinding]:
        yield
        if job.request.request_id == "bad":
            raise torch.OutOfMemoryError("planted")
        return (yield from slices(self, job))

    monkeypatch.setattr(Auditor, "slices", failing)
    run(engine, [request(name, [5, 6], max_tokens=2) for name in ("first", "bad", "last")])
    assert set(findings(engine)) == {"first", "last"}
    assert run(engine, [request("after", [5, 6], max_tokens=2)]).token_ids["after"]


def test_stores_that_do_not_add_up_are_found_while_there_is_nothing_else_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine()
    now = 1000.0
    monkeypatch.setattr("engine.idle_work.time", SimpleNamespace(monotonic=lambda: now))
    run(engine, [request("a", [5, 6], max_tokens=2)])
    assert engine.audit_next() is None
    engine._scheduler.cache.pool._num_references[0] += 1
    now += 59
    assert engine.audit_next() is None
    now += 1
    with pytest.raises(RuntimeError, match="block 0: 1 references"):
        engine.audit_next()


def test_the_breaker_opens_tries_again_and_closes() -> None:
    breaker = SpeculationBreaker(
        max_divergences=2, window=10, cooldown_seconds=60, max_cooldown_seconds=200, num_trials=3
    )
    breaker.observe(True, 0)
    for second in range(1, 11):
        breaker.observe(False, second)
    breaker.observe(True, 11)  # the first one has left the window
    assert breaker.state(11) is BreakerState.CLOSED
    breaker.observe(True, 12)
    assert breaker.state(12) is BreakerState.OPEN
    assert not breaker.allows_speculation(71)
    breaker.observe(True, 30)  # of a request that ran before
    assert breaker.state(72) is BreakerState.HALF_OPEN
    breaker.observe(True, 73)
    assert breaker.state(73 + 119) is BreakerState.OPEN
    assert breaker.state(73 + 120) is BreakerState.HALF_OPEN
    for second in range(200, 203):
        breaker.observe(False, second)
    assert breaker.state(203) is BreakerState.CLOSED
    assert breaker.num_trips == 2
