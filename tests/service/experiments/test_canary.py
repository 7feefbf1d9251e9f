"""Experiments that promote by themselves: the share rises, one promotion, no false ones."""

import math
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.drafter.registry import HeadRegistry
from service import cli_experiment
from service.experiments.assignment import assign
from service.experiments.canary import CanaryRun, Stage
from service.experiments.guard_rails import Action, GuardRails
from service.experiments.heads import DrafterNames
from service.experiments.live import LiveExperiments
from service.experiments.promotion import promote_candidate
from service.experiments.records import RollbackStore
from service.experiments.specification import Experiment, ExperimentError, Variant, read_experiment
from service.experiments.tally import Observation, Tally
from service.experiments.watch import ExperimentWatch
from telemetry.ledger.records import LatencySummary, TokenCounts
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from tests.marks import thorough
from tests.service.experiments.simulation import STARTED_AT, Truth
from tests.telemetry.ledger_records import request_record

_MINUTE = timedelta(minutes=1)


def _experiment(**rails: object) -> Experiment:
    return Experiment(
        name="trial",
        started_at=STARTED_AT,
        variants=(
            Variant("control", ("head:chat",), 0.99),
            Variant("candidate", ("head:chat@0002",), 0.01),
        ),
        promote="automatic",
        guard_rails=GuardRails(**{"alpha": 0.1, "min_units": 30, **rails}),  # type: ignore[arg-type]
    )


class _Feed:
    """A ledger in memory, which all servers share."""

    def __init__(self, rows: list[Observation], tally: Tally) -> None:
        self._rows, self._tally, self._read = rows, tally, 0
        self.num_looks = 0

    def advance(self, now: datetime) -> int:
        first = self._read
        while self._read < len(self._rows) and self._rows[self._read].at <= now.timestamp():
            self._tally.add(self._rows[self._read])
            self._read += 1
        self.num_looks += 1
        return self._read - first

    def next_at(self, after: datetime) -> datetime | None:
        return next(
            (at for row in self._rows if (at := datetime.fromtimestamp(row.at, UTC)) > after), None
        )


def _open(rows: list[Observation], of: Experiment) -> CanaryRun:
    return CanaryRun(of, lambda tally: _Feed(rows, tally), max_draft_tokens=4)


def _live(
    of: Experiment, candidate: Truth, *, seed: int, num_minutes: int = 400, per_minute: int = 40
) -> tuple[CanaryRun, list[Observation], list[Stage]]:
    """Traffic whose shares are those of the stage that it runs in."""
    rng, rows = random.Random(seed), list[Observation]()
    run = _open(rows, of)
    stages = [run.stage]
    for minute in range(num_minutes):
        now = STARTED_AT + minute * _MINUTE
        weights = of.with_share(run.stage.share).weights
        for index in range(per_minute):
            at = now.timestamp() + 60 * index / per_minute
            variant = assign(f"{seed}".encode(), f"{minute}-{index}", weights)
            truth = candidate if variant == "candidate" else Truth()
            accepted = 1.2 * truth.acceptance + rng.gauss(0, 0.4)
            rows.append(
                Observation(
                    variant=variant,
                    unit=f"{minute}-{index}",
                    at=at,
                    is_failed=rng.random() < truth.failure_rate,
                    accepted_per_step=min(max(accepted, 0.0), 4.0),
                    seconds_per_token=0.02,
                )
            )
        decision = run.look(now + _MINUTE)
        if run.stage != stages[-1]:
            stages.append(run.stage)
        if decision.action is not Action.CONTINUE:
            break
    return run, rows, stages


def test_a_better_candidate_gets_more_and_more_and_is_promoted_at_the_end() -> None:
    run, _, stages = _live(_experiment(), Truth(acceptance=1.4), seed=1)
    assert [stage.share for stage in stages] == [0.01, 0.05, 0.25, 0.5]
    assert run.decision.action is Action.PROMOTE
    assert run.decision.rule.startswith("acceptance gained for certain")


