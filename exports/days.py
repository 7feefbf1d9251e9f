"""Writing one UTC date of the fact tables as staged files, from rows that stream by."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from exports.columns import Table
from exports.data_file import StagedFile
from exports.facts import (
    FACT_ACCEPTANCE,
    FACT_CAPACITY,
    FACT_EQUIVALENCE,
    FACT_LATENCY_HISTOGRAM,
    FACT_REQUEST,
)
from exports.latency_histogram import LatencyHistogram
from exports.ledger_facts import DayTotals
from exports.prefetch import Prefetch
from exports.row_stream import Statement
from exports.slices import slices_of
from exports.transform import (
    acceptance_rows,
    fact_capacity,
    fact_equivalence,
    fact_requests,
    new_acceptance_fold,
    new_equivalence_fold,
    without_rows,
)
from exports.write import TableWriter, day_folder

_SUMMED = ("num_output_tokens", "num_prompt_tokens", "num_accepted_tokens", "cost_nano_usd")
_ACCEPTANCE = pa.schema(
    [
        (name, pa.int64())
        for name in (
            "request_ledger_id",
            "position",
            "num_drafted",
            "num_accepted",
            "num_accepted_of_length",
        )
    ]
)

Batches = Iterator[pa.RecordBatch]
StagedFiles = dict[str, list[StagedFile]]


class DayKind(StrEnum):
    """Which tables of a date: REQUESTS means fact_request and what is derived from it."""

    REQUESTS = "requests"
    CAPACITY = "capacity"
    EQUIVALENCE = "equivalence"


@dataclass(frozen=True, slots=True)
class DayTask:
    """A date to write. `acceptance` goes with REQUESTS alone."""

    kind: DayKind
    day: date
    rows: Statement
    acceptance: Statement | None = None


@dataclass(frozen=True, slots=True)
class DayQuality:
    """What is missing in the current rows of a date, and the latest of all its rows."""

    num_without_price: int = 0
    num_without_energy: int = 0
    num_without_model: int = 0
    num_without_tenant: int = 0
    last_ledger_id: int = 0
    last_recorded_at_microseconds: int = 0


@dataclass(frozen=True, slots=True)
class WrittenDay:
    """The staged files of a date by table; for REQUESTS also what the written files add up to."""

    files: StagedFiles
    totals: DayTotals = field(default_factory=DayTotals)
    quality: DayQuality = field(default_factory=DayQuality)


@dataclass(frozen=True, slots=True)
class DayBuilder:
    """Writes dates under `staging`. `on_rows` is told of each further number of request rows.

    Raises SourceError or TargetError, from the rows or the files.
    """

    staging: Path
    superseded_ids: np.ndarray
    on_rows: Callable[[int], None]

    def requests(self, day: date, rows: Batches, acceptance: Batches) -> WrittenDay:
        """fact_request, fact_latency_histogram and fact_acceptance; both inputs in ledger order."""
        quality, num_superseded = DayQuality(), 0
        latency, acceptance_fold = LatencyHistogram(), new_acceptance_fold()
        with (
            TableWriter(self.staging, FACT_REQUEST, day_folder(day), _SUMMED) as writer,
            Prefetch(rows) as ahead,
            Prefetch(acceptance) as acceptance_ahead,
        ):
            for batch, positions in _side_by_side(ahead, acceptance_ahead):
                kept = without_rows(batch, self.superseded_ids)
                num_superseded += batch.num_rows - kept.num_rows
                quality = _seen(quality, batch, kept)
                requests = fact_requests(kept)
                writer.add(requests)
                slices = slices_of(requests)
                latency.add(requests, slices)
                acceptance_fold.add(acceptance_rows(requests, slices, positions))
                self.on_rows(batch.num_rows)
            files = {FACT_REQUEST.name: writer.finish()}
        num_rows = sum(entry.file.num_rows for entry in files[FACT_REQUEST.name])
        totals = DayTotals(num_rows, num_superseded, *(writer.sums[name] for name in _SUMMED))
        for table, fold in ((FACT_LATENCY_HISTOGRAM, latency), (FACT_ACCEPTANCE, acceptance_fold)):
            files[table.name] = whole_table(self.staging, table, day_folder(day), fold.result())
        return WrittenDay(files, totals, quality)

    def capacity(self, day: date, rows: Batches) -> WrittenDay:
        """fact_capacity."""
        with TableWriter(self.staging, FACT_CAPACITY, day_folder(day)) as writer:
            for batch in rows:
                writer.add(fact_capacity(batch))
            return WrittenDay({FACT_CAPACITY.name: writer.finish()})

    def equivalence(self, day: date, rows: Batches) -> WrittenDay:
        """fact_equivalence."""
        fold = new_equivalence_fold()
        for batch in rows:
            fold.add(fact_equivalence(batch))
        table = FACT_EQUIVALENCE
        files = whole_table(self.staging, table, day_folder(day), fold.result())
        return WrittenDay({table.name: files})


def whole_table(staging: Path, table: Table, folder: str, rows: pa.Table) -> list[StagedFile]:
    """A part of a table that is in memory already."""
    with TableWriter(staging, table, folder) as writer:
        writer.add(rows)
        return writer.finish()


def _side_by_side(
    batches: Iterable[pa.RecordBatch], acceptance: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """Each batch of requests with the acceptance rows up to its last request."""
    coming = iter(acceptance)
    waiting: pa.RecordBatch | None = None
    for batch in batches:
        last = batch.column("ledger_id")[-1].as_py()
        parts: list[pa.RecordBatch] = []
        while (rows := waiting or next(coming, None)) is not None:
            owners = rows.column("request_ledger_id").to_numpy()
            num_taken = int(np.searchsorted(owners, last, side="right"))
            parts.append(rows.slice(0, num_taken))
            waiting = rows.slice(num_taken) if num_taken < rows.num_rows else None
            if waiting is not None:
                break
        yield batch, pa.Table.from_batches(parts, _ACCEPTANCE)


def _seen(before: DayQuality, batch: pa.RecordBatch, kept: pa.RecordBatch) -> DayQuality:
    recorded_at = pc.max(batch.column("recorded_at").cast(pa.int64())).as_py()
    return DayQuality(
        before.num_without_price + kept.column("price_key").null_count,
        before.num_without_energy + kept.column("energy_microjoules").null_count,
        before.num_without_model + kept.column("model_key").null_count,
        before.num_without_tenant + kept.column("tenant_key").null_count,
        max(before.last_ledger_id, pc.max(batch.column("ledger_id")).as_py()),
        max(before.last_recorded_at_microseconds, recorded_at),
    )
