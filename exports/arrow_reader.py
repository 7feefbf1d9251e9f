"""Rows of the ledger as Arrow batches: what is selected, and how it streams.

The rows come from a process of its own (exports.arrow_worker) through a pipe. Its driver links
a second copy of SQLite, and two copies in one process undo each other's file locks on the same
database; apart they respect them. It also keeps a second core busy.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

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
    """One worker, started on first use, that streams one answer at a time.

    Raises SourceError when the ledger or the worker fails.
    """

    def __init__(self, url: URL, dialect: Dialect) -> None:
        self._dialect = dialect
        self._is_sqlite = dialect.name == "sqlite"
        self._database = str(url.database) if self._is_sqlite else _libpq_options(url)
        self._worker: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None

    def start(self) -> None:
        """Start the worker beforehand, so that it is ready when it is asked."""
        if self._worker is None:
            self._start()

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None
        if self._complaints is not None:
            self._complaints.close()
            self._complaints = None

    def batches(
        self, statement: Select[Any], columns: Sequence[InstrumentedAttribute[Any]]
    ) -> Iterator[pa.RecordBatch]:
        """The statement's rows, in batches that are never empty, with the columns' names.

        Take all of them before the next call.
        """
        names = [column.key for column in columns]
        sql = str(
            statement.compile(dialect=self._dialect, compile_kwargs={"literal_binds": True})
        ).replace("%%", "%")
        if self._is_sqlite:
            sql = f"{_typed_row(columns)} UNION ALL SELECT * FROM ({sql})"  # noqa: S608 - no input
        is_first = self._is_sqlite
        for batch in self._answer(sql):
            rows = batch.slice(1) if is_first else batch
            is_first = False
            if rows.num_rows:
                yield pa.RecordBatch.from_arrays(rows.columns, names)

    def _answer(self, sql: str) -> Iterator[pa.RecordBatch]:
        worker = self._worker or self._start()
        # Both ends of a running worker are pipes.
        stdin, stdout = cast("IO[bytes]", worker.stdin), cast("IO[bytes]", worker.stdout)
        try:
            self._send(stdin, {"sql": sql})
            with pa.ipc.open_stream(pa.input_stream(stdout)) as stream:
                yield from stream
        except (OSError, pa.ArrowException) as error:
            complaint = self._complaint() or str(error)
            self.close()
            raise SourceError(f"the ledger cannot be read: {complaint}") from error

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "exports.arrow_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env={**os.environ, "PYTHONPATH": path},
        )
        # Not an argument: it may hold a password, which `ps` would show.
        self._send(
            cast("IO[bytes]", self._worker.stdin),
            {"dialect": self._dialect.name, "database": self._database, "batch_rows": BATCH_ROWS},
        )
        return self._worker

    @staticmethod
    def _send(stdin: IO[bytes], message: dict[str, Any]) -> None:
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()

    def _complaint(self) -> str:
        if self._worker is None or self._complaints is None:
            return ""
        self._worker.wait(timeout=10)
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _libpq_options(url: URL) -> str:
    from psycopg.conninfo import make_conninfo

    arguments = url.translate_connect_args(username="user", database="dbname")
    return make_conninfo(**{**arguments, **url.query})


def _typed_row(columns: Sequence[InstrumentedAttribute[Any]]) -> str:
    # SQLite has no column types to give away: the driver takes them from the first rows, where
    # a column may be all NULL. One row of the declared types goes ahead and is dropped again.
    def literal(column: InstrumentedAttribute[Any]) -> str:
        if isinstance(column.type, UtcInstant):
            return "0"  # microseconds
        return {int: "0", float: "0.0", str: "''"}[column.type.python_type]

    return "SELECT " + ", ".join(literal(column) for column in columns)
