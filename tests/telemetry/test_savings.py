"""The estimate without speculation: from plain steps that were measured, or unknown."""

from telemetry.ledger.records import RequestCost
from telemetry.savings import PlainDecodeTable, SavingsEstimator
from tests.telemetry.ledger_records import PRICE
from tests.telemetry.step_stats import row, step

MILLISECOND = 1_000_000


def _learn(target: PlainDecodeTable | SavingsEstimator, num_rows: int, milliseconds: int) -> None:
    rows = [row(f"other{n}") for n in range(num_rows)]
    for _ in range(3):
        plain = step(0, milliseconds * MILLISECOND, *rows)
        target.observe(plain) if isinstance(target, PlainDecodeTable) else target.on_step(plain)


def test_the_table_interpolates_and_never_extrapolates() -> None:
    table = PlainDecodeTable()
    _learn(table, 2, 10)
    _learn(table, 6, 20)
    assert table.step_nanoseconds(2) == 10 * MILLISECOND
    assert table.step_nanoseconds(4) == 15 * MILLISECOND
    assert table.step_nanoseconds(1) is None
    assert table.step_nanoseconds(7) is None


def test_steps_with_drafts_or_prompts_teach_nothing() -> None:
    table = PlainDecodeTable()
    for _ in range(9):
        table.observe(step(0, MILLISECOND, row("a", draft=1), row("b")))
        table.observe(step(0, MILLISECOND, row("a"), row("b", prefill=4, decode=0)))
        table.observe(step(0, MILLISECOND))
    assert table.step_nanoseconds(2) is None


def test_accepted_tokens_are_priced_as_plain_steps() -> None:
    """A plain step of one row takes 10 ms; five tokens from one verify step are 50 ms saved up."""
    estimator = SavingsEstimator()
    _learn(estimator, 1, 10)
    estimator.on_step(step(0, 14 * MILLISECOND, row("a", draft=4, accepted=4)))
    cost = RequestCost(cost_nano_usd=15_000, cost_prefill_nano_usd=1_000)
    assert estimator.finish("a", cost, PRICE) == 1_000 + 50_000


def test_a_server_that_always_drafts_has_the_engines_table_of_its_start() -> None:
    estimator = SavingsEstimator([(1, 0.01), (4, 0.02)])
    estimator.on_step(step(0, 14 * MILLISECOND, row("a", draft=4, accepted=4)))
    cost = RequestCost(cost_nano_usd=15_000, cost_prefill_nano_usd=1_000)
    assert estimator.finish("a", cost, PRICE) == 1_000 + 50_000
    table = PlainDecodeTable([(1, 0.01), (4, 0.02)])
    assert table.step_nanoseconds(4) == 20 * MILLISECOND
    assert table.step_nanoseconds(5) is None
    _learn(table, 4, 30)  # what was seen since then counts more
    assert table.step_nanoseconds(4) == 30 * MILLISECOND


def test_without_a_measurement_it_is_unknown() -> None:
    estimator = SavingsEstimator()
    estimator.on_step(step(0, MILLISECOND, row("a", draft=4, accepted=4)))
    assert estimator.finish("a", RequestCost(), PRICE) is None
    assert estimator.finish("never seen", RequestCost(), PRICE) is None
