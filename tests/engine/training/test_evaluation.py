"""Acceptance lengths, their intervals and their breakdowns, on figures worked out by hand."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.training.errors import TrainingError
from engine.training.evaluation import (
    ConversationScore,
    bootstrap,
    expected_calibration_error,
    greedy_acceptance_length,
    paired_bootstrap,
    sampled_acceptance_length,
    walk_rounds,
)
from engine.training.report import compare, draw, summarize

# Two drafts at most: the rounds accept 2, 0 and 1.
SCORE = ConversationScore(
    key="a",
    source="chat",
    num_output_tokens=10,
    num_prompt_tokens=20,
    accepted=(2, 3),
    rounds=(4, 3),
    reach=(3, 2),
    expected=(0.5, 0.9),
    confidences=((0.9, True), (0.9, False)),
    walk=((0, 2), (3, 0), (40, 1)),
    language="en",
)
OTHER = replace(
    SCORE,
    key="b",
    source="code",
    language="de",
    num_output_tokens=30,
    num_prompt_tokens=100,
    accepted=(1, 1),
    rounds=(5, 5),
    expected=(0.1, 0.1),
    walk=((0, 1), (2, 0), (3, 0), (4, 0), (5, 0)),
)


def test_a_round_begins_behind_the_token_that_the_target_gave_the_last_one() -> None:
    hit, miss = [True, True, True], [False, True, True]
    assert walk_rounds([hit, miss, miss, hit, miss, [True]], 2) == [(0, 2), (3, 2)]
    assert walk_rounds([miss, miss, [True, False]], 2) == [(0, 0), (1, 0), (2, 1)]
    assert walk_rounds([hit] * 3, 1) == [(0, 1), (2, 1)]
    assert walk_rounds([], 2) == []


def test_lengths_count_the_targets_own_token_and_weigh_rounds_and_tokens() -> None:
    assert greedy_acceptance_length([SCORE], 2) == 1 + 3 / 3
    assert greedy_acceptance_length([SCORE, OTHER], 2) == 1 + 4 / 8
    assert greedy_acceptance_length([SCORE, OTHER], 1) == 1 + 3 / 9
    expected = 1 + (0.9 * 10 + 0.1 * 30) / 40
    assert sampled_acceptance_length([SCORE, OTHER], 2) == pytest.approx(expected)


def many(shift: int) -> list[ConversationScore]:
    """Conversations that differ much from each other, and by `shift` accepted drafts from those
    of another head."""
    return [
        replace(SCORE, key=str(i), accepted=(0, i % 40 + shift), rounds=(20, 20)) for i in range(80)
    ]


def test_paired_intervals_cancel_what_the_conversations_differ_by() -> None:
    difference, low, high = paired_bootstrap(many(0), many(2), 2)
    assert difference == pytest.approx(0.1)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    plain_low, plain_high = bootstrap(many(0), 2)
    assert plain_low < greedy_acceptance_length(many(0), 2) < plain_high
    assert plain_high - plain_low > 0.1, "conversations as such differ by more than the heads"
    assert paired_bootstrap(many(0), many(0), 2) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="same conversations"):
        paired_bootstrap(many(0), many(0)[1:], 2)


def test_an_interval_covers_what_it_should_as_often_as_it_says() -> None:
    generator = random.Random(7)
    missed = 0
    for trial in range(200):
        scores = [
            replace(SCORE, key=str(i), accepted=(0, generator.randint(0, 40)), rounds=(20, 20))
            for i in range(40)
        ]
        low, high = bootstrap(scores, 2, num_samples=400, seed=trial)
        missed += not low <= 2.0 <= high
    assert missed / 200 < 0.12


def test_calibration_error_is_the_gap_between_confidence_and_acceptance() -> None:
    honest = [(0.75, i % 4 != 0) for i in range(400)]
    boastful = [(0.95, i % 4 != 0) for i in range(400)]
    assert expected_calibration_error(honest) == pytest.approx(0.0)
    assert expected_calibration_error(boastful) == pytest.approx(0.2)
    assert expected_calibration_error(honest + boastful) == pytest.approx(0.1)
    assert expected_calibration_error([]) == 0.0


def test_a_report_breaks_the_figures_down() -> None:
    found = summarize([SCORE, OTHER], [SCORE, OTHER], 2)
    assert found["acceptance_length"] == 1.5
    assert found["acceptance_length_sampled"] == 1.3
    assert found["ci"][0] <= 1.5 <= found["ci"][1]
    assert found["by_draft_length"] == {"1": 1.3333, "2": 1.5}
    # Of eight rounds three accepted a draft, one of them another.
    assert found["accept_reach"] == [0.375, 0.125]
    assert found["accept_cond"] == [0.375, 0.3333]
    assert {k: v["acceptance_length"] for k, v in found["by_source"].items()} == {
        "chat": 2.0,
        "code": 1.2,
    }
    assert set(found["by_language"]) == {"en", "de"}
    assert set(found["by_context"]) == {"0-64", "64-128"}
    assert found["by_output_position"] == {"0-32": 1.4286, "32-128": 2.0}
    assert found["expected_calibration_error"] == pytest.approx(0.4)
    with pytest.raises(TrainingError, match="no conversation"):
        summarize([], [SCORE], 2)


def test_any_number_of_heads_is_compared_by_pairs_and_drawn(tmp_path: Path) -> None:
    scores = {name: (many(i), many(i)) for i, name in enumerate(("one", "two", "three"))}
    found = compare(scores, 2)
    assert set(found) == {"two - one", "three - one", "three - two"}
    assert found["three - one"]["greedy"]["difference"] == 0.1
    assert found["three - one"]["greedy"]["is_significant"]
    assert not found["two - one"]["sampled"]["is_significant"]
    reports = {name: summarize(*both, 2) for name, both in scores.items()}
    draw(tmp_path / "heads.png", reports)
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
