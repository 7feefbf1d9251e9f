"""An output that ends too late, too early or by another name is a divergence, however it ends."""

from dataclasses import replace
from functools import cache

import pytest

from engine.audit import AuditFinding, AuditVerdict
from engine.audit_ending import Ending, EndingRules
from engine.config import AuditConfig
from engine.engine import Engine
from engine.live_request import LiveRequest
from engine.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StructuredOutput,
    StructuredOutputKind,
)
from engine.stop_strings import StopStringWatcher
from tests.engine.driver import GREEDY, request, run, tiny_engine
from tests.engine.test_equality import prompts
from tests.tiny import tiny_tokenizer

MAX_MODEL_TOKENS = 192
SEEDED = SamplingParams(temperature=0.9, seed=3)
PENALIZED = SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5)
Cut = tuple[tuple[int, ...], FinishReason | None, int | None]


@cache
def engine_with_audits() -> Engine:
    return tiny_engine(max_model_tokens=MAX_MODEL_TOKENS, audit=AuditConfig(share=1.0))


def findings(engine: Engine) -> dict[str, AuditFinding]:
    found = iter(engine.audit_next, None)
    return {finding.request_id: finding for finding in found}


@cache
def items() -> tuple[GenerationRequest, ...]:
    """One request of each way to end, and of what may stand in an ending's way."""
    prompt = prompts(8)[3]
    engine = engine_with_audits()
    free = run(engine, [request("free", prompt, max_tokens=24, ignore_eos=True)])
    findings(engine)
    output = free.token_ids["free"]
    stop = next(token_id for token_id in output[4:] if output.index(token_id) >= 4)
    regex = StructuredOutput(StructuredOutputKind.REGEX, "[a-f]{3,9}")
    texts = ("a", "e")
    return (
        request("stop token", prompt, stop_token_ids=(stop,), ignore_eos=True, max_tokens=24),
        request("late stop", prompt, stop_token_ids=(stop,), ignore_eos=True, min_tokens=9),
        request("stop string", prompt, stop_strings=texts, ignore_eos=True, max_tokens=40),
        request("length", prompt, ignore_eos=True, max_tokens=7),
        request("penalties", prompt, ignore_eos=True, max_tokens=7, sampling=PENALIZED),
        request("regex", prompt, sampling=SEEDED, structured_output=regex, max_tokens=40),
        # n = 2 is two requests that differ in their seeds
        request("choice/0", prompt, ignore_eos=True, max_tokens=6, sampling=SEEDED),
        request(
            "choice/1", prompt, ignore_eos=True, max_tokens=6, sampling=replace(SEEDED, seed=4)
        ),
        request("context", prompt, ignore_eos=True, max_tokens=MAX_MODEL_TOKENS),
    )


@cache
def sound_endings() -> dict[str, tuple[int, FinishReason, int | None]]:
    """(number of tokens, reason, stop token) of each, and every one is exact."""
    engine = engine_with_audits()
    outcome = run(engine, items())
    found = findings(engine)
    assert {finding.verdict for finding in found.values()} == {AuditVerdict.EXACT}, found
    last = {d.request_id: d for d in outcome.deltas if d.finish_reason is not None}
    return {
        name: (len(outcome.token_ids[name]), delta.finish_reason, delta.stop_token_id)
        for name, delta in last.items()
        if delta.finish_reason is not None
    }


def plant_cut(engine: Engine, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Every request ends `shift` tokens after its end, with the same reason."""

    def cut(live: LiveRequest, token_ids: tuple[int, ...]) -> Cut:
        length, reason, stop_token_id = sound_endings()[live.request_id]
        for index in range(len(token_ids)):
            if live.num_output_tokens + index + 1 == length + shift:
                return token_ids[: index + 1], reason, stop_token_id
        return token_ids, None, None

    monkeypatch.setattr(engine._committer, "_cut", cut)
    monkeypatch.setattr(StopStringWatcher, "push", lambda self, token_ids: ("", None))


@pytest.mark.thorough
def test_all_kinds_of_endings_are_there_and_exact() -> None:
    reasons = {reason for _, reason, _ in sound_endings().values()}
    assert reasons == {
        FinishReason.STOP_TOKEN,
        FinishReason.STOP_STRING,
        FinishReason.LENGTH,
        FinishReason.CONTEXT_FULL,
    }
    assert sound_endings()["regex"][1] is FinishReason.STOP_TOKEN
    assert sound_endings()["late stop"][0] >= 10


@pytest.mark.thorough
@pytest.mark.parametrize("shift", [1, -1], ids=["late", "early"])
def test_an_end_that_is_one_token_off_is_a_divergence_at_that_token(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound_endings()
    engine = engine_with_audits()
    plant_cut(engine, monkeypatch, shift)
    wanted = [item for item in items() if not (item.request_id == "context" and shift > 0)]
    run(engine, wanted)
    for name, finding in findings(engine).items():
        length = sound_endings()[name][0]
        assert finding.verdict is AuditVerdict.DIVERGENCE, name
        assert finding.wrong_ending
        assert finding.first_mismatch_index == min(length, length + shift), name


@pytest.mark.thorough
def test_a_requests_end_by_another_name_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_audits()
    cut = engine._committer._cut

    def renamed(live: LiveRequest, token_ids: tuple[int, ...]) -> Cut:
        kept, reason, _ = cut(live, token_ids)
        if reason is FinishReason.STOP_TOKEN:
            return kept, FinishReason.LENGTH, None
        return kept, reason and FinishReason.STOP_TOKEN, reason and kept[-1]

    monkeypatch.setattr(engine._committer, "_cut", renamed)
    wanted = items()
    run(engine, [item for item in wanted if not item.stopping.stop_strings])
    found = findings(engine).values()
    assert found
    assert all(f.verdict is AuditVerdict.DIVERGENCE and f.wrong_ending for f in found)


RULES = EndingRules(tiny_tokenizer(), (1,), 12)


@pytest.mark.parametrize(
    ("output", "reason", "stop", "is_right"),
    [
        ((7, 8), FinishReason.CANCELLED, None, True),
        ((7, 8), FinishReason.TIME_LIMIT, None, True),
        ((), FinishReason.DEADLINE, None, True),
        ((7, 1), FinishReason.CANCELLED, None, False),  # it went on after its end
        ((7, 1, 8), FinishReason.TIME_LIMIT, None, False),
        ((), FinishReason.LENGTH, None, False),
        ((7, 1), FinishReason.STOP_TOKEN, 1, True),
        ((7, 1), FinishReason.STOP_TOKEN, 7, False),
        ((7, 8, 9, 6), FinishReason.LENGTH, None, True),
        ((7, 8, 9, 1), FinishReason.LENGTH, None, False),  # the stop comes first
    ],
)
def test_who_ends_a_request_from_outside_may_do_so_anywhere_but_after_its_end(
    output: tuple[int, ...], reason: FinishReason, stop: int | None, is_right: bool
) -> None:
    wanted = request("a", [5, 6, 7], max_tokens=4, sampling=GREEDY)
    assert (RULES.check(wanted, output, Ending(reason, stop)) is None) == is_right


@pytest.mark.thorough
def test_no_token_at_all_where_some_are_due_is_a_divergence() -> None:
    engine = engine_with_audits()
    engine.submit(request("a", [5, 6]))
    live = engine._scheduler.find("a")
    assert live is not None
    engine._committer.finish(live, FinishReason.LENGTH)
    assert findings(engine)["a"].verdict is AuditVerdict.DIVERGENCE