def test_a_bad_candidate_ends_before_many_had_it() -> None:
    run, rows, stages = _live(_experiment(), Truth(acceptance=0.4), seed=1)
    assert run.decision.action is Action.ROLL_BACK
    assert len(stages) < 4
    assert sum(row.variant == "candidate" for row in rows) < 0.1 * len(rows)


@pytest.mark.thorough
def test_false_promotions_and_rollbacks_are_as_rare_as_promised() -> None:
    """All stages together: each has its part of alpha."""
    num_runs = 40
    found: Counter[Action] = Counter()
    num_at_the_end = 0
    for seed in range(num_runs):
        run, _, stages = _live(
            _experiment(max_acceptance_loss=0.0), Truth(), seed=seed, num_minutes=150, per_minute=60
        )
        found[run.decision.action] += 1
        num_at_the_end += len(stages) == 4
    assert num_at_the_end > num_runs / 3, "hardly anything was tried"
    allowed = 0.1 + 3 * math.sqrt(0.1 * 0.9 / num_runs)
    assert found[Action.PROMOTE] / num_runs <= allowed
    assert found[Action.ROLL_BACK] / num_runs <= allowed


def test_whoever_looks_whenever_goes_through_the_same_stages_at_the_same_instants() -> None:
    run, rows, stages = _live(_experiment(), Truth(acceptance=1.4), seed=3)
    end = STARTED_AT + timedelta(days=2)
    at_once = _open(rows, _experiment())
    assert at_once.look(end) == run.decision
    assert at_once.stage == run.stage
    now, seldom, seen = STARTED_AT, _open(rows, _experiment()), list[Stage]()
    while now < end:
        now += timedelta(seconds=1000)
        seldom.look(now)
        seen.append(seldom.stage)
    assert seldom.stage == run.stage
    assert set(seen) <= set(stages)


class _Sleepless(_Feed):
    """Always has something new to say, so that no look is left out."""

    def next_at(self, after: datetime) -> datetime | None:
        return after


@pytest.mark.parametrize("slot_seconds", [None, thorough(240.0)])
def test_looks_that_would_see_nothing_new_are_left_out_and_nothing_else_changes(
    slot_seconds: float | None,
) -> None:
    of = replace(_experiment(min_slot_requests=5), slot_seconds=slot_seconds)
    _, rows, _ = _live(of, Truth(acceptance=1.1), seed=3, num_minutes=90)
    night = timedelta(hours=9).total_seconds()
    rows = [row if row.at % 7200 < 3600 else replace(row, at=row.at + night) for row in rows]
    rows.sort(key=lambda row: row.at)
    feeds: list[_Feed] = []

    def open_feed(kind: type[_Feed]) -> CanaryRun:
        def reader(tally: Tally) -> _Feed:
            feeds.append(kind(rows, tally))
            return feeds[-1]

        return CanaryRun(of, reader, max_draft_tokens=4)

    end = STARTED_AT + timedelta(days=1)
    skipping, sleepless = open_feed(_Feed), open_feed(_Sleepless)
    for hour in (1, 3, 11, 24):
        now = STARTED_AT + timedelta(hours=hour)
        assert skipping.look(now) == sleepless.look(now)
        assert skipping.stage == sleepless.stage
    looks = [sum(f.num_looks for f in feeds if type(f) is kind) for kind in (_Feed, _Sleepless)]
    assert looks[0] < looks[1] / 4
    assert skipping.look(end) == sleepless.look(end)


def test_requests_of_the_stage_before_are_no_evidence() -> None:
    """While a share changes, servers disagree for a look; two looks are not counted."""
    run, rows, stages = _live(_experiment(), Truth(acceptance=1.4), seed=3)
    counted_from = stages[-1].began_at + 2 * _MINUTE
    expected = sum(r.at >= counted_from.timestamp() for r in rows)
    assert sum(arm.num_requests for arm in run.tally.counts().values()) == expected > 0


