"""Looks after a running experiment: reads its rows now and then, judges, rolls back, promotes."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from service.experiments.canary import CanaryRun, Stage
from service.experiments.guard_rails import Action, Decision, judge
from service.experiments.ledger_reader import LedgerReader
from service.experiments.live import LiveExperiments
from service.experiments.records import RollbackRecord
from service.experiments.specification import Experiment
from service.experiments.tally import Tally

_log = logging.getLogger(__name__)


class ExperimentWatch:
    """The guard rails of a server, over the ledger that it and its siblings write.

    open_ledger: a read-only engine. A database that is away delays a decision and changes none.
    promote: makes a candidate the version in use, in a thread; raises ValueError or OSError.
    """

    def __init__(
        self,
        experiments: LiveExperiments,
        open_ledger: Callable[[], Engine],
        *,
        max_draft_tokens: int,
        interval_seconds: float,
        promote: Callable[[Experiment, Decision], object] | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._promote = promote or _nowhere
        self._experiments = experiments
        self._open_ledger = open_ledger
        self._max_draft_tokens = max_draft_tokens
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._ledger: Engine | None = None
        self._of: Experiment | None = None
        self._tally: Tally | None = None
        self._reader: LedgerReader | None = None
        self._said: dict[str, Action] = {}
        self._canary: CanaryRun | None = None
        self._stage: Stage | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._ledger is not None:
            self._ledger.dispose()

    async def look(self) -> dict[str, Decision]:
        """Read what is new and act on it; the decision of each candidate that has a share."""
        running, as_read = self._experiments.running, self._experiments.as_read
        if running is None or as_read is None:
            return {}
        now = self._clock()
        try:
            decisions = await asyncio.to_thread(self._judge, running, as_read, now)
        except SQLAlchemyError as error:
            _log.warning("the experiment was not looked at: %s", getattr(error, "orig", error))
            if self._ledger is not None:
                self._ledger.dispose()  # its connections may be to what is no longer there
            return {}
        self._follow_stage()
        for name, decision in decisions.items():
            is_automatic = running.promote == "automatic"
            if decision.action is Action.ROLL_BACK:
                self._end(running, name, decision, now)
            elif decision.action is Action.PROMOTE and is_automatic:
                await self._promote_by_itself(running, name, decision, now)
            elif decision.action is Action.PROMOTE and self._said.get(name) is not Action.PROMOTE:
                _log.info(
                    "experiment %s: candidate %s can be promoted: %s",
                    running.name, name, decision.rule,
                )  # fmt: skip
            self._said[name] = decision.action
        return decisions

    def _end(
        self, running: Experiment, name: str, decision: Decision, now: datetime,
        is_promoted: bool = False,
    ) -> None:  # fmt: skip
        self._experiments.roll_back(
            RollbackRecord(
                experiment=running.name,
                started_at=running.started_at.isoformat(),
                variant=name,
                rule=decision.rule,
                at=now.isoformat(timespec="seconds"),
                is_promoted=is_promoted,
            )
        )

    async def _promote_by_itself(
        self, running: Experiment, name: str, decision: Decision, now: datetime
    ) -> None:
        try:
            await asyncio.to_thread(self._promote, running, decision)
        except (OSError, ValueError) as error:
            _log.error("experiment %s: not promoted: %s", running.name, error)
        else:
            self._end(running, name, decision, now, is_promoted=True)

    def _follow_stage(self) -> None:
        canary = self._canary
        if canary is None:
            return
        self._experiments.set_share(canary.stage.share, canary.experiment)
        if canary.stage != self._stage:
            self._stage = canary.stage
            _log.info("experiment %s: %s", canary.experiment.name, self._stage.said)

    def _judge(
        self, running: Experiment, as_read: Experiment, now: datetime
    ) -> dict[str, Decision]:
        if running.promote == "automatic":
            candidate = running.candidates[0]
            if candidate.weight == 0:
                return {}
            return {candidate.name: self._canary_of(as_read).look(now)}
        self._canary = None
        tally = self._advance(as_read, now)
        rails = running.guard_rails
        return {
            candidate.name: judge(
                tally.evidence(candidate.name, now.timestamp()), rails, tally.alpha_per_test
            )
            for candidate in running.candidates
            if candidate.weight > 0
        }

    def _advance(self, as_read: Experiment, now: datetime) -> Tally:
        if self._ledger is None:
            self._ledger = self._open_ledger()
        if self._tally is None or self._reader is None or self._of != as_read:
            self._of = as_read
            self._said.clear()
            self._tally = Tally(as_read, max_draft_tokens=self._max_draft_tokens)
            self._reader = LedgerReader(self._ledger, self._tally)
        self._reader.advance(now)
        return self._tally

    def _canary_of(self, as_read: Experiment) -> CanaryRun:
        if self._ledger is None:
            self._ledger = self._open_ledger()
        ledger = self._ledger
        if self._canary is None or self._canary.experiment != as_read:
            self._stage = None
            self._canary = CanaryRun(
                as_read,
                lambda tally: LedgerReader(ledger, tally),
                max_draft_tokens=self._max_draft_tokens,
            )
        return self._canary

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                _log.exception("the experiment was not looked at")
            await asyncio.sleep(self._pause_seconds)

    @property
    def _pause_seconds(self) -> float:
        """A stage settles within two of an experiment's looks: no server may come later."""
        running = self._experiments.running
        if running is None or running.promote != "automatic":
            return self._interval_seconds
        return min(self._interval_seconds, running.canary_check_seconds)


def _nowhere(experiment: Experiment, decision: Decision) -> None:
    raise ValueError("this server has no registry")
