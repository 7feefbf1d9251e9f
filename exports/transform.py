"""From ledger rows to rows of the star schema: pure functions over Arrow batches."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from exports.columns import (
    INSTANT,
    UNKNOWN_KEY,
    Table,
)
from exports.dimensions import outcome_keys
from exports.facts import (
    FACT_ACCEPTANCE,
    FACT_CAPACITY,
    FACT_EQUIVALENCE,
    FACT_REQUEST,
)
from exports.slices import Slices, summed_by

_MICROSECONDS_PER_HOUR = 3_600_000_000
_ACCEPTANCE_MEASURES = (
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_steps_drafted",
    "num_steps_accepted",
    "num_accepted_of_length",
)
_NULL_IF_ANY_IS = pc.ScalarAggregateOptions(skip_nulls=False)
_FOLD_AFTER = 64


class Fold:
    """Sums rows of equal keys as they stream by; holds one row per key, not per input row.

    A sum is NULL as soon as one of its values is.
    """

    def __init__(self, table: Table, measures: Iterable[str]) -> None:
        self._schema = table.schema
        self._measures = tuple(measures)
        self._keys = [c.name for c in table.columns if c.name not in self._measures]
        self._parts: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        """Take in rows that have the table's columns, in any order of columns."""
        self._parts.append(self._summed([rows]))
        if len(self._parts) >= _FOLD_AFTER:
            self._parts = [self._summed(self._parts)]

    def result(self) -> pa.Table:
        """One row per key, ordered by key."""
        if not self._parts:
            return self._schema.empty_table()
        summed = self._summed(self._parts).sort_by([(key, "ascending") for key in self._keys])
        return summed.select(self._schema.names).cast(self._schema)

    def _summed(self, parts: list[pa.Table]) -> pa.Table:
        rows = pa.concat_tables([part.select(self._schema.names) for part in parts])
        summed = rows.group_by(self._keys, use_threads=False).aggregate(
            [(measure, "sum", _NULL_IF_ANY_IS) for measure in self._measures]
        )
        return summed.rename_columns(
            [
                name.removesuffix("_sum") if name not in self._keys else name
                for name in summed.column_names
            ]
        ).select(self._schema.names)


def new_acceptance_fold() -> Fold:
    """An empty fact_acceptance."""
    return Fold(FACT_ACCEPTANCE, _ACCEPTANCE_MEASURES)


def new_equivalence_fold() -> Fold:
    """An empty fact_equivalence."""
    return Fold(FACT_EQUIVALENCE, ("num_requests", "num_checked_tokens", "num_mismatched_tokens"))


def without_rows(batch: pa.RecordBatch, ledger_ids: np.ndarray) -> pa.RecordBatch:
    """The batch without the rows of those ledger ids."""
    if not len(ledger_ids):
        return batch
    is_kept = np.isin(batch.column("ledger_id").to_numpy(), ledger_ids, invert=True)
    return batch if is_kept.all() else batch.filter(pa.array(is_kept))


def fact_requests(batch: pa.RecordBatch) -> pa.Table:
    """Rows of fact_request from rows of the ledger."""
    columns = _with_keys(batch, "finished_at")
    columns["outcome_key"] = outcome_keys(columns["outcome"], columns["finish_reason"])
    return _shaped(columns, FACT_REQUEST)


def fact_capacity(batch: pa.RecordBatch) -> pa.Table:
    """Rows of fact_capacity from rows of the ledger."""
    return _shaped(_with_keys(batch, "started_at"), FACT_CAPACITY)


def fact_equivalence(batch: pa.RecordBatch) -> pa.Table:
    """One row per audit in the shape of fact_equivalence, to be folded."""
    columns = _with_keys(batch, "audited_at")
    columns["guarantee"] = pc.fill_null(columns["guarantee"], "unknown")
    columns["num_requests"] = _repeated(1, batch.num_rows)
    return _shaped(columns, FACT_EQUIVALENCE)


