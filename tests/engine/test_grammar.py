"""Structured output is valid whatever the drafter proposes, and acceptance is still measured."""

import json
import re
from collections.abc import Sequence

import pytest

from engine.drafter.base import DraftJob, Proposal
from engine.grammar import GrammarCompiler
from engine.request import (
    FinishReason,
    GenerationRequest,
    RequestError,
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    StructuredOutputKind,
)
from tests.engine.driver import request, run, tiny_engine
from tests.tiny import tiny_tokenizer

PROMPT = tiny_tokenizer()("the quick brown fox")["input_ids"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "fast": {"type": "boolean"},
        },
        "required": ["name", "count", "fast"],
        "additionalProperties": False,
    }
)
LARK = 'start: "<" /[a-c]{2,5}/ ">" ("," /[0-9]/)*\n'


def structured(kind: StructuredOutputKind, text: str) -> StructuredOutput:
    return StructuredOutput(kind, text)


def is_valid(kind: StructuredOutputKind, text: str) -> bool:
    if kind is StructuredOutputKind.JSON_SCHEMA:
        value = json.loads(text)
        return set(value) == {"name", "count", "fast"} and 0 <= value["count"] <= 99
    if kind is StructuredOutputKind.REGEX:
        return re.fullmatch("[0-9]{3}-[a-f]{4,9}", text) is not None
    if kind is StructuredOutputKind.CHOICE:
        return text in ("red", "green and blue", 'say "no"')
    return re.fullmatch("<[a-c]{2,5}>(,[0-9])*", text) is not None


CASES = [
    (StructuredOutputKind.JSON_SCHEMA, SCHEMA),
    (StructuredOutputKind.REGEX, "[0-9]{3}-[a-f]{4,9}"),
    (StructuredOutputKind.CHOICE, json.dumps(["red", "green and blue", 'say "no"'])),
    (StructuredOutputKind.GRAMMAR, LARK),
]


@pytest.mark.parametrize("drafters", [("prompt_lookup",), ("draft_model",)], ids="+".join)
@pytest.mark.parametrize(("kind", "text"), CASES, ids=[kind for kind, _ in CASES])
def test_output_satisfies_the_grammar_and_equals_plain_decoding(
    kind: StructuredOutputKind, text: str, drafters: tuple[str, ...]
) -> None:
    def outputs(mode: str) -> tuple[list[list[int]], int]:
        engine = tiny_engine(drafters=drafters, max_num_rows=6)
        items = [
            request(
                str(number),
                PROMPT,
                max_tokens=120,
                mode=mode,
                sampling=SamplingParams(temperature=0.0 if number == 0 else 1.0, seed=number),
                structured_output=structured(kind, text),
            )
            for number in range(6)
        ]
        items.append(request("free", PROMPT, max_tokens=30, ignore_eos=True, mode=mode))
        outcome = run(engine, items)
        for number in range(6):
            stats = outcome.stats[str(number)]
            if stats.finish_reason is FinishReason.STOP_TOKEN:
                decoded = tiny_tokenizer().decode(
                    outcome.token_ids[str(number)], skip_special_tokens=True
                )
                assert is_valid(kind, decoded), decoded
        ended = [
            number
            for number in range(6)
            if outcome.stats[str(number)].finish_reason is FinishReason.STOP_TOKEN
        ]
        assert len(ended) >= 4, "most outputs end by themselves"
        drafted = sum(outcome.stats[str(n)].num_draft_tokens for n in range(6))
        return [outcome.token_ids[key] for key in sorted(outcome.token_ids)], drafted

    plain, drafted_off = outputs("off")
    speculative, drafted_on = outputs("on")
    assert speculative == plain
    assert drafted_off == 0
    if drafters == ("draft_model",):
        assert drafted_on > 0


def test_rejected_drafts_leave_the_grammar_where_it_was() -> None:
    engine = tiny_engine()
    grammar = engine._parts.grammars.compile(structured(StructuredOutputKind.REGEX, "ab(c|d)e*"))
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abde"]
    before = grammar.masks(())
    masks = grammar.masks(ids)
    assert [bool(masks[j, ids[j]]) for j in range(4)] == [True] * 4
    assert (grammar.masks(()) == before).all()
    assert grammar.legal_prefix([*ids[:2], ids[0], ids[1]]) == 2
    grammar.masks([*ids, 1])  # as far as the end token
    grammar.masks([*ids, 1, 1, ids[0]])
    assert grammar.legal_prefix([*ids, 1, 1, ids[0]]) == 5
    assert (grammar.masks(()) == before).all()
    grammar.commit(ids[:2])
    assert not grammar.masks(())[0, ids[0]]
    assert grammar.masks(())[0, ids[2]]


