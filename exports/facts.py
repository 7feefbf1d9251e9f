"""The fact tables: requests, acceptance, latency, capacity, equivalence, reconciliation."""

import math

import pyarrow as pa

from exports.columns import (
    Column,
    Table,
    TableKind,
    count_column,
    energy_column,
    instant_column,
    key_column,
    money_column,
    nanoseconds_column,
    number_column,
    seconds_column,
    text_column,
)


def _latency_bounds() -> tuple[float, ...]:
    # Geometric with ratio 1.07: a percentile read as a bucket's upper bound is at most 7 %
    # above the truth. Rounded so that the bounds are the same on every platform.
    first, ratio, last = 1e-4, 1.07, 1e6
    count = math.ceil(math.log(last / first) / math.log(ratio)) + 1
    return tuple(float(f"{first * ratio**index:.6g}") for index in range(count))


LATENCY_BOUNDS_SECONDS = _latency_bounds()
"""Upper bounds of the latency buckets; a bucket holds lower < value <= upper."""

LATENCY_METRICS = ("queue", "ttft", "tpot", "e2e")

TIME_BANDS = ((0, 6, "night"), (6, 12, "morning"), (12, 18, "afternoon"), (18, 24, "evening"))


_DATE_KEY = Column("date_key", pa.int64(), "key", "Row of dim_date: the UTC date as yyyymmdd.")
_HOUR_KEY = Column("hour_key", pa.int64(), "key", "Row of dim_time_band: the UTC hour, 0 to 23.")
_MODEL_KEY = key_column("model_key", "dim_model")
_DRAFTER_KEY = key_column("drafter_key", "dim_drafter")
_VARIANT_KEY = key_column("variant_key", "dim_variant")
_TENANT_KEY = key_column("tenant_key", "dim_tenant")
_OUTCOME_KEY = key_column("outcome_key", "dim_outcome")
_PRICE_KEY = key_column("price_key", "dim_price")
_ENERGY_SOURCE = text_column(
    "energy_source", "Where energy was read: nvml_counter, rapl, none, ..."
)

FACT_REQUEST = Table(
    "fact_request",
    TableKind.FACT,
    "One attempt of one request, whatever its outcome, in its latest correction.",
    (
        number_column("ledger_id", "Row of the ledger; files are ordered by it."),
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _DRAFTER_KEY,
        _VARIANT_KEY,
        _TENANT_KEY,
        _OUTCOME_KEY,
        _PRICE_KEY,
        instant_column("started_at", "Arrival of the request."),
        instant_column(
            "finished_at", "End of the request; date_key and hour_key are taken from it."
        ),
        text_column("request_id", "Identifier that client and traces know."),
        number_column("attempt", "Attempt of that request, from 1."),
        number_column("revision", "0 for the original row, higher for a correction."),
        text_column("trace_id", "Trace of the request, 32 hex digits.", "no trace was recorded"),
        text_column("guarantee", "bit_exact or rounding.", "no model took the request"),
        Column("temperature", pa.float64(), "number", "0 is greedy.", "it was refused unread"),
        text_column("acceptance_rule", "coupled or rejection.", "it was refused unread"),
        text_column("speculation_mode", "off, on or auto.", "it was refused unread"),
        seconds_column("queue_seconds", "Arrival to first scheduling.", "it never ran"),
        seconds_column("ttft_seconds", "Arrival to first token.", "it emitted no token"),
        seconds_column("tpot_seconds", "Mean time per output token after the first.", "< 2 tokens"),
        seconds_column("e2e_seconds", "Arrival to end."),
        seconds_column("mean_step_latency_seconds", "Mean gap between messages.", "< 2 messages"),
        count_column("num_prompt_tokens", "Prompt tokens, cached ones included."),
        count_column("num_cached_prompt_tokens", "Prompt tokens taken from the prefix cache."),
        count_column("num_recomputed_tokens", "Tokens computed again after a preemption."),
        count_column("num_output_tokens", "Tokens emitted."),
        count_column(
            "num_prefill_positions", "Prompt positions computed by the target.", "positions"
        ),
        count_column("num_steps", "Engine steps it took part in.", "steps"),
        count_column("num_plain_steps", "Steps that emitted a token without drafts.", "steps"),
        count_column("num_verify_steps", "Steps that verified at least one draft token.", "steps"),
        count_column("num_draft_tokens", "Draft tokens verified."),
        count_column("num_accepted_tokens", "Draft tokens accepted."),
        count_column("num_emitted_accepted_tokens", "Accepted tokens that reached the client."),
        count_column("num_cut_tokens", "Recovered or bonus tokens that a stop cut."),
        count_column("num_drafter_positions", "Positions a draft model computed.", "positions"),
        count_column("num_preemptions", "Times it lost its blocks.", "preemptions"),
        money_column("cost_nano_usd", "Share of the steps' cost; idle time is in fact_capacity."),
        money_column("cost_prefill_nano_usd", "Of which: prompt positions."),
        money_column("cost_decode_nano_usd", "Of which: the newest token of each step."),
        money_column("cost_draft_nano_usd", "Of which: verifying draft tokens."),
        money_column("cost_rejected_nano_usd", "Of cost_draft_nano_usd: tokens not accepted."),
        money_column("cost_drafter_nano_usd", "Of which: the draft model's own work."),
        money_column(
            "estimated_cost_without_speculation_nano_usd",
            "Estimate from the cost table, not a measurement.",
            "no cost table was measured",
        ),
        nanoseconds_column("busy_nanoseconds", "Its share of the time of its steps."),
        text_column("allocation_method", "Name and version of the cost split."),
        energy_column("energy_microjoules", "Its share of the measured energy."),
        _ENERGY_SOURCE,
    ),
)

