"""Guard rails over a real ledger: a bad candidate is rolled back from its recorded requests."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from service.experiments.assignment import assign
from service.experiments.guard_rails import Action
from service.experiments.heads import DrafterNames
from service.experiments.live import LiveExperiments
from service.experiments.records import RollbackStore
from service.experiments.watch import ExperimentWatch
from telemetry.ledger.records import (
    AuditRecord,
    LatencySummary,
    Outcome,
    Record,
    RequestRecord,
    TokenCounts,
    Verdict,
)
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from tests.telemetry.ledger_records import MODEL, request_record

FILE = """
name = "trial"
started_at = 2026-03-01T00:00:00Z
[[variant]]
name = "control"
drafters = ["old"]
weight = 0.5
[[variant]]
name = "candidate"
drafters = ["new"]
weight = 0.5
[guard_rails]
min_units = 20
"""
_KEY, _WEIGHTS = b"trial", {"control": 0.5, "candidate": 0.5}


class Rig:
    """A server's experiment over a ledger file, without the server."""

    def __init__(self, folder: Path) -> None:
        self._url = f"sqlite:///{folder}/ledger.db"
        migrate(self._url)
        self._folder = folder
        self._num_requests = 0
        (folder / "experiment.toml").write_text(FILE)
        self.experiments = self._start()
        self.watch = self._watch(self.experiments)

    def _start(self) -> LiveExperiments:
        store = RollbackStore(self._folder / "rollbacks")
        found = LiveExperiments(self._folder / "experiment.toml", store, 4)
        found.take(found.read(), DrafterNames())
        return found

    def _watch(self, experiments: LiveExperiments) -> ExperimentWatch:
        return ExperimentWatch(
            experiments,
            lambda: open_ledger(self._url, read_only=True),
            max_draft_tokens=4,
            interval_seconds=0.01,
            clock=lambda: datetime.now(UTC) + timedelta(minutes=1),
        )

    def restart(self) -> None:
        self.experiments = self._start()
        self.watch = self._watch(self.experiments)

    def write(self, records: Sequence[Record]) -> None:
        engine = open_ledger(self._url)
        LedgerStore(engine).write(records, may_exist=False)
        engine.dispose()

    def requests(
        self, count: int, accepted: Mapping[str, int], **changes: object
    ) -> list[RequestRecord]:
        """New requests of ten verify steps each, with so many accepted tokens by variant."""
        found = []
        for _ in range(count):
            index = self._num_requests = self._num_requests + 1
            variant = assign(_KEY, f"r{index}", _WEIGHTS)
            num_accepted = accepted[variant] + index % 3 - 1
            record = request_record(
                f"r{index}",
                variant=variant,
                counts=TokenCounts(
                    num_prompt_tokens=7,
                    num_output_tokens=10 + num_accepted,
                    num_verify_steps=10,
                    num_draft_tokens=40,
                    num_accepted_tokens=num_accepted,
                ),
                latency=LatencySummary(2.0, 0.25, 0.5, 0.01, 0.02),
            )
            found.append(replace(record, **changes))  # type: ignore[arg-type]
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def _audit(variant: str, verdict: Verdict) -> AuditRecord:
    return AuditRecord(
        audit_uid=uuid4().hex,
        request_id="r",
        record_id=None,
        instance_id="i1",
        audited_at=datetime(2026, 3, 2, tzinfo=UTC),
        model=MODEL,
        drafter=None,
        variant=variant,
        verdict=str(verdict),
        num_checked_tokens=10,
        num_mismatched_tokens=int(verdict is Verdict.DIVERGENCE),
        first_mismatch_index=None,
        smallest_margin=None,
        epsilon=None,
        audit_seconds=0.1,
    )


async def test_a_candidate_that_drafts_worse_is_rolled_back(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.write(rig.requests(300, {"control": 15, "candidate": 4}))
    decisions = await rig.watch.look()
    assert decisions["candidate"].action is Action.ROLL_BACK
    assert rig.experiments.variants == ("control",)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "candidate is rolled back: acceptance length: changed by -" in said
    assert await rig.watch.look() == {}, "nothing has a share any more"
    rig.restart()
    assert rig.experiments.variants == ("control",)


async def test_equal_arms_go_on_and_a_better_one_may_be_promoted(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig.write(rig.requests(200, {"control": 15, "candidate": 15}))
    assert (await rig.watch.look())["candidate"].action is Action.CONTINUE
    rig.write(rig.requests(1500, {"control": 15, "candidate": 30}))
    for _ in range(2):
        assert (await rig.watch.look())["candidate"].action is Action.PROMOTE
    said = [r.getMessage() for r in caplog.records if "can be promoted" in r.getMessage()]
    assert len(said) == 1
    assert rig.experiments.variants == ("control", "candidate"), "promotion is for people"


async def test_what_is_read_in_parts_or_after_a_restart_is_judged_the_same(rig: Rig) -> None:
    for _ in range(3):
        rig.write(rig.requests(60, {"control": 15, "candidate": 12}))
        in_parts = await rig.watch.look()
    rig.restart()
    assert await rig.watch.look() == in_parts


async def test_failures_and_divergences_are_read_too(rig: Rig) -> None:
    rig.write(rig.requests(200, {"control": 15, "candidate": 15}))
    failed = [
        replace(record, outcome=Outcome.FAILED, status_code="INTERNAL")
        for record in rig.requests(60, {"control": 15, "candidate": 15})
        if record.variant == "candidate"
    ]
    rig.write(failed)
    assert (await rig.watch.look())["candidate"].rule.startswith("failures")


async def test_one_divergence_ends_it_and_a_tie_does_not(rig: Rig) -> None:
    rig.write([_audit("candidate", Verdict.NUMERIC_TIE), _audit("control", Verdict.DIVERGENCE)])
    assert (await rig.watch.look())["candidate"].action is Action.CONTINUE
    rig.write([_audit("candidate", Verdict.DIVERGENCE)])
    assert (await rig.watch.look())["candidate"].rule.startswith("divergence: the auditor found 1")


async def test_further_completions_and_corrections_are_no_new_draws(rig: Rig) -> None:
    records = rig.requests(100, {"control": 15, "candidate": 0})
    copies = [replace(r, request_id=f"{r.request_id}#1", record_id=uuid4().hex) for r in records]
    rig.write(copies)
    decision = (await rig.watch.look())["candidate"]
    assert decision.findings[2].effect is None


async def test_a_ledger_that_is_away_changes_nothing(
    tmp_path: Path, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ledger.db").rename(tmp_path / "away.db")
    assert await rig.watch.look() == {}
    assert "not looked at" in caplog.text
    (tmp_path / "ledger.db").unlink(missing_ok=True)
    (tmp_path / "away.db").rename(tmp_path / "ledger.db")
    rig.write(rig.requests(300, {"control": 15, "candidate": 4}))
    assert (await rig.watch.look())["candidate"].action is Action.ROLL_BACK


async def test_it_looks_by_itself(rig: Rig) -> None:
    rig.write(rig.requests(300, {"control": 15, "candidate": 4}))
    rig.watch.start()
    async with asyncio.timeout(60):
        while rig.experiments.variants != ("control",):
            await asyncio.sleep(0.05)
    await rig.watch.stop()
