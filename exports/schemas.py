"""The star schema: every exported table and column, with its unit, meaning and null rule.

These tables are the contract that a dashboard reads. A column may be added at the end of its
table; it is never renamed, retyped or removed without a new `SCHEMA_VERSION`
(tests/exports/test_contract.py holds the released columns). The data dictionary in
exports/README.md is generated from here.
"""

import pyarrow as pa

from exports.columns import (
    Column,
    Table,
    TableKind,
    flag_column,
    instant_column,
    money_column,
    number_column,
    text_column,
)
from exports.facts import (
    FACT_ACCEPTANCE,
    FACT_CAPACITY,
    FACT_EQUIVALENCE,
    FACT_LATENCY_HISTOGRAM,
    FACT_RECONCILIATION,
    FACT_REQUEST,
)

_UNKNOWN_MEMBER = "the unknown member"

DIM_DATE = Table(
    "dim_date",
    TableKind.DIMENSION,
    "One UTC day; whole years, without gaps (a date table for Power BI).",
    (
        Column("date_key", pa.int64(), "key", "yyyymmdd."),
        Column("date", pa.date32(), "date", "The day."),
        number_column("year", "Year."),
        number_column("quarter", "1 to 4."),
        number_column("month", "1 to 12."),
        text_column("month_name", "January to December."),
        text_column("year_month", "yyyy-mm."),
        number_column("iso_year", "Year of the ISO week."),
        number_column("iso_week", "1 to 53."),
        number_column("day", "Day of the month."),
        number_column("weekday", "1 is Monday."),
        text_column("weekday_name", "Monday to Sunday."),
        flag_column("is_weekend", "Saturday or Sunday."),
    ),
)

DIM_TIME_BAND = Table(
    "dim_time_band",
    TableKind.DIMENSION,
    "One hour of the UTC day.",
    (
        Column("hour_key", pa.int64(), "key", "0 to 23."),
        text_column("hour", "hh:00."),
        text_column("band", "night, morning, afternoon or evening; unknown."),
        number_column("band_order", "To sort by."),
    ),
)

DIM_MODEL = Table(
    "dim_model",
    TableKind.DIMENSION,
    "A target model as it was loaded.",
    (
        Column("model_key", pa.int64(), "key", "Key of the ledger."),
        text_column("model", "Name it was loaded by."),
        text_column("fingerprint", "Hash of its configuration and weights' headers."),
        text_column("dtype", "Number format of the weights."),
        text_column("device", "Device that it ran on."),
        number_column("num_parameters", "Parameters; 0 for the unknown member."),
        text_column("layout", "ragged, aligned or grouped."),
        text_column("numerics", "invariant or fast: as configured."),
        text_column("guarantee", "bit_exact or rounding: as measured at start."),
    ),
)

DIM_DRAFTER = Table(
    "dim_drafter",
    TableKind.DIMENSION,
    "What proposed the draft tokens.",
    (
        Column("drafter_key", pa.int64(), "key", "Key of the ledger."),
        text_column("drafter", "Name; the unknown member stands for requests that never drafted."),
        text_column("fingerprint", "Hash of its weights; empty without weights."),
    ),
)

DIM_VARIANT = Table(
    "dim_variant",
    TableKind.DIMENSION,
    "An arm of an experiment.",
    (
        Column("variant_key", pa.int64(), "key", "Key of the ledger."),
        text_column("variant", "Name; default where no experiment ran."),
    ),
)

DIM_TENANT = Table(
    "dim_tenant",
    TableKind.DIMENSION,
    "A tenant, known by the keyed hash of its name alone.",
    (
        Column("tenant_key", pa.int64(), "key", "Key of the ledger."),
        text_column("tenant", "Pseudonym."),
        text_column("key_id", "Which hash key made it; it changes with a rotation."),
    ),
)

DIM_OUTCOME = Table(
    "dim_outcome",
    TableKind.DIMENSION,
    "How a request ended.",
    (
        Column("outcome_key", pa.int64(), "key", "Fixed: a key is never used for another outcome."),
        text_column(
            "outcome", "completed, cancelled, deadline_exceeded, refused, failed or orphaned."
        ),
        text_column("finish_reason", "Why it produced no further tokens; none when it never ran."),
        flag_column("is_success", "The caller got what was asked for."),
    ),
)

DIM_PRICE = Table(
    "dim_price",
    TableKind.DIMENSION,
    "What an hour of a machine cost while it was valid.",
    (
        Column("price_key", pa.int64(), "key", "Key of the ledger."),
        text_column("book_version", "Version of the price book."),
        text_column("machine_type", "Kind of machine."),
        text_column("purchase", "on_demand, spot, reserved or owned."),
        text_column("currency", "ISO 4217 code of the book; amounts are in USD."),
        money_column(
            "nano_usd_per_hour", "Price of an hour, embodied share included.", _UNKNOWN_MEMBER
        ),
        money_column("embodied_nano_usd_per_hour", "Of which: manufacture.", _UNKNOWN_MEMBER),
        instant_column("valid_from", "Begin of its validity.", _UNKNOWN_MEMBER),
        instant_column("valid_to", "End of its validity, exclusive.", "it is still valid"),
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
