"""The drawn traffic as a ledger: requests, acceptance, capacity, audits, with exact money."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, insert

from exports.sample.costs import (
    BUSY_WATTS,
    HOUR_NANOSECONDS,
    IDLE_WATTS,
    NANO_USD_PER_HOUR,
    Charges,
    Work,
    charge,
    work_of,
)
from exports.sample.dimensions import HEAD, PROMPT_LOOKUP, dimension_rows
from exports.sample.trace import Trace
from exports.sample.traffic import (
    BEGIN,
    ENERGY_GAP,
    NUM_DAYS,
    OUTAGE,
    REGRESSION,
    SEED,
    Traffic,
    draw_traffic,
    in_hours,
)
from telemetry.ledger.models import AuditResult, CapacityInterval, Request, RequestAcceptance
from telemetry.ledger.records import ALLOCATION_METHOD
from telemetry.ledger.session import migrate, open_ledger

OUTCOMES = (
    ("completed", "stop_token", "OK"),
    ("cancelled", "cancelled", "CANCELLED"),
    ("deadline_exceeded", "deadline", "DEADLINE_EXCEEDED"),
    ("failed", "error", "INTERNAL"),
    ("refused", None, "RESOURCE_EXHAUSTED"),
)
REFUSED = 4
AUDITED_SHARE = 0.02
_CHUNK = 5_000

Columns = dict[str, Any]
"""Column -> one value for all rows, or an array of one per row."""


def write_sample_ledger(path: Path, traces: Sequence[Trace], num_days: int = NUM_DAYS) -> int:
    """Make a SQLite ledger at `path`, where nothing may be yet; returns its requests."""
    traffic = draw_traffic(traces, num_days)
    work = work_of(traffic, traffic.outcome == REFUSED)
    charges = charge(traffic, work)
    requests = _requests(traffic, work, charges)
    url = f"sqlite:///{path}"
    migrate(url)
    engine = open_ledger(url)
    try:
        with engine.begin() as connection:
            for model, rows in dimension_rows().items():
                connection.execute(insert(model), rows)
            _insert(connection, Request, requests)
            _insert(connection, RequestAcceptance, _acceptance(traffic, work, requests))
            _insert(connection, CapacityInterval, _capacity(charges, num_days * 24))
            _insert(connection, AuditResult, _audits(traffic, requests))
    finally:
        engine.dispose()
    return len(traffic.outcome)


def _insert(connection: Connection, model: Any, columns: Columns) -> None:
    size = max(len(v) for v in columns.values() if isinstance(v, np.ndarray | list))
    lists = [
        value.tolist()
        if isinstance(value, np.ndarray)
        else value
        if isinstance(value, list)
        else [value] * size
        for value in columns.values()
    ]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]
    for begin in range(0, size, _CHUNK):
        connection.execute(insert(model.__table__), rows[begin : begin + _CHUNK])


def _where(condition: np.ndarray, values: Any) -> np.ndarray:
    chosen = np.broadcast_to(np.asarray(values, dtype=object), condition.shape).copy()
    chosen[~condition] = None
    return chosen


def _instants(microseconds: np.ndarray) -> list[Any]:
    return [BEGIN + timedelta(microseconds=number) for number in microseconds.tolist()]


def _requests(traffic: Traffic, work: Work, charges: Charges) -> Columns:
    ids = np.arange(1, len(traffic.outcome) + 1)
    e2e_microseconds = (charges.e2e_seconds * 1e6).astype(np.int64)
    started_at = _instants(traffic.arrival_microseconds)
    finished_at = _instants(traffic.arrival_microseconds + e2e_microseconds)
    outcomes = [OUTCOMES[place] for place in traffic.outcome.tolist()]
    has_run, has_drafts = work.has_run, work.num_verify_steps > 0
    has_energy = ~in_hours(traffic.arrival_microseconds, ENERGY_GAP)
    has_many = work.num_output_tokens > 1
    cut = work.num_verify_steps + work.num_emitted_accepted_tokens - work.num_output_tokens
    names = ("prefill", "decode", "draft", "rejected", "drafter")
    return {
        "ledger_id": ids,
        "record_id": [f"{number:032x}" for number in ids.tolist()],
        "request_id": [f"sample-{number}" for number in ids.tolist()],
        "attempt": 1,
        "revision": 0,
        "instance_id": "sample-1",
        "recorded_at": finished_at,
        "started_at": started_at,
        "finished_at": finished_at,
        "finished_on": [instant.date() for instant in finished_at],
        "model_key": 1 + traffic.is_code,
        "drafter_key": _where(has_drafts, np.where(traffic.is_candidate, HEAD, PROMPT_LOOKUP)),
        "variant_key": 1 + traffic.is_candidate,
        "tenant_key": 1 + traffic.tenant,
        "price_key": 1,
        "labels": [{}] * len(ids),
        "outcome": [outcome for outcome, _, _ in outcomes],
        "finish_reason": [reason for _, reason, _ in outcomes],
        "status_code": [status for _, _, status in outcomes],
        "guarantee": _where(has_run, "bit_exact"),
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "acceptance_rule": "coupled",
        "seed": 0,
        "speculation_mode": "auto",
        "max_tokens": 1024,
        "queue_seconds": _where(has_run, traffic.queue_seconds),
        "ttft_seconds": _where(has_run, charges.ttft_seconds),
        "tpot_seconds": _where(has_many, charges.tpot_seconds),
        "e2e_seconds": charges.e2e_seconds,
        "mean_step_latency_seconds": _where(has_many, charges.step_seconds),
        "num_prompt_tokens": traffic.num_prompt_tokens,
        "num_cached_prompt_tokens": 0,
        "num_recomputed_tokens": 0,
        "num_output_tokens": work.num_output_tokens,
        "num_prefill_positions": traffic.num_prompt_tokens * has_run,
        "num_steps": work.num_verify_steps + work.num_plain_steps,
        "num_plain_steps": work.num_plain_steps,
        "num_verify_steps": work.num_verify_steps,
        "num_draft_tokens": work.num_draft_tokens,
        "num_accepted_tokens": work.num_accepted_tokens,
        "num_emitted_accepted_tokens": work.num_emitted_accepted_tokens,
        "num_cut_tokens": np.maximum(cut, 0),
        "num_drafter_positions": work.num_draft_tokens * traffic.is_candidate,
        "num_preemptions": 0,
        "cost_nano_usd": charges.cost["total"],
        **{f"cost_{name}_nano_usd": charges.cost[name] for name in names},
        "estimated_cost_without_speculation_nano_usd": charges.cost["without_speculation"],
        "busy_nanoseconds": charges.busy_nanoseconds,
        "allocation_method": ALLOCATION_METHOD,
        "energy_microjoules": _where(has_energy, charges.busy_nanoseconds * BUSY_WATTS // 1000),
        "energy_source": np.where(has_energy, "rapl", "none"),
    }


def _acceptance(traffic: Traffic, work: Work, requests: Columns) -> Columns:
    drafting = np.flatnonzero(work.num_verify_steps)
    num_positions = traffic.drafted.shape[1]
    of_length = np.zeros_like(traffic.accepted)
    of_length[:, -1] = traffic.accepted.sum(axis=1)  # every draft is of full length
    return {
        "request_ledger_id": np.repeat(drafting + 1, num_positions),
        "position": np.tile(np.arange(num_positions), len(drafting)),
        "finished_on": [
            day
            for index in drafting.tolist()
            for day in [requests["finished_on"][index]] * num_positions
        ],
        "num_drafted": traffic.drafted[drafting].ravel(),
        "num_accepted": traffic.accepted[drafting].ravel(),
        "num_accepted_of_length": of_length[drafting].ravel(),
    }


def _capacity(charges: Charges, num_hours: int) -> Columns:
    num_hours = max(num_hours, int(charges.finish_hour.max()) + 1)
    hours = np.arange(num_hours)

    def per_hour(values: np.ndarray) -> np.ndarray:
        sums = np.zeros(num_hours, dtype=np.int64)
        np.add.at(sums, charges.finish_hour, values)
        return sums

    busy, cost_busy = per_hour(charges.busy_nanoseconds), per_hour(charges.cost["total"])
    is_lost = (hours >= OUTAGE[0]) & (hours < OUTAGE[1])
    is_measured = ~((hours >= ENERGY_GAP[0]) & (hours < ENERGY_GAP[1])) & ~is_lost
    rest, cost_rest = HOUR_NANOSECONDS - busy, NANO_USD_PER_HOUR - cost_busy
    began_at = _instants(hours * 3_600_000_000)
    num_requests = per_hour(np.ones_like(charges.busy_nanoseconds))
    return {
        "instance_id": "sample-1",
        "interval_index": hours + 1,
        "recorded_at": [instant + timedelta(hours=1) for instant in began_at],
        "started_at": began_at,
        "finished_at": [instant + timedelta(hours=1) for instant in began_at],
        "model_key": 1,
        "price_key": 1,
        "wall_nanoseconds": HOUR_NANOSECONDS,
        "busy_nanoseconds": busy,
        "idle_nanoseconds": rest * ~is_lost,
        "lost_nanoseconds": rest * is_lost,
        "num_steps": busy // 70_000_000,
        "num_prefill_positions": 0,
        "num_decode_positions": busy // 70_000_000,
        "num_draft_positions": 0,
        "num_emitted_tokens": 0,
        "max_num_running": np.minimum(num_requests, 16),
        "max_num_waiting": np.maximum(num_requests - 60, 0),
        "cost_busy_nano_usd": cost_busy,
        "cost_idle_nano_usd": cost_rest * ~is_lost,
        "cost_lost_nano_usd": cost_rest * is_lost,
        "energy_busy_microjoules": _where(is_measured, busy * BUSY_WATTS // 1000),
        "energy_idle_microjoules": _where(is_measured, rest * IDLE_WATTS // 1000),
        "energy_source": np.where(is_measured, "rapl", "none"),
    }


def _audits(traffic: Traffic, requests: Columns) -> Columns:
    generator = np.random.Generator(np.random.PCG64(SEED + 1))
    completed = np.flatnonzero((traffic.outcome == 0) & (traffic.num_output_tokens > 1))
    audited = completed[generator.random(len(completed)) < AUDITED_SHARE]
    hits = generator.random(len(audited))
    is_bad = in_hours(traffic.arrival_microseconds[audited], REGRESSION)
    is_bad &= traffic.is_candidate[audited] & (hits < 0.2)
    is_tie = ~is_bad & (hits > 0.997)
    audited_at = [requests["finished_at"][i] + timedelta(seconds=30) for i in audited.tolist()]
    return {
        "audit_uid": [f"{number:032x}" for number in (audited + 1).tolist()],
        "request_id": [f"sample-{number}" for number in (audited + 1).tolist()],
        "record_id": [f"{number:032x}" for number in (audited + 1).tolist()],
        "instance_id": "sample-1",
        "recorded_at": audited_at,
        "audited_at": audited_at,
        "model_key": requests["model_key"][audited],
        "drafter_key": requests["drafter_key"][audited],
        "variant_key": requests["variant_key"][audited],
        "verdict": np.where(is_bad, "divergence", np.where(is_tie, "numeric_tie", "exact")),
        "guarantee": "bit_exact",
        "num_checked_tokens": traffic.num_output_tokens[audited],
        "num_mismatched_tokens": (is_bad | is_tie).astype(np.int64),
        "audit_seconds": 0.2,
    }
