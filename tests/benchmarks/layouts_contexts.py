"""What it gives that rows of very different context lengths attend in calls of their own."""

import statistics
from collections.abc import Callable

from engine.layout.grouping import UNMEASURED
from tests.benchmarks.workloads import greedy_request, make_engine


def contexts_apart(dtype: str, clock: Callable[[], float], rounds: int) -> float:
    """Median speed-up of plain steps, measured in turn."""
    engine = make_engine(dtype, 8, max_model_tokens=2048)
    runner = engine._verifier.runner
    for number in range(8):
        token_ids = [5 + (number * 7 + n) % 900 for n in range(1500 if number == 3 else 40)]
        engine.submit(greedy_request(str(number), token_ids, 500, "off", ignore_eos=True))
    scheduler = engine._scheduler
    while sum(live.is_decoding for live in scheduler.running.values()) < 8:
        engine.step()
    measured, ratios = runner.attention_costs, []
    for _ in range(rounds):
        seconds = []
        for costs in (UNMEASURED, measured):
            runner.attention_costs = costs
            started = clock()
            for _ in range(10):
                engine.step()
            seconds.append(clock() - started)
        ratios.append(seconds[0] / seconds[1])
    return round(statistics.median(ratios), 3)
