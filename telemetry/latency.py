"""The latencies of a request, from the instants in its RequestStats. Pure.

Three are kept apart and never called inter-token latency: the time per output token (mean over
a request), the step latency (gap between the messages of a stream, which hold several tokens
under speculation) and the tokens per step.
"""

from engine.stats import RequestStats
from telemetry.ledger.records import LatencySummary


def summarise_latency(stats: RequestStats) -> LatencySummary:
    """Seconds; None for what never happened.

    queue: arrival to the first step. ttft: arrival to the first token. tpot: first to last
    token over the tokens after the first, so it needs two. Step latency: first to last token
    over the emitting steps after the first.
    """
    first, last = stats.first_token_at, stats.last_token_at
    num_emitting_steps = stats.num_plain_steps + stats.num_verify_steps
    generating = None if first is None or last is None else max(0.0, last - first)
    return LatencySummary(
        e2e_seconds=max(0.0, stats.finished_at - stats.arrived_at),
        queue_seconds=_since(stats.arrived_at, stats.first_scheduled_at),
        ttft_seconds=_since(stats.arrived_at, first),
        tpot_seconds=_mean(generating, stats.num_output_tokens - 1),
        mean_step_latency_seconds=_mean(generating, num_emitting_steps - 1),
    )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else max(0.0, end - start)


def _mean(total: float | None, count: int) -> float | None:
    return None if total is None or count < 1 else total / count
