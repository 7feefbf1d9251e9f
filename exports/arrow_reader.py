"""Rows of the ledger as Arrow batches: what is selected, and how it streams.

ADBC fills Arrow buffers in C and streams, so that memory does not grow with the ledger.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from sqlalchemy import Dialect, Select
from sqlalchemy.engine import URL
from sqlalchemy.orm import InstrumentedAttribute

from exports.errors import SourceError
from telemetry.ledger.models import UtcInstant

BATCH_ROWS = 65_536

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
ACCEPTANCE_COLUMNS = ("request_ledger_id", "position", "num_drafted", "num_accepted")
ACCEPTANCE_SCHEMA = pa.schema([(name, pa.int64()) for name in ACCEPTANCE_COLUMNS])


class ArrowReader:
    """One connection that streams one answer at a time. Raises SourceError when it breaks."""

    def __init__(self, url: URL, dialect: Dialect) -> None:
        self._dialect = dialect
        self._is_sqlite = dialect.name == "sqlite"
        self._connection: Any = _connect(url)

    def close(self) -> None:
        """Release the connection."""
        self._connection.close()

    def batches(
        self, statement: Select[Any], columns: Sequence[InstrumentedAttribute[Any]]
    ) -> Iterator[pa.RecordBatch]:
        """The statement's rows, in batches that are never empty, with the columns' names."""
        names = [column.key for column in columns]
        sql = str(
            statement.compile(dialect=self._dialect, compile_kwargs={"literal_binds": True})
        ).replace("%%", "%")
        options = {}
        if self._is_sqlite:
            sql = f"{_typed_row(columns)} UNION ALL SELECT * FROM ({sql})"  # noqa: S608 - no input
            options["adbc.sqlite.query.batch_rows"] = str(BATCH_ROWS)
        try:
            with self._connection.cursor(adbc_stmt_kwargs=options) as cursor:
                cursor.execute(sql)
                is_first = self._is_sqlite
                for batch in cursor.fetch_record_batch():
                    rows = batch.slice(1) if is_first else batch
                    is_first = False
                    if rows.num_rows:
                        yield pa.RecordBatch.from_arrays(rows.columns, names)
        except self._connection.Error as error:
            raise SourceError(f"the ledger cannot be read: {error}") from error


def _typed_row(columns: Sequence[InstrumentedAttribute[Any]]) -> str:
    # SQLite has no column types to give away: the driver takes them from the first rows, where
    # a column may be all NULL. One row of the declared types goes ahead and is dropped again.
    def literal(column: InstrumentedAttribute[Any]) -> str:
        if isinstance(column.type, UtcInstant):
            return "0"  # microseconds
        return {int: "0", float: "0.0", str: "''"}[column.type.python_type]

    return "SELECT " + ", ".join(literal(column) for column in columns)


def _connect(url: URL) -> Any:
    if url.get_backend_name() == "sqlite":
        from adbc_driver_sqlite import dbapi

        connection = dbapi.connect(str(url.database))
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA query_only=ON")
            cursor.execute("PRAGMA busy_timeout=30000")
        return connection
    from adbc_driver_postgresql import dbapi as postgresql

    return postgresql.connect(
        url.set(drivername="postgresql").render_as_string(hide_password=False)
    )
