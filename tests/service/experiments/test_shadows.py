"""Heads in the shadow: their rows in the ledger, and what status and report say of them."""

import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from service import cli_experiment
from service.experiments.shadows import read_shadows
from service.experiments.specification import Experiment, ExperimentError, read_experiment
from telemetry.ledger.records import DrafterRecord, ShadowRecord, decode_record, encode_record
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from tests.telemetry.ledger_records import MODEL

FILE = """
name = "trial"
started_at = 2026-03-01T00:00:00Z
[[variant]]
name = "control"
drafters = ["prompt_lookup", "head:chat"]
weight = 1
[[shadow]]
drafter = "head:chat@0003"
share = 0.2
"""


def _row(index: int, drafter: str, num_accepted: int, **changes: object) -> ShadowRecord:
    values = {
        "shadow_uid": uuid4().hex,
        "request_id": f"r{index}",
        "instance_id": "i1",
        "measured_at": datetime(2026, 3, 2, tzinfo=UTC),
        "model": MODEL,
        "drafter": DrafterRecord(drafter, ""),
        "variant": "control",
        "num_rounds": 10,
        "num_draft_tokens": 40,
        "num_accepted_tokens": num_accepted,
        "num_given_up": 0,
        "replay_seconds": 0.1,
    }
    return ShadowRecord(**{**values, **changes})  # type: ignore[arg-type]


def _experiment(tmp_path: Path, text: str = FILE) -> Experiment:
    (tmp_path / "experiment.toml").write_text(text)
    return read_experiment(tmp_path / "experiment.toml")


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path / 'ledger.db'}"
    migrate(found)
    return found


def _write(url: str, rows: list[ShadowRecord]) -> None:
    engine = open_ledger(url)
    LedgerStore(engine).write(rows, may_exist=False)
    LedgerStore(engine).write(rows, may_exist=True)  # the journal may bring them twice
    engine.dispose()


def test_a_record_survives_the_journal() -> None:
    row = _row(1, "head:chat@0003", 17)
    assert decode_record(encode_record(row)) == row


def test_other_shadows_of_a_name_are_no_control(tmp_path: Path, url: str) -> None:
    names = [f"head:chat@000{version}" for version in (3, 2, 4, 5)]  # in the order of the rows
    _write(
        url,
        [_row(index, name, 8 + place) for index in range(50) for place, name in enumerate(names)],
    )
    more = "".join(
        f'[[shadow]]\ndrafter = "head:chat@000{version}"\nshare = 0.2\n' for version in (4, 5)
    )
    engine = open_ledger(url, read_only=True)
    found = read_shadows(engine, _experiment(tmp_path, FILE + more), 4)
    engine.dispose()
    assert {standing.baseline for standing in found} == {"head:chat@0002"}
    gains = [standing.gain.estimate for standing in found if standing.gain is not None]
    assert gains == pytest.approx([-0.1, 0.1, 0.2])


def test_heads_are_compared_on_the_same_requests(tmp_path: Path, url: str) -> None:
    rows = []
    for index in range(400):
        ease = index % 20  # requests differ far more than the heads do
        rows.append(_row(index, "head:chat@0003", 12 + ease, num_given_up=int(index < 3)))
        rows.append(_row(index, "head:chat@0001", 9 + ease))
    rows.append(_row(900, "head:chat@0003", 40))  # its baseline is not there yet
    rows.append(_row(901, "head:chat@0003", 40, measured_at=datetime(2026, 2, 1, tzinfo=UTC)))
    _write(url, rows)
    engine = open_ledger(url, read_only=True)
    (found,) = read_shadows(engine, _experiment(tmp_path), 4)
    engine.dispose()
    assert (found.num_requests, found.num_paired, found.num_given_up) == (401, 400, 3)
    assert found.baseline == "head:chat@0001"
    assert found.gain is not None
    assert found.gain.estimate == pytest.approx(0.3)
    assert found.gain.lower > 0, "the pairs have little spread"
    assert found.acceptance is not None
    assert found.acceptance.lower < 3.15 < found.acceptance.upper
    outcome = CliRunner().invoke(
        cli_experiment.app,
        ["report", str(tmp_path / "experiment.toml"), "--ledger", url],
        env={"TANDEM_HOME": str(tmp_path)},
    )
    assert outcome.exit_code == 0, outcome.output
    assert "| head:chat@0003 | 401 |" in outcome.output
    assert "3 requests were chosen and not measured." in outcome.output
    told = CliRunner().invoke(
        cli_experiment.app,
        ["status", str(tmp_path / "experiment.toml"), "--ledger", url, "--json"],
        env={"TANDEM_HOME": str(tmp_path)},
    )
    (shadow,) = json.loads(told.output)["shadows"]
    assert shadow["num_paired"] == 400
    assert shadow["gain"]["estimate"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("share = 0.2", "share = 0", "shadow.share"),
        ("share = 0.2", "", r"shadow\[0\].share: is missing"),
        ("share = 0.2", "share = 0.2\nweight = 1", r"shadow\[0\].weight: is not known"),
        ("head:chat@0003", "head:chat", "shadow.drafter"),
    ],
)
def test_a_wrong_shadow_is_refused_by_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    with pytest.raises(ExperimentError, match=field):
        _experiment(tmp_path, FILE.replace(old, new))