def acceptance_rows(requests: pa.Table, slices: Slices, acceptance: pa.Table) -> pa.Table:
    """A row per slice and position from 1, and position 0 for the steps that accepted nothing.

    `requests` are rows of fact_request, `acceptance` the ledger's rows of those requests with
    positions from 0; both in the order of the ledger. Acceptance of other requests is left out.
    """
    owners = requests.column("ledger_id").to_numpy()
    ids = acceptance.column("request_ledger_id").to_numpy()
    place = np.minimum(np.searchsorted(owners, ids), max(len(owners) - 1, 0))
    is_ours = owners[place] == ids if len(owners) else np.zeros(len(ids), dtype=bool)
    position, drafted, accepted = (
        acceptance.column(name).to_numpy() for name in ("position", "num_drafted", "num_accepted")
    )
    of_length = acceptance.column("num_accepted_of_length")
    is_unknown = of_length.is_null().to_numpy().astype(np.int64)
    of_length = pc.fill_null(of_length, 0).to_numpy()
    if not is_ours.all():
        ids, place, position, drafted, accepted, of_length, is_unknown = (
            values[is_ours]
            for values in (ids, place, position, drafted, accepted, of_length, is_unknown)
        )
    # A draft of length n has a token at every position up to n, so a difference between
    # neighbours counts the drafts that end there; the same holds for accepted prefixes.
    has_next = np.append(ids[1:] == ids[:-1], False)
    steps_drafted = drafted - np.where(has_next, np.append(drafted[1:], 0), 0)
    steps_accepted = accepted - np.where(has_next, np.append(accepted[1:], 0), 0)
    first = position == 0
    zeros = np.zeros(int(first.sum()), dtype=np.int64)
    width = int(position.max(initial=0)) + 2
    cell = slices.places[place] * width
    cells, (*sums, num_unknown) = summed_by(
        np.concatenate([cell + position + 1, cell[first]]),
        tuple(
            np.concatenate(pair)
            for pair in (
                (drafted, zeros),
                (accepted, zeros),
                (steps_drafted, zeros),
                (steps_accepted, drafted[first] - accepted[first]),
                (of_length, zeros),
                (is_unknown, zeros),
            )
        ),
    )
    columns = {
        **slices.columns(cells // width),
        "position": pa.array(cells % width),
        **{name: pa.array(values) for name, values in zip(_ACCEPTANCE_MEASURES, sums, strict=True)},
        "num_accepted_of_length": pa.array(sums[-1], mask=num_unknown > 0),
    }
    return _shaped(columns, FACT_ACCEPTANCE)


def _with_keys(batch: pa.RecordBatch, instant: str) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {
        name: batch.column(index) for index, name in enumerate(batch.schema.names)
    }
    for name, column in columns.items():
        if name.endswith("_key"):
            columns[name] = pc.fill_null(column, UNKNOWN_KEY)
        elif name.endswith("_at"):
            columns[name] = column.cast(pa.int64()).cast(INSTANT)
    moment = columns[instant]
    microseconds = moment.cast(pa.int64()).to_numpy()
    day = microseconds // (24 * _MICROSECONDS_PER_HOUR)
    columns["hour_key"] = pa.array(microseconds // _MICROSECONDS_PER_HOUR - day * 24)
    columns["date_key"] = _date_keys(day)
    return columns


def _date_keys(day: np.ndarray) -> pa.Array:
    unique, inverse = np.unique(day, return_inverse=True)
    dates = [str(np.datetime64(int(number), "D")).replace("-", "") for number in unique]
    return pa.array(np.array([int(text) for text in dates], dtype=np.int64)[inverse])


def _repeated(value: int, num_rows: int) -> pa.Array:
    return pa.array(np.full(num_rows, value, dtype=np.int64))


def _shaped(columns: dict[str, pa.Array], table: Table) -> pa.Table:
    schema = table.schema
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for field in schema
        for column in (columns[field.name],)
    ]
    return pa.table(arrays, schema=schema)
