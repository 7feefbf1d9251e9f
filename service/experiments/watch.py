"""Looks after a running experiment: reads its rows now and then, judges, rolls back."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

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
    """

    def __init__(
        self,
        experiments: LiveExperiments,
        open_ledger: Callable[[], Engine],
        *,
        max_draft_tokens: int,
        interval_seconds: float,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
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
        running = self._experiments.running
        if running is None:
            return {}
        now = self._clock()
        try:
            decisions = await asyncio.to_thread(self._judge, running, now)
        except SQLAlchemyError as error:
            _log.warning("the experiment was not looked at: %s", getattr(error, "orig", error))
            if self._ledger is not None:
                self._ledger.dispose()  # its connections may be to what is no longer there
            return {}
        for name, decision in decisions.items():
            if decision.action is Action.ROLL_BACK:
                self._experiments.roll_back(
                    RollbackRecord(
                        experiment=running.name,
                        started_at=running.started_at.isoformat(),
                        variant=name,
                        rule=decision.rule,
                        at=now.isoformat(timespec="seconds"),
                    )
                )
            elif decision.action is Action.PROMOTE and self._said.get(name) is not Action.PROMOTE:
                _log.info(
                    "experiment %s: candidate %s can be promoted: %s",
                    running.name, name, decision.rule,
                )  # fmt: skip
            self._said[name] = decision.action
        return decisions

    def _judge(self, running: Experiment, now: datetime) -> dict[str, Decision]:
        tally = self._advance(running, now)
        rails = running.guard_rails
        return {
            candidate.name: judge(
                tally.evidence(candidate.name, now.timestamp()), rails, tally.alpha_per_test
            )
            for candidate in running.candidates
            if candidate.weight > 0
        }

    def _advance(self, running: Experiment, now: datetime) -> Tally:
        if self._ledger is None:
            self._ledger = self._open_ledger()
        as_read = self._experiments.as_read or running
        if self._tally is None or self._reader is None or self._of != as_read:
            self._of = as_read
            self._said.clear()
            self._tally = Tally(as_read, max_draft_tokens=self._max_draft_tokens)
            self._reader = LedgerReader(self._ledger, self._tally)
        self._reader.advance(now)
        return self._tally

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.look()
            except Exception:
                _log.exception("the experiment was not looked at")
