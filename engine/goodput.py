"""How to spend draft tokens: the choice that maximises emitted tokens per second.

With probability alpha that a draft is accepted given that those before it were, a row that
drafts k tokens emits (1 - alpha^(k+1)) / (1 - alpha) on average (Leviathan et al. 2023):
its j-th draft adds alpha^j. Rows compete for the tokens of one forward, so the drafts of all
rows are ordered by what they add, and the best number of them is where emitted tokens over
the time of the step is highest. Nothing drafted is one of the choices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cost_table import CostTable


@dataclass(frozen=True, slots=True)
class RowOutlook:
    """What is known of a row: its acceptance probability, the most it may draft, and whether its
    drafts take no forward of a drafting model."""

    alpha: float
    max_drafts: int
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class DraftSource:
    """Who would draft for a row in the coming step. is_free: without a forward of any model."""

    drafter: str
    is_free: bool


@dataclass(frozen=True, slots=True)
class StepCosts:
    """target: a verification. drafter: one drafting forward, by rows; None if it is free.

    row_seconds is what proposing costs per row, whatever its length. draft_token_seconds is
    what verifying a draft was seen to cost beyond the target's table, which knows the number
    of tokens and neither the length of contexts nor how unequal the rows are.
    """

    target: CostTable
    drafter: CostTable | None = None
    row_seconds: float = 0.0
    draft_token_seconds: float = 0.0

    def step_seconds(
        self, num_tokens: int, num_drafting_rows: int, num_draft_forwards: int
    ) -> float:
        return self.target.forward_seconds(num_tokens) + self.draft_seconds(
            num_drafting_rows, num_draft_forwards
        )

    def draft_seconds(self, num_drafting_rows: int, num_draft_forwards: int) -> float:
        seconds = self.row_seconds * num_drafting_rows
        if self.drafter is not None and num_draft_forwards:
            seconds += num_draft_forwards * self.drafter.forward_seconds(num_drafting_rows)
        return seconds


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """num_drafts per row; gain is the goodput over that of drafting nothing."""

    num_drafts: dict[str, int]
    gain: float


def plan_drafts(
    rows: Mapping[str, RowOutlook], costs: StepCosts, num_other_tokens: int = 0
) -> DraftPlan:
    """The best number of drafts for every row.

    num_other_tokens are in the forward anyway: prompts in chunks, rows that do not speculate.
    """
    if not rows:
        return DraftPlan({}, 1.0)
    marginal = sorted(
        (-(outlook.alpha**depth), depth, row)
        for row, outlook in rows.items()
        for depth in range(1, outlook.max_drafts + 1)
    )
    num_tokens = len(rows) + num_other_tokens
    verify_seconds = [
        costs.target.forward_seconds(num_tokens + count) + count * costs.draft_token_seconds
        for count in range(len(marginal) + 1)
    ]
    plain = len(rows) / costs.step_seconds(num_tokens, 0, 0)
    best, best_count, best_depth = plain, 0, 0
    # A drafting forward serves all rows at once, so its depth is chosen for all that need it.
    for limit in _depths(rows, costs):
        emitted, count = float(len(rows)), 0
        drafting: set[str] = set()
        by_model: set[str] = set()
        for negative_gain, depth, row in marginal:
            if not rows[row].is_free and depth > limit:
                continue
            emitted -= negative_gain
            count += 1
            (drafting if rows[row].is_free else by_model).add(row)
            seconds = verify_seconds[count] + costs.row_seconds * len(drafting)
            if by_model:
                seconds += costs.draft_seconds(len(by_model), limit)
            if emitted > best * seconds:
                best, best_count, best_depth = emitted / seconds, count, limit
    marginal = [m for m in marginal if rows[m[2]].is_free or m[1] <= best_depth]
    chosen = dict.fromkeys(rows, 0)
    for _, depth, row in marginal[:best_count]:
        chosen[row] = depth
    return DraftPlan(chosen, best / plain)


def _depths(rows: Mapping[str, RowOutlook], costs: StepCosts) -> range:
    """How many drafting forwards are worth a thought."""
    deepest = max((r.max_drafts for r in rows.values() if not r.is_free), default=0)
    return range(deepest + 1) if costs.drafter is not None else range(deepest, deepest + 1)
