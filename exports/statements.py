"""Which rows of the ledger an export reads, as SQL text that another process can run."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Dialect, Select
from sqlalchemy.orm import InstrumentedAttribute

from exports.row_stream import Statement
from telemetry.ledger.models import UtcInstant

REQUEST_COLUMNS = (
    "ledger_id",
    "model_key",
    "drafter_key",
    "variant_key",
    "tenant_key",
    "price_key",
    "outcome",
    "finish_reason",
    "recorded_at",
    "started_at",
    "finished_at",
    "request_id",
    "attempt",
    "revision",
    "trace_id",
    "guarantee",
    "temperature",
    "acceptance_rule",
    "speculation_mode",
    "queue_seconds",
    "ttft_seconds",
    "tpot_seconds",
    "e2e_seconds",
    "mean_step_latency_seconds",
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_recomputed_tokens",
    "num_output_tokens",
    "num_prefill_positions",
    "num_steps",
    "num_plain_steps",
    "num_verify_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_emitted_accepted_tokens",
    "num_cut_tokens",
    "num_drafter_positions",
    "num_preemptions",
    "cost_nano_usd",
    "cost_prefill_nano_usd",
    "cost_decode_nano_usd",
    "cost_draft_nano_usd",
    "cost_rejected_nano_usd",
    "cost_drafter_nano_usd",
    "estimated_cost_without_speculation_nano_usd",
    "busy_nanoseconds",
    "allocation_method",
    "energy_microjoules",
    "energy_source",
)
CAPACITY_COLUMNS = (
    "capacity_id",
    "model_key",
    "price_key",
    "started_at",
    "finished_at",
    "instance_id",
    "wall_nanoseconds",
    "busy_nanoseconds",
    "idle_nanoseconds",
    "lost_nanoseconds",
    "num_steps",
    "num_prefill_positions",
    "num_decode_positions",
    "num_draft_positions",
    "num_emitted_tokens",
    "max_num_running",
    "max_num_waiting",
    "cost_busy_nano_usd",
    "cost_idle_nano_usd",
    "cost_lost_nano_usd",
    "energy_busy_microjoules",
    "energy_idle_microjoules",
    "energy_source",
)
AUDIT_COLUMNS = (
    "audit_id",
    "model_key",
    "drafter_key",
    "variant_key",
    "audited_at",
    "verdict",
    "guarantee",
    "num_checked_tokens",
    "num_mismatched_tokens",
)
ACCEPTANCE_COLUMNS = (
    "request_ledger_id",
    "position",
    "num_drafted",
    "num_accepted",
    "num_accepted_of_length",
)


def compiled(
    statement: Select[Any], columns: Sequence[InstrumentedAttribute[Any]], dialect: Dialect
) -> Statement:
    """The statement, which selects `columns`, in the words of a database."""
    sql = str(statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})).replace(
        "%%", "%"
    )
    is_sqlite = dialect.name == "sqlite"
    if is_sqlite:
        sql = f"{_typed_row(columns)} UNION ALL SELECT * FROM ({sql})"  # noqa: S608 - no input
    return Statement(sql, tuple(column.key for column in columns), num_leading_rows=int(is_sqlite))


def _typed_row(columns: Sequence[InstrumentedAttribute[Any]]) -> str:
    # SQLite has no column types to give away: the driver takes them from the first rows, where
    # a column may be all NULL. One row of the declared types goes ahead and is dropped again.
    def literal(column: InstrumentedAttribute[Any]) -> str:
        if isinstance(column.type, UtcInstant):
            return "0"  # microseconds
        return {int: "0", float: "0.0", str: "''"}[column.type.python_type]

    return "SELECT " + ", ".join(literal(column) for column in columns)
