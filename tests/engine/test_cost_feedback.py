"""The controller learns what drafts cost where the tables are wrong about it."""

import random

from engine.cost_table import CostTable
from engine.goodput import StepCosts
from engine.live_request import LiveRequest
from engine.speculation import CostFeedback, DraftLengths
from engine.stats import RowStepStats, StepStats
from tests.engine.driver import request

FLAT = StepCosts(CostTable((1, 64), (0.050, 0.051)))  # says that drafts are nearly free
TRUE_SECONDS_PER_DRAFT = 0.030
NUM_ROWS = 8
ALPHA = 0.3


def step(num_drafts: dict[str, int], accepted: dict[str, int], seconds: float) -> StepStats:
    return StepStats(
        step_index=0,
        started_at=0.0,
        duration_nanoseconds=int(seconds * 1e9),
        propose_nanoseconds=0,
        verify_nanoseconds=0,
        align_nanoseconds=0,
        sample_nanoseconds=0,
        rows=tuple(
            RowStepStats(key, 0, 1, count, accepted[key], accepted[key] + 1, 0)
            for key, count in num_drafts.items()
        ),
        num_waiting=0,
        num_running=len(num_drafts),
        num_free_blocks=0,
        num_total_blocks=0,
        num_preemptions=0,
    )


def goodput(*, learns: bool) -> tuple[float, float]:
    """(tokens per second of the controller, of plain decoding) on a machine whose drafts cost."""
    lengths = DraftLengths(4, FLAT)
    lives = [LiveRequest(request(str(n), [5, 6], mode="auto"), [5, 6]) for n in range(NUM_ROWS)]
    generator = random.Random(0)
    tokens, total = 0, 0.0
    for number in range(3000):
        drafts = lengths.choose(lives)
        if number < 3:
            drafts = dict.fromkeys(drafts, 0)  # prompts just ended: nothing to draft from
        accepted = {}
        for live in lives:
            count = drafts[live.request_id]
            hits = 0
            while hits < count and generator.random() < ALPHA:
                hits += 1
            accepted[live.request_id] = hits
            lengths.observe(live, count, hits)
        seconds = 0.050 + TRUE_SECONDS_PER_DRAFT * sum(drafts.values())
        if learns:
            lengths.observe_step(step(drafts, accepted, seconds))
        tokens += NUM_ROWS + sum(accepted.values())
        total += seconds
    return tokens / total, NUM_ROWS / 0.050


def test_drafts_that_cost_more_than_the_table_says_are_given_up() -> None:
    misled, plain = goodput(learns=False)
    assert misled < 0.7 * plain  # the planted error is large enough to matter
    learned, _ = goodput(learns=True)
    assert learned > 0.97 * plain  # one dear step, then probes for 2 % of the time


def test_longer_contexts_alone_do_not_make_drafts_look_dear() -> None:
    feedback = CostFeedback()
    for _ in range(30):
        feedback.observe_plain(0.100, predicted=0.050)
        feedback.observe_drafting(0.110, predicted=0.055, num_drafts=4)
    assert feedback.draft_token_seconds < 1e-6
    assert feedback.plain_factor == 2.0