def test_drafts_are_cut_at_the_first_token_that_the_grammar_forbids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter says "aa": legal once. What follows is neither verified nor counted."""
    engine = tiny_engine(max_num_rows=2)
    letter = tiny_tokenizer().convert_tokens_to_ids("a")

    def propose(jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [Proposal((letter,) * 4 if job.max_drafts == 4 else ()) for job in jobs]

    monkeypatch.setattr(engine._drafters, "propose", propose)
    grammar = structured(StructuredOutputKind.REGEX, "(a[b-z]){12}")
    item = request("one", PROMPT, max_tokens=24, max_draft_tokens=4, structured_output=grammar)
    free = request("free", PROMPT, max_tokens=24, max_draft_tokens=4, ignore_eos=True)
    outcome = run(engine, [item, free])
    text = tiny_tokenizer().decode(outcome.token_ids["one"], skip_special_tokens=True)
    assert re.fullmatch("(a[b-z])+", text)
    rows = [row for step in outcome.steps for row in step.rows if row.num_draft_positions]
    assert {row.num_draft_positions for row in rows if row.request_id == "one"} == {1}
    assert 4 in {row.num_draft_positions for row in rows if row.request_id == "free"}
    assert outcome.stats["one"].num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (StructuredOutputKind.REGEX, "(unclosed"),
        (StructuredOutputKind.JSON_SCHEMA, "{not json"),
        (StructuredOutputKind.JSON_SCHEMA, '{"type": "no such type"}'),
        (StructuredOutputKind.GRAMMAR, "start: missing_rule"),
        (StructuredOutputKind.CHOICE, "red"),
        (StructuredOutputKind.CHOICE, "[]"),
        (StructuredOutputKind.CHOICE, '[1, "a"]'),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(kind: StructuredOutputKind, text: str) -> None:
    engine = tiny_engine()
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", PROMPT, structured_output=structured(kind, text)))
    assert caught.value.field == f"structured_output.{kind}"
    assert not engine.has_work()


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_alone() -> None:
    engine = tiny_engine(max_num_rows=2)
    engine.submit(
        request("a", PROMPT, structured_output=structured(StructuredOutputKind.REGEX, "[a-z]+"))
    )

    def explode(draft_token_ids):  # type: ignore[no-untyped-def]
        raise RuntimeError("ParserTooComplex")

    live = engine._scheduler.find("a")
    assert live is not None

    class Exploding:
        masks = staticmethod(explode)
        legal_prefix = staticmethod(len)
        commit = staticmethod(lambda token_ids: None)

    live.grammar = Exploding()  # type: ignore[assignment]
    outcome = run(engine, [request("b", PROMPT)])
    assert outcome.stats["a"].finish_reason is FinishReason.ERROR
    assert "ParserTooComplex" in (outcome.stats["a"].error or "")
    assert outcome.token_ids["b"] == run(tiny_engine(), [request("b", PROMPT)]).token_ids["b"]


def test_what_contradicts_structured_output_is_refused() -> None:
    wanted = structured(StructuredOutputKind.REGEX, "a")
    for stopping, field in (
        (StoppingParams(ignore_eos=True), "stopping.ignore_eos"),
        (StoppingParams(min_tokens=3), "stopping.min_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            GenerationRequest("a", (5,), stopping=stopping, structured_output=wanted)
        assert caught.value.field == field
    with pytest.raises(RequestError):
        StructuredOutput(StructuredOutputKind.REGEX, "a" * 100_000)


def _compiler(**options: float) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), 320, [1], **options)


def test_a_grammar_that_is_never_built_is_given_up_and_the_next_one_works() -> None:
    terms = " & ".join(f"/(?s:.*a.{{{length}}})/" for length in range(200, 300))
    compiler = _compiler(timeout_seconds=0.3)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"structured_output\.grammar.*longer than 0.3 s"):
            compiler.compile(structured(StructuredOutputKind.GRAMMAR, f"start: A\nA: {terms}\n"))
    compiler.compile(structured(StructuredOutputKind.REGEX, "[0-9]{3}"))


def test_a_grammar_compiled_ahead_is_copied_for_every_request() -> None:
    compiler = _compiler()
    digits = structured(StructuredOutputKind.REGEX, "[0-9]{2}")
    first, second = compiler.compile(digits), compiler.compile(digits)
    one = tiny_tokenizer()("1", add_special_tokens=False)["input_ids"]
    first.commit(one * 2)
    assert not first.masks(())[0, one[0]]
    assert second.masks(())[0, one[0]]


def test_a_process_that_died_between_two_grammars_is_replaced() -> None:
    compiler = _compiler()
    compiler.compile(structured(StructuredOutputKind.REGEX, "a"))
    process = compiler._trials._process
    assert process is not None
    process.kill()
    process.wait()
    compiler.compile(structured(StructuredOutputKind.REGEX, "b"))
