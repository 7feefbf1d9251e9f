"""Nothing that the engine cannot serve becomes a request: the field is named on construction."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_LIST_ENTRIES,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    RequestError,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    StructuredOutput,
    StructuredOutputKind,
    validate_against_model,
)

FLOATS = [
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]


def refused(make: Callable[[], object]) -> str:
    """The field that is named."""
    with pytest.raises(RequestError) as found:
        make()
    assert str(found.value).startswith(f"{found.value.field}: ")
    assert found.value.reason
    return found.value.field


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    assert refused(lambda: SamplingParams(**{name: bad})) == f"sampling.{name}"


SAMPLING_LIMITS: list[tuple[str, list[object], list[object]]] = [
    ("temperature", [0, 1e-4, 1, 100], [-0.1, 1e-9, 5e-324, 100.5]),
    ("top_k", [0, 1, 2**31 - 1], [-1, 2**31, 2**70]),
    ("top_p", [1e-6, 0.5, 1], [0, -0.5, 1.01]),
    ("typical_p", [1e-6, 0.5, 1], [0, -0.5, 1.01]),
    ("min_p", [0, 0.5, 1], [-0.01, 1.01]),
    ("repetition_penalty", [0.01, 1, 100], [0, -1, 101]),
    ("presence_penalty", [-100, 0, 100], [-101, 101]),
    ("frequency_penalty", [-100, 0, 100], [-101, 101]),
    ("seed", [0, 2**63 - 1], [-1, 2**63]),
    (
        "allowed_token_ids",
        [(), (1,), tuple(range(MAX_TOKEN_LIST_ENTRIES))],
        [tuple(range(MAX_TOKEN_LIST_ENTRIES + 1))],
    ),
    (
        "banned_token_ids",
        [(), (1,), tuple(range(MAX_TOKEN_LIST_ENTRIES))],
        [tuple(range(MAX_TOKEN_LIST_ENTRIES + 1))],
    ),
    (
        "logit_bias",
        [(), tuple((n, 1.0) for n in range(MAX_LOGIT_BIAS_ENTRIES))],
        [tuple((n, 1.0) for n in range(MAX_LOGIT_BIAS_ENTRIES + 1))],
    ),
]


@pytest.mark.parametrize(("name", "good", "bad"), SAMPLING_LIMITS)
def test_sampling_parameters_are_held_to_their_range(
    name: str, good: list[object], bad: list[object]
) -> None:
    for value in good:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    for value in bad:
        assert refused(lambda: SamplingParams(**{name: value})) == f"sampling.{name}"  # type: ignore[arg-type]  # noqa: B023


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 1000.5, -1e9])
def test_an_absurd_bias_is_refused_with_its_token(bias: float) -> None:
    make = lambda: SamplingParams(logit_bias=((3, 1.0), (17, bias)))  # noqa: E731
    assert refused(make) == "sampling.logit_bias[17]"


def test_banning_every_allowed_token_is_refused() -> None:
    SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(2, 3))
    make = lambda: SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(2, 1, 3))  # noqa: E731
    assert refused(make) == "sampling.banned_token_ids"


def test_top_logprobs_are_limited() -> None:
    for value in (None, 0, MAX_TOP_LOGPROBS):
        SamplingParams(num_top_logprobs=value)
    for bad in (-1, MAX_TOP_LOGPROBS + 1):
        assert refused(lambda: SamplingParams(num_top_logprobs=bad)) == "output.top_logprobs"  # noqa: B023


STOPPING_LIMITS: list[tuple[str, dict[str, object]]] = [
    ("stopping.max_tokens", {"max_tokens": 0}),
    ("stopping.max_tokens", {"max_tokens": -5}),
    ("stopping.min_tokens", {"min_tokens": -1}),
    ("stopping.min_tokens", {"min_tokens": 11, "max_tokens": 10}),
    ("stopping.stop_token_ids", {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))}),
    ("stopping.stop_strings", {"stop_strings": ("x",) * (MAX_STOP_STRINGS + 1)}),
    ("stopping.stop_strings", {"stop_strings": ("x",) * 10_000}),
    ("stopping.stop_strings[1]", {"stop_strings": ("x", "")}),
    ("stopping.stop_strings[0]", {"stop_strings": ("x" * (MAX_STOP_STRING_CHARACTERS + 1),)}),
    ("stopping.time_limit", {"time_limit_seconds": 0.0}),
    ("stopping.time_limit", {"time_limit_seconds": -1.0}),
    ("stopping.time_limit", {"time_limit_seconds": math.nan}),
    ("stopping.time_limit", {"time_limit_seconds": math.inf}),
]


@pytest.mark.parametrize(("field", "options"), STOPPING_LIMITS)
def test_stopping_parameters_are_held_to_their_range(
    field: str, options: dict[str, object]
) -> None:
    assert refused(lambda: StoppingParams(**options)) == field  # type: ignore[arg-type]


def test_the_edges_of_stopping_are_served() -> None:
    StoppingParams(
        max_tokens=1,
        min_tokens=1,
        stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS)),
        stop_strings=("x" * MAX_STOP_STRING_CHARACTERS,) * MAX_STOP_STRINGS,
        time_limit_seconds=0.001,
    )


@pytest.mark.parametrize("bad", [-1, 65])
def test_the_number_of_drafts_is_limited(bad: int) -> None:
    SpeculationParams(max_draft_tokens=0)
    SpeculationParams(max_draft_tokens=64)
    assert refused(lambda: SpeculationParams(max_draft_tokens=bad)) == (
        "speculation.max_draft_tokens"
    )


def test_a_request_needs_an_id_a_prompt_and_a_sane_priority() -> None:
    assert refused(lambda: GenerationRequest("", (1,))) == "request_id"
    assert refused(lambda: GenerationRequest("a", ())) == "prompt"
    assert refused(lambda: GenerationRequest("a", (1,), priority=101)) == "priority"
    assert refused(lambda: GenerationRequest("a", (1,), priority=-101)) == "priority"


@pytest.mark.parametrize(
    ("field", "stopping"),
    [
        ("stopping.ignore_eos", StoppingParams(ignore_eos=True)),
        ("stopping.min_tokens", StoppingParams(min_tokens=3)),
    ],
)
def test_what_contradicts_structured_output_is_refused(
    field: str, stopping: StoppingParams
) -> None:
    output = StructuredOutput(StructuredOutputKind.REGEX, "[0-9]+")
    make = lambda: GenerationRequest("a", (1,), stopping=stopping, structured_output=output)  # noqa: E731
    assert refused(make) == field


VOCAB_SIZE = 100
OUTSIDE = st.one_of(st.integers(max_value=-1), st.integers(min_value=VOCAB_SIZE))


@settings(deadline=None, max_examples=50)
@given(bad=OUTSIDE, position=st.integers(0, 3))
def test_a_token_id_outside_the_vocabulary_is_refused_wherever_it_stands(
    bad: int, position: int
) -> None:
    ids = [5, 6, 99, 0]
    ids[position] = bad
    cases = {
        "prompt": GenerationRequest("a", tuple(ids)),
        "stopping.stop_token_ids": GenerationRequest(
            "a", (1,), stopping=StoppingParams(stop_token_ids=tuple(ids))
        ),
        "sampling.allowed_token_ids": GenerationRequest(
            "a", (1,), SamplingParams(allowed_token_ids=tuple(ids))
        ),
        "sampling.banned_token_ids": GenerationRequest(
            "a", (1,), SamplingParams(banned_token_ids=tuple(ids))
        ),
        "sampling.logit_bias": GenerationRequest(
            "a", (1,), SamplingParams(logit_bias=tuple((token_id, 1.0) for token_id in ids))
        ),
    }
    for field, item in cases.items():
        with pytest.raises(RequestError, match=str(bad)) as found:
            validate_against_model(item, VOCAB_SIZE, 512)
        assert found.value.field == field


def test_a_prompt_must_leave_room_for_one_token() -> None:
    validate_against_model(GenerationRequest("a", (1,) * 31), VOCAB_SIZE, 32)
    for length in (32, 33, 1000):
        with pytest.raises(RequestError) as found:
            validate_against_model(GenerationRequest("a", (1,) * length), VOCAB_SIZE, 32)
        assert found.value.field == "prompt"


@pytest.mark.parametrize(
    "item", [SamplingParams(), StoppingParams(), SpeculationParams(), GenerationRequest("a", (1,))]
)
def test_what_was_checked_cannot_change_afterwards(item: object) -> None:
    for field in fields(item):  # type: ignore[arg-type]
        with pytest.raises(FrozenInstanceError):
            setattr(item, field.name, None)


def test_a_request_by_default_is_sampled_from_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert not params.is_greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert SamplingParams(temperature=0).is_greedy
