"""How many tokens each row may draft: the goodput controller.

Every row has an estimate of alpha, the probability that a draft is accepted given that those
before it were. A verification of K drafts that accepts n is n successes and, unless all K were
accepted, one failure: a full acceptance is censored and says nothing of the draft after it.
Old observations fade, so a row that turns from code to prose is noticed; what little is known
of a row is completed by the average of all rows. Each drafter has estimates of its own, and
those of whoever would draft in the coming step count: where a lookup has found something, its
drafts are free and mostly right; where it has not, a model's cost time.

Drafting starts when it promises a clear gain and ends when there is none left, so the choice
does not flip with every step. While a row does not draft it is probed now and then with a
single draft, all idle rows in the same step, and never for more than a small share of the time:
smaller still where the tables say that even perfect drafts would gain little, so that a large batch
on a machine without room to spare does not pay for what it can never win.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.cost_table import CostTable
from engine.goodput import DraftSource, RowOutlook, StepCosts, plan_drafts
from engine.live_request import LiveRequest
from engine.request import SpeculationMode
from engine.stats import StepStats

_PRIOR_ALPHA = 0.6  # before anything was drafted
_GAIN_TO_START = 1.02
_GAIN_TO_STAY = 1.0
_PROBE_SHARE = 0.02  # of the time
_PROBE_SHARE_OF_GAIN = 0.1  # and no more of the most that drafting could gain


@dataclass(slots=True)
class AcceptanceEstimate:
    """Accepted and refused drafts; each verification fades all earlier ones by `fade`."""

    fade: float = 0.97
    num_accepted: float = 0.0
    num_refused: float = 0.0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.num_accepted = self.fade * self.num_accepted + num_accepted
        self.num_refused = self.fade * self.num_refused + (num_accepted < num_drafts)

    def alpha(self, prior: float, prior_weight: float) -> float:
        """The estimate, with `prior` counting as prior_weight observations."""
        weight = self.num_accepted + self.num_refused + prior_weight
        return (self.num_accepted + prior * prior_weight) / weight


@dataclass(slots=True)
class CostFeedback:
    """What steps really cost, beside what the tables say; both averages fade.

    plain_factor: time over predicted time of steps without drafts. draft_token_seconds: what a
    draft costs beyond its prediction, in the table's seconds.
    """

    fade: float = 0.9
    plain_factor: float = 1.0
    draft_token_seconds: float = 0.0
    num_plain: int = 0
    num_drafting: int = 0

    def observe_plain(self, seconds: float, predicted: float) -> None:
        factor = seconds / predicted
        fade = self.fade if self.num_plain else 0.0
        self.num_plain += 1
        self.plain_factor = fade * self.plain_factor + (1 - fade) * factor

    def observe_drafting(self, seconds: float, predicted: float, num_drafts: int) -> None:
        """predicted: by the tables alone. Without a plain step to compare with nothing is known."""
        if not self.num_plain:
            return
        extra = (seconds / self.plain_factor - predicted) / num_drafts
        fade = self.fade if self.num_drafting else 0.0
        self.num_drafting += 1
        self.draft_token_seconds = max(0.0, fade * self.draft_token_seconds + (1 - fade) * extra)


_SOME_DRAFTER = DraftSource("", is_free=False)
_ROW_PRIOR_WEIGHT = 4.0
_ALL_ROWS_PRIOR_WEIGHT = 4.0


class DraftLengths:
    """Chooses K of every decoding row and learns from what was accepted."""

    def __init__(
        self,
        max_draft_tokens: int,
        costs: StepCosts,
        foresee: Callable[[LiveRequest], DraftSource | None] = lambda live: _SOME_DRAFTER,
    ) -> None:
        """foresee: who would draft for a row now, None if nobody."""
        self._foresee = foresee
        self.max_draft_tokens = max_draft_tokens
        self._tables = costs
        self._feedback = CostFeedback()
        self._estimates: dict[str, dict[str, AcceptanceEstimate]] = {}  # by request and drafter
        self._all_rows: dict[str, AcceptanceEstimate] = {}  # by drafter
        self._is_drafting = True
        self._probe_seconds = 0.0  # that may be spent on probes
        self._min_reach = 0.0

    @property
    def costs(self) -> StepCosts:
        """The tables, corrected by what steps were seen to cost."""
        return replace(self._tables, draft_token_seconds=self._feedback.draft_token_seconds)

    def change_drafters(self, max_draft_tokens: int, costs: CostTable | None) -> None:
        """Other drafters from now on. costs: of the dearest of them; None if all are free."""
        self.max_draft_tokens = max_draft_tokens
        self._tables = replace(self._tables, drafter=costs)

    def observe_step(self, step: StepStats) -> None:
        """Learn from what a step of decoding rows alone took."""
        if not step.rows or any(row.num_prefill_positions for row in step.rows):
            return
        num_drafts = sum(row.num_draft_positions for row in step.rows)
        num_tokens = len(step.rows) + num_drafts
        seconds = step.duration_nanoseconds / 1e9
        by_model = [row.num_draft_positions for row in step.rows if row.num_drafter_positions]
        num_drafting, deepest = len(by_model), max(by_model, default=0)
        predicted = self._tables.step_seconds(num_tokens, num_drafting, deepest)
        if num_drafts:
            self._feedback.observe_drafting(seconds, predicted, num_drafts)
        elif not num_drafting:
            self._feedback.observe_plain(seconds, predicted)

    def min_reach(self, live: LiveRequest) -> float:
        """Below this probability of being accepted, verifying a further draft of this request
        costs more time in the coming step than it saves; 0 where drafting is not ours to judge."""
        is_auto = live.request.speculation.mode is SpeculationMode.AUTO
        return self._min_reach if is_auto else 0.0

    def choose(self, rows: Sequence[LiveRequest], num_other_tokens: int = 0) -> dict[str, int]:
        """K for the next step by request id; num_other_tokens share the forward."""
        chosen: dict[str, int] = {}
        outlooks: dict[str, RowOutlook] = {}
        for live in rows:
            cap = self._cap(live)
            if live.request.speculation.mode is SpeculationMode.AUTO and cap:
                outlooks[live.request_id] = self._outlook(live, cap)
            else:
                chosen[live.request_id] = cap
                num_other_tokens += 1 + cap
        if outlooks:
            chosen.update(self._choose_together(outlooks, num_other_tokens))
        return chosen

    def expected_tokens(self, live: LiveRequest) -> float:
        """What a verification of as many drafts as the request may have should emit."""
        outlook = self._outlook(live, self._cap(live))
        return sum(outlook.alpha**depth for depth in range(outlook.max_drafts + 1))

    def _outlook(self, live: LiveRequest, cap: int) -> RowOutlook:
        source = self._foresee(live) if cap else None
        if source is None:
            return RowOutlook(0.0, 0)
        everyone = self._all_rows.setdefault(source.drafter, AcceptanceEstimate(fade=0.995))
        prior = everyone.alpha(_PRIOR_ALPHA, _ALL_ROWS_PRIOR_WEIGHT)
        estimate = self._estimates.get(live.request_id, {}).get(source.drafter)
        alpha = estimate.alpha(prior, _ROW_PRIOR_WEIGHT) if estimate is not None else prior
        return RowOutlook(alpha, cap, source.is_free)

    def _cap(self, live: LiveRequest) -> int:
        wanted = live.request.speculation
        if wanted.mode is SpeculationMode.OFF:
            return 0
        if wanted.max_draft_tokens is None:
            return self.max_draft_tokens
        return min(self.max_draft_tokens, wanted.max_draft_tokens)

    def _choose_together(
        self, outlooks: dict[str, RowOutlook], num_other_tokens: int
    ) -> dict[str, int]:
        plan = plan_drafts(outlooks, self.costs, num_other_tokens)
        needed = _GAIN_TO_STAY if self._is_drafting else _GAIN_TO_START
        self._is_drafting = plan.gain > needed
        drafts = plan.num_drafts if self._is_drafting else dict.fromkeys(outlooks, 0)
        self._min_reach = self._price_of_a_draft(drafts, plan.gain, num_other_tokens)
        idle = [key for key, count in drafts.items() if not count and outlooks[key].max_drafts]
        caps = [outlooks[key].max_drafts for key in idle]
        if idle and self._may_probe(drafts, caps, num_other_tokens):
            drafts.update(dict.fromkeys(idle, 1))
        return drafts

    def _price_of_a_draft(
        self, drafts: dict[str, int], gain: float, num_other_tokens: int
    ) -> float:
        """Tokens that the step's goodput emits in the time that one more draft takes to verify."""
        num_drafts = sum(drafts.values())
        if not num_drafts:
            return 0.0
        costs = self.costs
        num_tokens = len(drafts) + num_other_tokens
        plain_seconds = costs.target.forward_seconds(num_tokens)
        seconds = costs.target.forward_seconds(num_tokens + num_drafts) - plain_seconds
        per_draft = seconds / num_drafts + costs.draft_token_seconds
        return gain * len(drafts) / plain_seconds * per_draft

    def _may_probe(
        self, drafts: dict[str, int], caps: Sequence[int], num_other_tokens: int
    ) -> bool:
        """Whether enough time has passed for a step that also drafts one token per idle row.
        caps: the most that each of these may draft."""
        num_tokens = num_other_tokens + len(drafts) + sum(drafts.values())
        num_drafting = len(drafts) - len(caps)
        deepest = max(drafts.values())
        seconds = self._tables.step_seconds(num_tokens, num_drafting, deepest)
        probe = self._tables.step_seconds(num_tokens + len(caps), len(drafts), max(1, deepest))
        probe += len(caps) * self._feedback.draft_token_seconds
        most = self._most_to_gain(drafts, sum(caps), num_other_tokens)
        self._probe_seconds += min(_PROBE_SHARE, _PROBE_SHARE_OF_GAIN * most) * seconds
        if self._probe_seconds < probe - seconds:
            return False
        self._probe_seconds = 0.0
        return True

    def _most_to_gain(
        self, drafts: dict[str, int], most_drafts: int, num_other_tokens: int
    ) -> float:
        """The share by which goodput could grow if all drafts of the idle rows were right.

        Between two measured points of the table the time is linear in the drafts, and so the
        quotient is largest at one of them or at an end. What drafting itself takes is left out.
        """
        costs = self.costs
        num_tokens = num_other_tokens + len(drafts) + sum(drafts.values())
        seconds = costs.target.forward_seconds(num_tokens)
        points = [n - num_tokens for n in costs.target.num_tokens if n > num_tokens]
        counts = {1, most_drafts, *(n for n in points if n < most_drafts)}
        num_rows = len(drafts)
        best = max(
            (num_rows + n)
            / (costs.target.forward_seconds(num_tokens + n) + n * costs.draft_token_seconds)
            for n in counts
        )
        return max(0.0, best * seconds / num_rows - 1)

    def observe(self, live: LiveRequest, num_drafts: int, num_accepted: int) -> None:
        """Learn from one verification of drafts of live.drafter."""
        if not num_drafts or live.request.speculation.mode is not SpeculationMode.AUTO:
            return
        of_request = self._estimates.setdefault(live.request_id, {})
        of_request.setdefault(live.drafter, AcceptanceEstimate()).observe(num_drafts, num_accepted)
        everyone = self._all_rows.setdefault(live.drafter, AcceptanceEstimate(fade=0.995))
        everyone.observe(num_drafts, num_accepted)

    def forget(self, request_id: str) -> None:
        self._estimates.pop(request_id, None)
