"""A divergence goes to the ledger in its terms, and to disk only where somebody asked for it."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.audit import AuditFinding, AuditJob, AuditVerdict
from engine.audit_case import read_case
from engine.audit_ending import Ending
from engine.loader import load_model
from engine.request import FinishReason
from service import cli_audit
from service.audits import keep, recorded
from tests.engine.driver import request
from tests.fakes import FAKE_INFO
from tests.tiny import save_tiny_model

DIVERGENCE = AuditFinding(
    request_id="r1",
    verdict=AuditVerdict.DIVERGENCE,
    num_checked_tokens=4,
    num_mismatched_tokens=2,
    first_mismatch_index=1,
    expected_token_id=9,
    first_margin=3.0,
    smallest_margin=0.5,
    largest_margin=3.0,
    epsilon=0.01,
    audit_seconds=0.1,
    drafter="prompt_lookup",
    job=AuditJob(request("r1", [5, 6, 7], max_tokens=4), (5, 6, 7, 8), Ending(FinishReason.LENGTH)),
)


def test_the_ledger_gets_the_smallest_margin_of_the_mismatches() -> None:
    assert recorded(DIVERGENCE).smallest_margin == 0.5
    assert recorded(DIVERGENCE).num_mismatched_tokens == 2


def test_only_divergences_are_kept(tmp_path: Path) -> None:
    keep(replace(DIVERGENCE, verdict=AuditVerdict.EXACT, job=None), FAKE_INFO, tmp_path / "cases")
    assert not (tmp_path / "cases").exists()
    keep(DIVERGENCE, FAKE_INFO, tmp_path / "cases")
    (path,) = (tmp_path / "cases").iterdir()
    assert read_case(path).job == DIVERGENCE.job


def test_a_folder_that_cannot_be_written_costs_the_case_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    keep(DIVERGENCE, FAKE_INFO, tmp_path / "file")
    assert "could not be kept" in caplog.text


def test_the_command_decodes_a_case_again_and_shows_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path / "model")
    fingerprint = load_model(str(model), dtype="float32", device="cpu").fingerprint
    info = replace(FAKE_INFO, fingerprint=fingerprint, dtype="float32", layout="ragged")
    keep(DIVERGENCE, info, tmp_path / "cases")
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TANDEM_KV_CACHE_MEMORY", "1e8")
    options = ["--cases", str(tmp_path / "cases")]
    runner = CliRunner()
    listed = runner.invoke(cli_audit.app, ["list", *options])
    assert listed.output == "r1  at token 1\n"
    shown = runner.invoke(cli_audit.app, ["replay", "r1", *options, "--target", str(model)])
    assert shown.exit_code == 0, shown.output
    served, speculative, plain = shown.stdout.splitlines()[1:4]
    assert "divergence" in served
    assert "5 6 7 8" in served
    assert "exact" in speculative
    assert speculative.split(":")[1] == plain.split(":")[1]
    unknown = runner.invoke(cli_audit.app, ["replay", "r2", *options, "--target", str(model)])
    assert unknown.exit_code == 1
    assert runner.invoke(cli_audit.app, ["replay", "r1"], env={"TANDEM_AUDIT_CASES": ""}).exit_code
