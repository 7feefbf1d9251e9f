"""Times, money and energy of the sample traffic; the money adds up to price x wall time."""

from dataclasses import dataclass

import numpy as np

from exports.sample.traffic import OVERLOAD, Traffic, in_hours

NANO_USD_PER_HOUR = 380_000_000
BUSY_WATTS, IDLE_WATTS = 95, 40
HOUR_NANOSECONDS = 3_600_000_000_000

_PREFILL_NANOSECONDS = 2_000_000  # per position, here and below
_DECODE_NANOSECONDS = 30_000_000
_DRAFT_NANOSECONDS = 6_000_000
_DRAFTER_NANOSECONDS = 1_500_000
_STEP_SECONDS = 0.07


@dataclass(frozen=True, slots=True)
class Work:
    """What each request ran; all zero for a refused one."""

    has_run: np.ndarray
    num_verify_steps: np.ndarray
    num_plain_steps: np.ndarray
    num_output_tokens: np.ndarray
    num_draft_tokens: np.ndarray
    num_accepted_tokens: np.ndarray
    num_emitted_accepted_tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Charges:
    """Seconds, nanoseconds and nano-USD per request. `finish_hour` counts from the begin."""

    ttft_seconds: np.ndarray
    tpot_seconds: np.ndarray
    step_seconds: np.ndarray
    e2e_seconds: np.ndarray
    finish_hour: np.ndarray
    busy_nanoseconds: np.ndarray
    cost: dict[str, np.ndarray]


def work_of(traffic: Traffic, is_refused: np.ndarray) -> Work:
    """Token and step counts that satisfy the identity of engine.stats.RequestStats."""
    has_run = ~is_refused
    output = traffic.num_output_tokens * has_run
    verify = traffic.drafted[:, 0] * has_run
    accepted = traffic.accepted.sum(axis=1) * has_run
    emitted = np.minimum(accepted, np.maximum(output - verify, 0))
    return Work(
        has_run,
        verify,
        np.maximum(output - verify - emitted, 0),
        output,
        traffic.drafted.sum(axis=1) * has_run,
        accepted,
        emitted,
    )


def charge(traffic: Traffic, work: Work) -> Charges:
    """What each request took and cost."""
    is_slow = in_hours(traffic.arrival_microseconds, OVERLOAD)
    steps = work.num_verify_steps + work.num_plain_steps
    step_seconds = _STEP_SECONDS * traffic.noise * np.where(is_slow, 1.7, 1.0)
    decode_seconds = step_seconds * steps
    ttft = traffic.queue_seconds + traffic.num_prompt_tokens * 0.002 * traffic.noise + step_seconds
    e2e = np.where(work.has_run, ttft + decode_seconds, 0.002)
    tpot = decode_seconds / np.maximum(work.num_output_tokens - 1, 1)
    finish_hour = (traffic.arrival_microseconds + (e2e * 1e6).astype(np.int64)) // 3_600_000_000

    times = {
        "prefill": traffic.num_prompt_tokens * work.has_run * _PREFILL_NANOSECONDS,
        "decode": steps * _DECODE_NANOSECONDS,
        "draft": work.num_draft_tokens * _DRAFT_NANOSECONDS,
        "drafter": work.num_draft_tokens * traffic.is_candidate * _DRAFTER_NANOSECONDS,
    }
    times = {name: (time * traffic.noise).astype(np.int64) for name, time in times.items()}
    cost = {name: _nano_usd(time) for name, time in times.items()}
    rejected = work.num_draft_tokens - work.num_accepted_tokens
    cost["rejected"] = cost["draft"] * rejected // np.maximum(work.num_draft_tokens, 1)
    cost["without_speculation"] = cost["prefill"] + _nano_usd(
        work.num_output_tokens * (_DECODE_NANOSECONDS + 4_000_000)
    )
    cost["total"] = cost["prefill"] + cost["decode"] + cost["draft"] + cost["drafter"]
    return Charges(ttft, tpot, step_seconds, e2e, finish_hour, sum(times.values()), cost)


def _nano_usd(nanoseconds: np.ndarray) -> np.ndarray:
    return nanoseconds // 1000 * NANO_USD_PER_HOUR // (HOUR_NANOSECONDS // 1000)
