"""An experiment that promotes by itself: the candidate's share rises while every rail holds.

The file's own weights are the first stage, the shares of `canary` follow. Each stage is judged on
its own requests: shares differ between stages and traffic between hours, so that arms must not be
compared across them. The stages share alpha. A rail that breaks rolls back at any stage; a stage
with enough observations, in which the candidate does not lose, is followed by the next; in the
last one the candidate is promoted when it surely gains, as `judge` says.

Nothing is agreed upon between servers. They look at the same instants, every
canary_check_seconds since the start, at the rows that were in the ledger by then, so that all of
them, and one that starts later, go through the same stages at the same instants. A stage counts
requests from two looks after its beginning, when every server has taken the share over.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from service.experiments.guard_rails import ACCEPTANCE, Action, Decision, judge
from service.experiments.specification import Experiment
from service.experiments.tally import Tally

_LOOKS_TO_SETTLE = 2
_SLOTS_TO_CLOSE = 3  # after its last request a slot's figures change no more


class Reader(Protocol):
    """Feeds the tally that it was made with."""

    def advance(self, now: datetime) -> int:
        """Everything that was recorded by `now` and not read yet; how many requests."""
        ...

    def next_at(self, after: datetime) -> datetime | None:
        """The first instant at which there is more to read than at `after`; None without any."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """index counts from 0; share: the candidate's; began_at: UTC."""

    index: int
    num_stages: int
    share: float
    began_at: datetime

    @property
    def said(self) -> str:
        return f"stage {self.index + 1} of {self.num_stages}, {self.share:.0%} of the requests"


class CanaryRun:
    """One start of an experiment, from its first request on.

    open_reader: over the ledger, for the tally of a stage.
    """

    def __init__(
        self,
        experiment: Experiment,
        open_reader: Callable[[Tally], Reader],
        *,
        max_draft_tokens: int,
    ) -> None:
        self.experiment = experiment
        self._open_reader = open_reader
        self._max_draft_tokens = max_draft_tokens
        self._shares = experiment.shares
        self._looked_at = self._busy_at = experiment.started_at
        self._end: Decision | None = None
        self._stage, self.tally, self._reader = self._begin(0, experiment.started_at)
        self.decision = self._judge(experiment.started_at)

    @property
    def stage(self) -> Stage:
        return self._stage

    def look(self, now: datetime) -> Decision:
        """Make every look that is due by `now`; CONTINUE leaves the stage as it is now, anything
        else is the end. Raises what reading raises, and goes on from there the next time."""
        step = timedelta(seconds=self.experiment.canary_check_seconds)
        while self._end is None and self._looked_at + step <= now:
            at = self._looked_at + step
            if self._reader.advance(at):
                self._busy_at = at
            self._looked_at = at
            self.decision = self._judge(at)
            self._act(at)
            self._skip(now, step)
        return self.decision

    def _skip(self, now: datetime, step: timedelta) -> None:
        """Past the looks that would see nothing new: nights, and the time since an old start."""
        slots = self.experiment.slots
        open_for = timedelta(seconds=_SLOTS_TO_CLOSE * slots.slot_seconds if slots else 0)
        if self._end is not None or self._looked_at <= self._busy_at + open_for:
            return
        until = self._reader.next_at(self._looked_at)
        num = (now - self._looked_at) // step
        if until is not None:
            num = min(num, -((self._looked_at - until) // step) - 1)
        self._looked_at += max(0, num) * step

    def _act(self, at: datetime) -> None:
        is_last = self._stage.index + 1 == len(self._shares)
        if self.decision.action is Action.ROLL_BACK or (
            self.decision.action is Action.PROMOTE and is_last
        ):
            self._end = self.decision
            return
        if self.decision.action is Action.PROMOTE:  # sure already, but not of so many requests
            self.decision = replace(self.decision, action=Action.CONTINUE)
        if not is_last and self._looks_well():
            self._stage, self.tally, self._reader = self._begin(self._stage.index + 1, at)

    def _looks_well(self) -> bool:
        """Enough observations, and no loss among them; certainty is the last stage's."""
        effect = next(f.effect for f in self.decision.findings if f.rail == ACCEPTANCE)
        tolerated = self.experiment.guard_rails.max_acceptance_loss
        return effect is not None and effect.estimate >= -tolerated

    def _begin(self, index: int, at: datetime) -> tuple[Stage, Tally, Reader]:
        of = self.experiment
        settled_at = at
        if index:
            settled_at += timedelta(seconds=_LOOKS_TO_SETTLE * of.canary_check_seconds)
        rails = replace(of.guard_rails, alpha=of.guard_rails.alpha / len(self._shares))
        stage = replace(
            of.with_share(self._shares[index]), started_at=settled_at, guard_rails=rails
        )
        tally = Tally(stage, max_draft_tokens=self._max_draft_tokens)
        found = Stage(index, len(self._shares), self._shares[index], at)
        return found, tally, self._open_reader(tally)

    def _judge(self, at: datetime) -> Decision:
        of = self.tally.experiment
        evidence = self.tally.evidence(of.candidates[0].name, at.timestamp())
        return judge(evidence, of.guard_rails, self.tally.alpha_per_test)
