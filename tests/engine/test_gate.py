"""The gate before promotion: significantly better, and no source pays for it."""

from typing import Any

import pytest

from engine.drafter.gate import GateError, judge_replay
from engine.training.evaluation import ConversationScore
from engine.training.report import compare, summarize


def _evaluation(
    ci: tuple[float, float] = (0.05, 0.15), code: float = 1.9, *, is_turned: bool = False
) -> dict[str, Any]:
    sources = {"chat": (90, 1.8, 2.0), "code": (8, 1.8, code), "rare": (2, 1.8, 1.0)}
    heads = {
        name: {
            "by_source": {
                source: {"num_conversations": row[0], "acceptance_length": row[place]}
                for source, row in sources.items()
            }
        }
        for name, place in (("old", 1), ("new", 2))
    }
    low, high = (-ci[1], -ci[0]) if is_turned else ci
    greedy = {"difference": (low + high) / 2, "ci": [low, high]}
    label = "old - new" if is_turned else "new - old"
    return {"heads": heads, "comparisons": {label: {"greedy": greedy}}}


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_head_that_is_better_beyond_its_interval_passes(is_turned: bool) -> None:
    verdict = judge_replay(_evaluation(is_turned=is_turned), "new", "old")
    assert verdict.is_passed
    assert verdict.difference == pytest.approx(0.1)
    assert verdict.ci == pytest.approx((0.05, 0.15))


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_difference_that_may_be_chance_does_not_pass(is_turned: bool) -> None:
    verdict = judge_replay(_evaluation((-0.01, 0.2), is_turned=is_turned), "new", "old")
    assert "not significantly better" in verdict.objections[0]


def test_a_source_that_loses_stops_it_and_a_rare_one_does_not() -> None:
    (objection,) = judge_replay(_evaluation(code=1.7), "new", "old").objections
    assert objection.startswith("source code: loses 5.6%")
    assert judge_replay(_evaluation(code=1.79), "new", "old").is_passed


@pytest.mark.parametrize(
    ("evaluation", "reason"),
    [
        ({}, "heads"),
        ({"heads": {}, "comparisons": {}}, "has no head 'new'"),
        ({**_evaluation(), "comparisons": {}}, "does not compare"),
    ],
)
def test_an_evaluation_of_something_else_is_refused(
    evaluation: dict[str, Any], reason: str
) -> None:
    with pytest.raises(GateError, match=reason):
        judge_replay(evaluation, "new", "old")


def _score(key: int, accepted: int, rounds: int) -> ConversationScore:
    walk = tuple((index * 2, accepted // rounds) for index in range(rounds))
    known: dict[str, Any] = {
        "key": str(key),
        "source": "chat",
        "num_output_tokens": accepted + rounds,
        "num_prompt_tokens": 10,
        "accepted": (accepted,),
        "rounds": (rounds,),
        "reach": (accepted,),
        "expected": (accepted / rounds,),
        "confidences": ((0.5, True),),
        "walk": walk,
        "language": "en",
    }
    return ConversationScore(**known)


def test_it_reads_what_the_trainers_comparison_writes() -> None:
    scores = {
        name: ([_score(key, accepted + key % 2, 20) for key in range(30)],) * 2
        for name, accepted in (("old", 10), ("new", 15))
    }
    evaluation = {
        "heads": {name: summarize(*pair, 1) for name, pair in scores.items()},
        "comparisons": compare(scores, 1),
    }
    assert judge_replay(evaluation, "new", "old").is_passed
    assert not judge_replay(evaluation, "old", "new").is_passed
