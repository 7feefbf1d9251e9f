"""A divergence is kept so that it can be decoded again: with the bug it recurs, without it not."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.audit import AuditVerdict
from engine.audit_case import (
    AuditCase,
    AuditCaseError,
    case_of,
    case_path,
    keep_case,
    read_case,
)
from engine.audit_replay import replay
from engine.engine import Engine
from tests.engine.driver import run
from tests.engine.test_audit import (
    audited_engine,
    findings,
    greedy_and_seeded,
    plant_draft_bonus,
)


def diverged(engine: Engine) -> AuditCase:
    run(engine, greedy_and_seeded())
    found = findings(engine).values()
    wrong = [f for f in found if f.verdict is AuditVerdict.DIVERGENCE]
    assert all((f.job is not None) == (f in wrong) for f in found)
    case = case_of(wrong[0], engine.info)
    assert case is not None
    return case


@pytest.fixture(scope="module")
def buggy() -> Engine:
    engine = audited_engine()
    plant_draft_bonus(engine)
    return engine


@pytest.fixture(scope="module")
def case(buggy: Engine) -> AuditCase:
    return diverged(buggy)


def test_a_kept_case_is_read_back_as_it_was_and_by_its_owner_alone(
    case: AuditCase, tmp_path: Path
) -> None:
    path = keep_case(tmp_path / "cases", case)
    assert path == case_path(tmp_path / "cases", case.job.request.request_id)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_case(path) == case
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_where_it_differs_and_by_how_much_is_of_the_first_difference(case: AuditCase) -> None:
    assert case.first_margin is None or case.first_margin > case.epsilon
    emitted = case.job.output_token_ids[case.first_mismatch_index]
    assert emitted != case.expected_token_id


def test_with_the_bug_it_diverges_again_and_plain_decoding_does_not(
    buggy: Engine, case: AuditCase
) -> None:
    buggy.breaker = type(buggy.breaker)()  # the divergences have switched speculation off
    again = replay(buggy, case)
    assert again.recorded.verdict is AuditVerdict.DIVERGENCE
    assert again.recorded.first_mismatch_index == case.first_mismatch_index
    assert again.recorded.expected_token_id == case.expected_token_id
    assert again.speculative_token_ids == case.job.output_token_ids
    assert again.speculative.verdict is AuditVerdict.DIVERGENCE
    assert again.plain.verdict is not AuditVerdict.DIVERGENCE
    index = case.first_mismatch_index
    assert again.plain_token_ids[:index] == case.job.output_token_ids[:index]
    assert again.plain_token_ids[index] == case.expected_token_id


def test_without_the_bug_both_ways_give_the_targets_own_tokens(case: AuditCase) -> None:
    again = replay(audited_engine(), case)
    assert again.recorded.verdict is AuditVerdict.DIVERGENCE
    assert again.speculative_token_ids == again.plain_token_ids != case.job.output_token_ids
    assert again.speculative.verdict is not AuditVerdict.DIVERGENCE


def test_a_case_of_another_model_and_one_that_cannot_be_read_are_refused(
    case: AuditCase, buggy: Engine, tmp_path: Path
) -> None:
    with pytest.raises(AuditCaseError, match="is of a model other"):
        replay(buggy, replace(case, fingerprint="other"))
    with pytest.raises(AuditCaseError, match="no such case"):
        read_case(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(AuditCaseError, match=r"broken\.json"):
        read_case(tmp_path / "broken.json")


def test_old_cases_give_way_to_new_ones(case: AuditCase, tmp_path: Path) -> None:
    for number in range(103):
        request = replace(case.job.request, request_id=f"r{number}")
        keep_case(tmp_path, replace(case, job=replace(case.job, request=request)))
    assert len(list(tmp_path.iterdir())) == 100
    assert case_path(tmp_path, "r102").exists()
    assert not case_path(tmp_path, "r0").exists()