FACT_ACCEPTANCE = Table(
    "fact_acceptance",
    TableKind.FACT,
    "Hour x model x drafter x variant x tenant x position, for requests that drafted.",
    (
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _DRAFTER_KEY,
        _VARIANT_KEY,
        _TENANT_KEY,
        number_column(
            "position", "Place in the draft from 1; 0 only counts steps that accepted none."
        ),
        count_column("num_draft_tokens", "Drafts that had a token at this position."),
        count_column("num_accepted_tokens", "Those accepted there."),
        count_column("num_steps_drafted", "Verify steps that drafted exactly `position`.", "steps"),
        count_column(
            "num_steps_accepted", "Verify steps that accepted exactly `position`.", "steps"
        ),
        Column(
            "num_accepted_of_length",
            pa.int64(),
            "tokens",
            "Draft tokens accepted in the steps that drafted exactly `position`.",
            "one of its requests is from before this was counted",
        ),
    ),
)

FACT_LATENCY_HISTOGRAM = Table(
    "fact_latency_histogram",
    TableKind.FACT,
    "Hour x model x drafter x variant x tenant x metric x bucket; counts are not cumulative.",
    (
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _DRAFTER_KEY,
        _VARIANT_KEY,
        _TENANT_KEY,
        text_column("metric", "queue, ttft, tpot or e2e."),
        number_column("bucket", "Place of the bucket; its bounds never change."),
        seconds_column("upper_seconds", "Upper bound, inclusive; the last bucket holds all above."),
        count_column("num_requests", "Requests in the bucket.", "requests"),
        Column("sum_microseconds", pa.int64(), "us", "Sum of their values, for means."),
    ),
)

FACT_CAPACITY = Table(
    "fact_capacity",
    TableKind.FACT,
    "One interval of one server start: what the machine did and cost.",
    (
        number_column("capacity_id", "Row of the ledger; files are ordered by it."),
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _PRICE_KEY,
        instant_column(
            "started_at", "Begin of the interval; date_key and hour_key are taken from it."
        ),
        instant_column("finished_at", "End of the interval."),
        text_column("instance_id", "One start of one server."),
        nanoseconds_column("wall_nanoseconds", "Length: busy + idle + lost."),
        nanoseconds_column("busy_nanoseconds", "Inside steps."),
        nanoseconds_column("idle_nanoseconds", "Between steps."),
        nanoseconds_column("lost_nanoseconds", "Not chargeable: the server was killed."),
        count_column("num_steps", "Engine steps.", "steps"),
        count_column("num_prefill_positions", "Prompt positions computed.", "positions"),
        count_column("num_decode_positions", "Newest tokens computed.", "positions"),
        count_column("num_draft_positions", "Draft tokens verified.", "positions"),
        count_column("num_emitted_tokens", "Tokens emitted."),
        count_column("max_num_running", "Most requests running at once.", "requests"),
        count_column("max_num_waiting", "Most requests waiting at once.", "requests"),
        money_column("cost_busy_nano_usd", "Charged to requests."),
        money_column("cost_idle_nano_usd", "Of idle time."),
        money_column("cost_lost_nano_usd", "Of lost time."),
        energy_column("energy_busy_microjoules", "Measured inside steps."),
        energy_column("energy_idle_microjoules", "Measured between steps."),
        _ENERGY_SOURCE,
    ),
)

FACT_EQUIVALENCE = Table(
    "fact_equivalence",
    TableKind.FACT,
    "Hour of the audit x model x drafter x variant x verdict.",
    (
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _DRAFTER_KEY,
        _VARIANT_KEY,
        text_column("verdict", "exact, numeric_tie or divergence."),
        text_column("guarantee", "bit_exact, rounding or unknown."),
        count_column("num_requests", "Requests audited.", "requests"),
        count_column("num_checked_tokens", "Tokens checked against the target alone."),
        count_column("num_mismatched_tokens", "Tokens that differ."),
    ),
)

FACT_RECONCILIATION = Table(
    "fact_reconciliation",
    TableKind.FACT,
    "One UTC date: what the ledger holds against what fact_request holds.",
    (
        _DATE_KEY,
        count_column("num_ledger_requests", "Current rows of the ledger.", "requests"),
        count_column("num_exported_requests", "Rows of fact_request.", "requests"),
        count_column("num_superseded_rows", "Ledger rows replaced by a correction.", "rows"),
        count_column("num_without_price", "Requests without a price.", "requests"),
        count_column("num_without_energy", "Requests without measured energy.", "requests"),
        count_column("num_without_model", "Requests of the unknown model.", "requests"),
        count_column("num_without_tenant", "Requests of the unknown tenant.", "requests"),
        money_column("ledger_cost_nano_usd", "Summed by the database."),
        money_column("exported_cost_nano_usd", "Summed over the written file."),
        count_column("num_ledger_output_tokens", "Summed by the database."),
        count_column("num_exported_output_tokens", "Summed over the written file."),
        number_column("last_ledger_id", "Highest ledger row of the date."),
        instant_column("last_recorded_at", "When that date's latest row entered the ledger."),
    ),
)
