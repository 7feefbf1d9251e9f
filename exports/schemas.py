"""The star schema: every exported table and column, with its unit, meaning and null rule.

This file is the contract that a dashboard reads. A column may be added at the end of its
table; it is never renamed, retyped or removed without a new `SCHEMA_VERSION`
(tests/exports/test_contract.py holds the released columns). The data dictionary in
exports/README.md is generated from here.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

SCHEMA_VERSION = 1

UNKNOWN_KEY = -1
"""The dimension row that a fact points to when it has no partner."""

INSTANT = pa.timestamp("us", tz="UTC")


class TableKind(StrEnum):
    """fact tables have one file per UTC date; a dimension is one file."""

    FACT = "fact"
    DIMENSION = "dimension"


@dataclass(frozen=True, slots=True)
class Column:
    """One exported column. `null_when` is "" for a column that never holds NULL."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    null_when: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One exported table. `grain` says what a row is."""

    name: str
    kind: TableKind
    grain: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema that every file of the table has, metadata included."""
        return pa.schema(
            [pa.field(c.name, c.type, nullable=bool(c.null_when)) for c in self.columns],
            metadata={b"tandem.schema_version": str(SCHEMA_VERSION).encode()},
        )


def _latency_bounds() -> tuple[float, ...]:
    # Geometric with ratio 1.15: a percentile read as a bucket's upper bound is at most 15 %
    # above the truth. Rounded so that the bounds are the same on every platform.
    first, ratio, last = 1e-4, 1.15, 1e6
    count = math.ceil(math.log(last / first) / math.log(ratio)) + 1
    return tuple(float(f"{first * ratio**index:.6g}") for index in range(count))


LATENCY_BOUNDS_SECONDS = _latency_bounds()
"""Upper bounds of the latency buckets; a bucket holds lower < value <= upper."""

LATENCY_METRICS = ("queue", "ttft", "tpot", "e2e")

TIME_BANDS = ((0, 6, "night"), (6, 12, "morning"), (12, 18, "afternoon"), (18, 24, "evening"))


def _key(name: str, dimension: str) -> Column:
    return Column(name, pa.int64(), "key", f"Row of {dimension}; {UNKNOWN_KEY} is unknown.")


def _count(name: str, meaning: str, unit: str = "tokens") -> Column:
    return Column(name, pa.int64(), unit, meaning)


def _seconds(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, pa.float64(), "s", meaning, null_when)


def _money(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, pa.int64(), "nano-USD", meaning, null_when)


def _nanoseconds(name: str, meaning: str) -> Column:
    return Column(name, pa.int64(), "ns", meaning)


def _energy(name: str, meaning: str) -> Column:
    return Column(name, pa.int64(), "microjoule", meaning, "it was not measured (never 0)")


def _text(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, pa.string(), "text", meaning, null_when)


def _number(name: str, meaning: str) -> Column:
    return Column(name, pa.int64(), "number", meaning)


def _flag(name: str, meaning: str) -> Column:
    return Column(name, pa.bool_(), "flag", meaning)


def _instant(name: str, meaning: str, null_when: str = "") -> Column:
    return Column(name, INSTANT, "UTC instant", meaning, null_when)


_DATE_KEY = Column("date_key", pa.int64(), "key", "Row of dim_date: the UTC date as yyyymmdd.")
_HOUR_KEY = Column("hour_key", pa.int64(), "key", "Row of dim_time_band: the UTC hour, 0 to 23.")
_MODEL_KEY = _key("model_key", "dim_model")
_DRAFTER_KEY = _key("drafter_key", "dim_drafter")
_VARIANT_KEY = _key("variant_key", "dim_variant")
_TENANT_KEY = _key("tenant_key", "dim_tenant")
_OUTCOME_KEY = _key("outcome_key", "dim_outcome")
_PRICE_KEY = _key("price_key", "dim_price")
_ENERGY_SOURCE = _text("energy_source", "Where energy was read: nvml_counter, rapl, none, ...")
_UNKNOWN_MEMBER = "the unknown member"

FACT_REQUEST = Table(
    "fact_request",
    TableKind.FACT,
    "One attempt of one request, whatever its outcome, in its latest correction.",
    (
        _number("ledger_id", "Row of the ledger; files are ordered by it."),
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _DRAFTER_KEY,
        _VARIANT_KEY,
        _TENANT_KEY,
        _OUTCOME_KEY,
        _PRICE_KEY,
        _instant("started_at", "Arrival of the request."),
        _instant("finished_at", "End of the request; date_key and hour_key are taken from it."),
        _text("request_id", "Identifier that client and traces know."),
        _number("attempt", "Attempt of that request, from 1."),
        _number("revision", "0 for the original row, higher for a correction."),
        _text("trace_id", "Trace of the request, 32 hex digits.", "no trace was recorded"),
        _text("guarantee", "bit_exact or rounding.", "no model took the request"),
        Column("temperature", pa.float64(), "number", "0 is greedy.", "it was refused unread"),
        _text("acceptance_rule", "coupled or rejection.", "it was refused unread"),
        _text("speculation_mode", "off, on or auto.", "it was refused unread"),
        _seconds("queue_seconds", "Arrival to first scheduling.", "it never ran"),
        _seconds("ttft_seconds", "Arrival to first token.", "it emitted no token"),
        _seconds("tpot_seconds", "Mean time per output token after the first.", "< 2 tokens"),
        _seconds("e2e_seconds", "Arrival to end."),
        _seconds("mean_step_latency_seconds", "Mean gap between messages.", "< 2 messages"),
        _count("num_prompt_tokens", "Prompt tokens, cached ones included."),
        _count("num_cached_prompt_tokens", "Prompt tokens taken from the prefix cache."),
        _count("num_recomputed_tokens", "Tokens computed again after a preemption."),
        _count("num_output_tokens", "Tokens emitted."),
        _count("num_prefill_positions", "Prompt positions computed by the target.", "positions"),
        _count("num_steps", "Engine steps it took part in.", "steps"),
        _count("num_plain_steps", "Steps that emitted a token without drafts.", "steps"),
        _count("num_verify_steps", "Steps that verified at least one draft token.", "steps"),
        _count("num_draft_tokens", "Draft tokens verified."),
        _count("num_accepted_tokens", "Draft tokens accepted."),
        _count("num_emitted_accepted_tokens", "Accepted tokens that reached the client."),
        _count("num_cut_tokens", "Recovered or bonus tokens that a stop cut."),
        _count("num_drafter_positions", "Positions a draft model computed.", "positions"),
        _count("num_preemptions", "Times it lost its blocks.", "preemptions"),
        _money("cost_nano_usd", "Share of the steps' cost; idle time is in fact_capacity."),
        _money("cost_prefill_nano_usd", "Of which: prompt positions."),
        _money("cost_decode_nano_usd", "Of which: the newest token of each step."),
        _money("cost_draft_nano_usd", "Of which: verifying draft tokens."),
        _money("cost_rejected_nano_usd", "Of cost_draft_nano_usd: tokens not accepted."),
        _money("cost_drafter_nano_usd", "Of which: the draft model's own work."),
        _money(
            "estimated_cost_without_speculation_nano_usd",
            "Estimate from the cost table, not a measurement.",
            "no cost table was measured",
        ),
        _nanoseconds("busy_nanoseconds", "Its share of the time of its steps."),
        _text("allocation_method", "Name and version of the cost split."),
        _energy("energy_microjoules", "Its share of the measured energy."),
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
        _number("position", "Place in the draft from 1; 0 only counts steps that accepted none."),
        _count("num_draft_tokens", "Drafts that had a token at this position."),
        _count("num_accepted_tokens", "Those accepted there."),
        _count("num_steps_drafted", "Verify steps that drafted exactly `position`.", "steps"),
        _count("num_steps_accepted", "Verify steps that accepted exactly `position`.", "steps"),
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
        _text("metric", "queue, ttft, tpot or e2e."),
        _number("bucket", "Place of the bucket; its bounds never change."),
        _seconds("upper_seconds", "Upper bound, inclusive; the last bucket holds all above."),
        _count("num_requests", "Requests in the bucket.", "requests"),
        Column("sum_microseconds", pa.int64(), "us", "Sum of their values, for means."),
    ),
)

FACT_CAPACITY = Table(
    "fact_capacity",
    TableKind.FACT,
    "One interval of one server start: what the machine did and cost.",
    (
        _number("capacity_id", "Row of the ledger; files are ordered by it."),
        _DATE_KEY,
        _HOUR_KEY,
        _MODEL_KEY,
        _PRICE_KEY,
        _instant("started_at", "Begin of the interval; date_key and hour_key are taken from it."),
        _instant("finished_at", "End of the interval."),
        _text("instance_id", "One start of one server."),
        _nanoseconds("wall_nanoseconds", "Length: busy + idle + lost."),
        _nanoseconds("busy_nanoseconds", "Inside steps."),
        _nanoseconds("idle_nanoseconds", "Between steps."),
        _nanoseconds("lost_nanoseconds", "Not chargeable: the server was killed."),
        _count("num_steps", "Engine steps.", "steps"),
        _count("num_prefill_positions", "Prompt positions computed.", "positions"),
        _count("num_decode_positions", "Newest tokens computed.", "positions"),
        _count("num_draft_positions", "Draft tokens verified.", "positions"),
        _count("num_emitted_tokens", "Tokens emitted."),
        _count("max_num_running", "Most requests running at once.", "requests"),
        _count("max_num_waiting", "Most requests waiting at once.", "requests"),
        _money("cost_busy_nano_usd", "Charged to requests."),
        _money("cost_idle_nano_usd", "Of idle time."),
        _money("cost_lost_nano_usd", "Of lost time."),
        _energy("energy_busy_microjoules", "Measured inside steps."),
        _energy("energy_idle_microjoules", "Measured between steps."),
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
        _text("verdict", "exact, numeric_tie or divergence."),
        _text("guarantee", "bit_exact, rounding or unknown."),
        _count("num_requests", "Requests audited.", "requests"),
        _count("num_checked_tokens", "Tokens checked against the target alone."),
        _count("num_mismatched_tokens", "Tokens that differ."),
    ),
)

FACT_RECONCILIATION = Table(
    "fact_reconciliation",
    TableKind.FACT,
    "One UTC date: what the ledger holds against what fact_request holds.",
    (
        _DATE_KEY,
        _count("num_ledger_requests", "Current rows of the ledger.", "requests"),
        _count("num_exported_requests", "Rows of fact_request.", "requests"),
        _count("num_superseded_rows", "Ledger rows replaced by a correction.", "rows"),
        _count("num_without_price", "Requests without a price.", "requests"),
        _count("num_without_energy", "Requests without measured energy.", "requests"),
        _count("num_without_model", "Requests of the unknown model.", "requests"),
        _count("num_without_tenant", "Requests of the unknown tenant.", "requests"),
        _money("ledger_cost_nano_usd", "Summed by the database."),
        _money("exported_cost_nano_usd", "Summed over the written file."),
        _count("num_ledger_output_tokens", "Summed by the database."),
        _count("num_exported_output_tokens", "Summed over the written file."),
        _number("last_ledger_id", "Highest ledger row of the date."),
        _instant("last_recorded_at", "When that date's latest row entered the ledger."),
    ),
)

DIM_DATE = Table(
    "dim_date",
    TableKind.DIMENSION,
    "One UTC day; whole years, without gaps (a date table for Power BI).",
    (
        Column("date_key", pa.int64(), "key", "yyyymmdd."),
        Column("date", pa.date32(), "date", "The day."),
        _number("year", "Year."),
        _number("quarter", "1 to 4."),
        _number("month", "1 to 12."),
        _text("month_name", "January to December."),
        _text("year_month", "yyyy-mm."),
        _number("iso_year", "Year of the ISO week."),
        _number("iso_week", "1 to 53."),
        _number("day", "Day of the month."),
        _number("weekday", "1 is Monday."),
        _text("weekday_name", "Monday to Sunday."),
        _flag("is_weekend", "Saturday or Sunday."),
    ),
)

DIM_TIME_BAND = Table(
    "dim_time_band",
    TableKind.DIMENSION,
    "One hour of the UTC day.",
    (
        Column("hour_key", pa.int64(), "key", "0 to 23."),
        _text("hour", "hh:00."),
        _text("band", "night, morning, afternoon or evening; unknown."),
        _number("band_order", "To sort by."),
    ),
)

DIM_MODEL = Table(
    "dim_model",
    TableKind.DIMENSION,
    "A target model as it was loaded.",
    (
        Column("model_key", pa.int64(), "key", "Key of the ledger."),
        _text("model", "Name it was loaded by."),
        _text("fingerprint", "Hash of its configuration and weights' headers."),
        _text("dtype", "Number format of the weights."),
        _text("device", "Device that it ran on."),
        _number("num_parameters", "Parameters; 0 for the unknown member."),
        _text("layout", "ragged, aligned or grouped."),
        _text("numerics", "invariant or fast: as configured."),
        _text("guarantee", "bit_exact or rounding: as measured at start."),
    ),
)

DIM_DRAFTER = Table(
    "dim_drafter",
    TableKind.DIMENSION,
    "What proposed the draft tokens.",
    (
        Column("drafter_key", pa.int64(), "key", "Key of the ledger."),
        _text("drafter", "Name; the unknown member stands for requests that never drafted."),
        _text("fingerprint", "Hash of its weights; empty without weights."),
    ),
)

DIM_VARIANT = Table(
    "dim_variant",
    TableKind.DIMENSION,
    "An arm of an experiment.",
    (
        Column("variant_key", pa.int64(), "key", "Key of the ledger."),
        _text("variant", "Name; default where no experiment ran."),
    ),
)

DIM_TENANT = Table(
    "dim_tenant",
    TableKind.DIMENSION,
    "A tenant, known by the keyed hash of its name alone.",
    (
        Column("tenant_key", pa.int64(), "key", "Key of the ledger."),
        _text("tenant", "Pseudonym."),
        _text("key_id", "Which hash key made it; it changes with a rotation."),
    ),
)

DIM_OUTCOME = Table(
    "dim_outcome",
    TableKind.DIMENSION,
    "How a request ended.",
    (
        Column("outcome_key", pa.int64(), "key", "Fixed: a key is never used for another outcome."),
        _text("outcome", "completed, cancelled, deadline_exceeded, refused, failed or orphaned."),
        _text("finish_reason", "Why it produced no further tokens; none when it never ran."),
        _flag("is_success", "The caller got what was asked for."),
    ),
)

DIM_PRICE = Table(
    "dim_price",
    TableKind.DIMENSION,
    "What an hour of a machine cost while it was valid.",
    (
        Column("price_key", pa.int64(), "key", "Key of the ledger."),
        _text("book_version", "Version of the price book."),
        _text("machine_type", "Kind of machine."),
        _text("purchase", "on_demand, spot, reserved or owned."),
        _text("currency", "ISO 4217 code of the book; amounts are in USD."),
        _money("nano_usd_per_hour", "Price of an hour, embodied share included.", _UNKNOWN_MEMBER),
        _money("embodied_nano_usd_per_hour", "Of which: manufacture.", _UNKNOWN_MEMBER),
        _instant("valid_from", "Begin of its validity.", _UNKNOWN_MEMBER),
        _instant("valid_to", "End of its validity, exclusive.", "it is still valid"),
    ),
)

REQUEST_TABLES = (FACT_REQUEST, FACT_ACCEPTANCE, FACT_LATENCY_HISTOGRAM, FACT_RECONCILIATION)
"""What is rewritten together when a request of a date changes."""

FACTS = (*REQUEST_TABLES, FACT_CAPACITY, FACT_EQUIVALENCE)
DIMENSIONS = (
    DIM_DATE,
    DIM_TIME_BAND,
    DIM_MODEL,
    DIM_DRAFTER,
    DIM_VARIANT,
    DIM_TENANT,
    DIM_OUTCOME,
    DIM_PRICE,
)
TABLES: dict[str, Table] = {table.name: table for table in (*FACTS, *DIMENSIONS)}