_FILE = """
name = "trial"
started_at = 2026-11-30T00:00:00Z
promote = "automatic"
canary = [0.3, 0.5]
canary_check_seconds = 60
[[variant]]
name = "control"
drafters = ["head:chat"]
weight = 0.9
[[variant]]
name = "candidate"
drafters = ["head:chat@0002"]
weight = 0.1
[guard_rails]
min_units = 20
"""


class _Servers:
    """Some servers of one ledger and one registry, each with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"sqlite:///{folder}/ledger.db"
        migrate(self.url)
        (folder / "experiment.toml").write_text(_FILE)
        self.registry = HeadRegistry(folder / "registry")
        for content in ("old", "new"):
            head = folder / content
            head.mkdir()
            for name in ("config.json", "model.safetensors"):
                (head / name).write_text(content)
            self.registry.register(head, "chat")
        self.registry.promote("chat", "0001")
        self.now = STARTED_AT
        self.servers = [self.start(f"server {index}") for index in range(3)]

    def start(self, home: str) -> tuple[LiveExperiments, ExperimentWatch]:
        store = RollbackStore(self._folder / home)
        live = LiveExperiments(self._folder / "experiment.toml", store, 4)
        live.take(live.read(), DrafterNames())
        watch = ExperimentWatch(
            live,
            lambda: open_ledger(self.url, read_only=True),
            max_draft_tokens=4,
            interval_seconds=30,
            promote=lambda of, decision: promote_candidate(self.registry, of, decision),
            clock=lambda: self.now,
        )
        return live, watch

    def serve(self, minute: int, accepted: int) -> None:
        """A minute of requests, spread over the servers, each assigning by what it knows."""
        rows = []
        for index in range(30):
            live, _ = self.servers[index % len(self.servers)]
            assert live.running is not None
            request_id = f"{minute}-{index}"
            variant = assign(live.running.hash_key, request_id, live.running.weights)
            count = (accepted if variant == "candidate" else 10) + index % 3
            record = request_record(
                request_id,
                variant=variant,
                counts=TokenCounts(num_verify_steps=10, num_accepted_tokens=count),
                latency=LatencySummary(2.0, 0.25, 0.5, 0.01, 0.02),
            )
            rows.append(replace(record, started_at=self.now, finished_at=self.now))
        engine = open_ledger(self.url)
        LedgerStore(engine).write(rows, may_exist=False)
        with engine.begin() as connection:  # the ledger's clock is this test's
            connection.exec_driver_sql(
                "UPDATE requests SET recorded_at = started_at WHERE recorded_at > started_at"
            )
        engine.dispose()


async def _run(servers: _Servers, accepted: int) -> list[tuple[int, set[float]]]:
    """(minute, the candidate's shares) whenever the servers have looked."""
    seen = []
    for minute in range(120):
        servers.serve(minute, accepted)
        servers.now += _MINUTE
        for index, (_, watch) in enumerate(servers.servers):
            if index == 0 or (minute + index) % 2 == 0:  # not all look every time
                await watch.look()
        running = [live.running for live, _ in servers.servers]
        seen.append((minute, {r.weights["candidate"] for r in running if r is not None}))
        if seen[-1][1] == {0.0}:
            break
    for _, watch in servers.servers:
        await watch.stop()
    return seen


async def test_several_servers_promote_once_and_a_rollback_by_people_holds(tmp_path: Path) -> None:
    servers = _Servers(tmp_path)
    seen = await _run(servers, accepted=35)
    assert seen[-1][1] == {0.0}, "it did not end"
    pointer = servers.registry.pointer("chat")
    assert (pointer.current, pointer.history) == ("0002", ("0001",)), "once"
    assert pointer.reason["experiment"].startswith("trial 2026-11-30")
    assert "acceptance gained for certain" in pointer.reason["rule"]
    shares = {share for _, at_once in seen for share in at_once}
    assert shares == {0.1, 0.3, 0.5, 0.0}
    assert servers.registry.rollback("chat").current == "0001"
    late, watch = servers.start("a new server without a memory")
    await watch.look()
    await watch.stop()
    assert late.running is not None
    assert late.running.weights["candidate"] == 0.0
    assert servers.registry.pointer("chat").current == "0001", "people's word is the last one"


async def test_a_candidate_that_loses_is_rolled_back_by_all_and_promoted_by_none(
    tmp_path: Path,
) -> None:
    servers = _Servers(tmp_path)
    seen = await _run(servers, accepted=1)
    assert seen[-1][1] == {0.0}
    assert servers.registry.pointer("chat").current == "0001"
    for live, _ in servers.servers:
        assert list(live.variants) == ["control"]


async def test_a_share_is_that_of_its_own_experiment(tmp_path: Path) -> None:
    """Read anew while a look is under way: the look's share must not reach the new file."""
    servers = _Servers(tmp_path)
    live, watch = servers.servers[0]
    old = live.as_read
    assert old is not None
    (tmp_path / "experiment.toml").write_text(_FILE.replace("trial", "another"))
    live.take(live.read(), DrafterNames())
    live.set_share(0.5, old)
    assert live.running is not None
    assert live.running.weights["candidate"] == 0.1
    live.set_share(0.5, live.as_read)  # type: ignore[arg-type]
    assert live.running.weights["candidate"] == 0.5
    # Taken away and put back, the experiment begins at the file's share, and follows its stage.
    text = (tmp_path / "experiment.toml").read_text()
    (tmp_path / "experiment.toml").unlink()
    live.take(live.read(), DrafterNames())
    (tmp_path / "experiment.toml").write_text(text)
    live.take(live.read(), DrafterNames())
    assert live.running.weights["candidate"] == 0.1
    await watch.stop()


async def test_no_server_looks_more_seldom_than_a_stage_takes_to_settle(tmp_path: Path) -> None:
    servers = _Servers(tmp_path)
    live, _ = servers.servers[0]
    watch = ExperimentWatch(
        live,
        lambda: open_ledger(servers.url, read_only=True),
        max_draft_tokens=4,
        interval_seconds=3600,
    )
    assert watch._pause_seconds == 60
    (tmp_path / "experiment.toml").unlink()
    live.take(live.read(), DrafterNames())
    assert watch._pause_seconds == 3600


def test_status_and_report_say_which_stage_it_is_in(tmp_path: Path) -> None:
    servers = _Servers(tmp_path)
    for minute in range(4):
        servers.serve(minute, accepted=12)
        servers.now += _MINUTE
    for command in ("status", "report"):
        told = CliRunner().invoke(
            cli_experiment.app,
            [command, str(tmp_path / "experiment.toml"), "--ledger", servers.url],
            env={"TANDEM_HOME": str(tmp_path / "home")},
        )
        assert told.exit_code == 0, told.output
        assert "romotes by itself: stage 1 of 3, 10% of the requests" in told.output


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('promote = "automatic"', 'promote = "perhaps"', "promote"),
        ("[0.3, 0.5]", "[0.5, 0.3]", "canary"),
        ("[0.3, 0.5]", "0.3", "canary"),
        ("[0.3, 0.5]", "[0.3, 1.0]", "canary"),
        ("= 60", "= 0", "canary_check_seconds"),
        ('["head:chat@0002"]', '["head:chat"]', "promote"),
        ('["head:chat"]', '["head:other"]', "promote"),
        ("weight = 0.1", "weight = 0", "weight"),
    ],
)
def test_what_cannot_promote_by_itself_is_refused_by_field(
    tmp_path: Path, old: str, new: str, field: str
) -> None:
    assert old in _FILE
    (tmp_path / "experiment.toml").write_text(_FILE.replace(old, new))
    with pytest.raises(ExperimentError, match=f"{field}:"):
        read_experiment(tmp_path / "experiment.toml")
