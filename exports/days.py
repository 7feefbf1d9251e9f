"""Rewriting one UTC date of the fact tables, and checking it before it may be published."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from exports.arrow_reader import ACCEPTANCE_SCHEMA
from exports.columns import (
    Table,
)
from exports.dimensions import date_key
from exports.errors import ReconciliationError
from exports.extract import DayTotals, LedgerSource, Watermark
from exports.facts import (
    FACT_ACCEPTANCE,
    FACT_CAPACITY,
    FACT_EQUIVALENCE,
    FACT_LATENCY_HISTOGRAM,
    FACT_RECONCILIATION,
    FACT_REQUEST,
)
from exports.manifest import DataFile
from exports.prefetch import Prefetch
from exports.storage import Target
from exports.transform import (
    acceptance_rows,
    fact_capacity,
    fact_equivalence,
    fact_requests,
    latency_rows,
    new_acceptance_fold,
    new_equivalence_fold,
    new_latency_fold,
    without_rows,
)
from exports.write import TableWriter, day_folder

_SUMMED = ("num_output_tokens", "num_prompt_tokens", "num_accepted_tokens", "cost_nano_usd")

Files = dict[str, list[DataFile]]


@dataclass(frozen=True, slots=True)
class DayWriter:
    """What rewriting a date needs. `on_rows` is told of each further number of request rows."""

    source: LedgerSource
    target: Target
    staging: Path
    watermark: Watermark
    superseded_ids: np.ndarray
    on_rows: Callable[[int], None]

    def request_tables(self, day: date) -> Files:
        """fact_request and what is derived from it. Raises ReconciliationError on a difference.

        The files are in place, under new names, when this returns; no manifest knows them yet.
        """
        quality = _Quality()
        latency, acceptance = new_latency_fold(), new_acceptance_fold()
        with (
            self._writer(FACT_REQUEST, day, _SUMMED) as writer,
            Prefetch(self._requests_with_acceptance(day)) as batches,
            ThreadPoolExecutor(1) as database,
        ):
            totals = database.submit(self.source.day_totals, day, self.watermark.ledger_id)
            for batch, positions in batches:
                kept = without_rows(batch, self.superseded_ids)
                quality.see(batch, kept)
                requests = fact_requests(kept)
                writer.add(requests)
                for rows in latency_rows(requests):
                    latency.add(rows)
                acceptance.add(acceptance_rows(requests, positions))
                self.on_rows(batch.num_rows)
            files = {FACT_REQUEST.name: writer.finish()}
            sums, ledger = writer.sums, totals.result()
        num_rows = sum(file.num_rows for file in files[FACT_REQUEST.name])
        exported = DayTotals(num_rows, quality.num_superseded, *(sums[name] for name in _SUMMED))
        if exported != ledger:
            raise ReconciliationError(f"{day}: exported {exported}, the ledger holds {ledger}")
        files[FACT_LATENCY_HISTOGRAM.name] = self._whole(
            FACT_LATENCY_HISTOGRAM, day, latency.result()
        )
        files[FACT_ACCEPTANCE.name] = self._whole(FACT_ACCEPTANCE, day, acceptance.result())
        files[FACT_RECONCILIATION.name] = self._whole(
            FACT_RECONCILIATION, day, quality.row(day, ledger, exported)
        )
        return files

    def capacity_table(self, day: date) -> Files:
        """fact_capacity of one date."""
        with self._writer(FACT_CAPACITY, day) as writer:
            for batch in self.source.capacity_batches(day, self.watermark.capacity_id):
                writer.add(fact_capacity(batch))
            return {FACT_CAPACITY.name: writer.finish()}

    def equivalence_table(self, day: date) -> Files:
        """fact_equivalence of one date."""
        fold = new_equivalence_fold()
        for batch in self.source.audit_batches(day, self.watermark.audit_id):
            fold.add(fact_equivalence(batch))
        return {FACT_EQUIVALENCE.name: self._whole(FACT_EQUIVALENCE, day, fold.result())}

    def dimension(self, table: Table, rows: pa.Table) -> Files:
        """A dimension, whole."""
        return {table.name: self._whole(table, None, rows)}

    def _requests_with_acceptance(self, day: date) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
        for batch in self.source.request_batches(day, self.watermark.ledger_id):
            has_drafts = pc.greater(batch.column("num_draft_tokens"), 0)
            drafting = batch.column("ledger_id").filter(has_drafts)
            parts: list[pa.RecordBatch] = []
            if len(drafting):
                first, last = drafting[0].as_py(), drafting[-1].as_py()
                parts = list(self.source.acceptance_batches(day, first, last))
            yield batch, pa.Table.from_batches(parts, ACCEPTANCE_SCHEMA)

    def _whole(self, table: Table, day: date | None, rows: pa.Table) -> list[DataFile]:
        with self._writer(table, day) as writer:
            writer.add(rows)
            return writer.finish()

    def _writer(self, table: Table, day: date | None, summed: tuple[str, ...] = ()) -> TableWriter:
        folder = "" if day is None else day_folder(day)
        return TableWriter(self.target, self.staging, table, folder, summed)


class _Quality:
    """Counts what a dashboard's page on data quality shows of a date."""

    def __init__(self) -> None:
        self.num_superseded = 0
        self._missing = dict.fromkeys(
            ("price_key", "energy_microjoules", "model_key", "tenant_key"), 0
        )
        self._last_ledger_id = 0
        self._last_recorded_at = 0

    def see(self, batch: pa.RecordBatch, kept: pa.RecordBatch) -> None:
        self.num_superseded += batch.num_rows - kept.num_rows
        for name in self._missing:
            self._missing[name] += kept.column(name).null_count
        self._last_ledger_id = max(self._last_ledger_id, pc.max(batch.column("ledger_id")).as_py())
        recorded_at = pc.max(batch.column("recorded_at").cast(pa.int64())).as_py()
        self._last_recorded_at = max(self._last_recorded_at, recorded_at)

    def row(self, day: date, ledger: DayTotals, exported: DayTotals) -> pa.Table:
        if not ledger.num_requests:
            return FACT_RECONCILIATION.schema.empty_table()
        values = {
            "date_key": date_key(day),
            "num_ledger_requests": ledger.num_requests,
            "num_exported_requests": exported.num_requests,
            "num_superseded_rows": self.num_superseded,
            "num_without_price": self._missing["price_key"],
            "num_without_energy": self._missing["energy_microjoules"],
            "num_without_model": self._missing["model_key"],
            "num_without_tenant": self._missing["tenant_key"],
            "ledger_cost_nano_usd": ledger.cost_nano_usd,
            "exported_cost_nano_usd": exported.cost_nano_usd,
            "num_ledger_output_tokens": ledger.num_output_tokens,
            "num_exported_output_tokens": exported.num_output_tokens,
            "last_ledger_id": self._last_ledger_id,
            "last_recorded_at": self._last_recorded_at,
        }
        return pa.Table.from_pylist([values], schema=FACT_RECONCILIATION.schema)
