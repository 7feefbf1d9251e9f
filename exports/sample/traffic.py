"""Ninety days of traffic drawn from the trace: who asks when, how well speculation does.

Token counts and bursts are the trace's own; the day's and the week's rhythm, tenants,
variants and incidents are invented. The same trace always makes the same traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from exports.sample.trace import Trace

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
NUM_DAYS = 90
SEED = 20260101
MAX_DRAFT_TOKENS = 4

TENANT_SHARES = (0.34, 0.22, 0.15, 0.11, 0.08, 0.05, 0.03, 0.02)
REQUESTS_PER_HOUR = {"conversation": 52, "code": 28}
FIRST_ACCEPTANCE = {"conversation": 0.62, "code": 0.78}

CANDIDATE_FROM_DAY = 45  # the head drafter takes half of the traffic, in variant "candidate"
CANDIDATE_GAIN = 1.12
OVERLOAD = (20 * 24 + 13, 20 * 24 + 17)  # hours: queues grow, requests are refused
REGRESSION = (58 * 24, 60 * 24)  # hours: the candidate's drafter fits badly
OUTAGE = (70 * 24 + 4, 70 * 24 + 6)  # hours: the server is down
ENERGY_GAP = (30 * 24, 35 * 24)  # hours: the energy counter is not readable


@dataclass(frozen=True, slots=True)
class Traffic:
    """One row per request, ordered by arrival; arrays of equal length.

    arrival_microseconds count from BEGIN. drafted and accepted have a column per position.
    """

    arrival_microseconds: np.ndarray
    is_code: np.ndarray
    tenant: np.ndarray
    is_candidate: np.ndarray
    outcome: np.ndarray  # place in exports.sample.ledger.OUTCOMES
    num_prompt_tokens: np.ndarray
    num_output_tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    queue_seconds: np.ndarray
    noise: np.ndarray  # log-normal around 1: how slow this request was


def draw_traffic(traces: Sequence[Trace], num_days: int = NUM_DAYS) -> Traffic:
    """The first `num_days` of the traffic."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    hours = np.arange(num_days * 24)
    arrivals, kinds, picks = [], [], []
    for index, trace in enumerate(traces):
        counts = generator.poisson(REQUESTS_PER_HOUR[trace.kind] * _rhythm(hours))
        counts[(hours >= OUTAGE[0]) & (hours < OUTAGE[1])] = 0
        pick = generator.integers(0, len(trace.arrival_seconds), counts.sum())
        hour = np.repeat(hours, counts)
        offset = trace.arrival_seconds[pick] % 3600
        arrivals.append(((hour * 3600 + offset) * 1e6).astype(np.int64))
        kinds.append(np.full(len(pick), index))
        picks.append(pick)
    arrival, kind, pick = (np.concatenate(parts) for parts in (arrivals, kinds, picks))
    order = np.lexsort((pick, kind, arrival))
    arrival, kind, pick = arrival[order], kind[order], pick[order]
    prompts, outputs = (
        np.choose(kind, [tokens[pick % len(tokens)] for tokens in columns])
        for columns in (
            [trace.num_prompt_tokens for trace in traces],
            [trace.num_output_tokens for trace in traces],
        )
    )
    return _complete(generator, arrival, kind, prompts, np.maximum(outputs, 1))


def in_hours(arrival_microseconds: np.ndarray, span: tuple[int, int]) -> np.ndarray:
    """Which instants lie in [begin, end) hours since BEGIN."""
    hour = arrival_microseconds // 3_600_000_000
    return (hour >= span[0]) & (hour < span[1])


def _rhythm(hours: np.ndarray) -> np.ndarray:
    of_day = hours % 24
    weekday = (hours // 24 + BEGIN.weekday()) % 7
    day = 0.35 + 0.9 * np.exp(-(((of_day - 14) / 5.5) ** 2))
    growth = 1 + 0.004 * (hours / 24)
    return day * np.where(weekday < 5, 1.0, 0.45) * growth


def _complete(
    generator: np.random.Generator,
    arrival: np.ndarray,
    kind: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
) -> Traffic:
    size = len(arrival)
    tenant = generator.choice(len(TENANT_SHARES), size, p=TENANT_SHARES)
    day = arrival // 86_400_000_000
    is_candidate = (day >= CANDIDATE_FROM_DAY) & (generator.random(size) < 0.5)
    overload, regression = in_hours(arrival, OVERLOAD), in_hours(arrival, REGRESSION)

    first = np.array([FIRST_ACCEPTANCE["conversation"], FIRST_ACCEPTANCE["code"]])[kind]
    first = first * np.where(is_candidate, CANDIDATE_GAIN, 1.0)
    first = np.where(regression & is_candidate, 0.22, first)
    first = np.clip(first + generator.normal(0, 0.07, size), 0.05, 0.95)
    rates = first[:, None] * 0.93 ** np.arange(MAX_DRAFT_TOKENS)
    length = 1 + np.cumprod(rates, axis=1).sum(axis=1)
    num_verify = np.where(outputs >= 8, np.maximum((outputs / length).astype(np.int64), 1), 0)
    drafted = np.repeat(num_verify[:, None], MAX_DRAFT_TOKENS, axis=1)
    accepted = np.zeros_like(drafted)
    reached = num_verify
    for position in range(MAX_DRAFT_TOKENS):
        reached = generator.binomial(reached, rates[:, position])
        accepted[:, position] = reached

    outcome = generator.choice(4, size, p=(0.955, 0.028, 0.007, 0.01))
    outcome = np.where(overload & (generator.random(size) < 0.35), 4, outcome)
    queue = generator.gamma(1.2, 0.012, size) * np.where(overload, 160, 1.0)
    noise = np.exp(generator.normal(0, 0.18, size))
    return Traffic(
        arrival,
        kind == 1,
        tenant,
        is_candidate,
        outcome,
        prompts,
        outputs,
        drafted,
        accepted,
        queue,
        noise,
    )
