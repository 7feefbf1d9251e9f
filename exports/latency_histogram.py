"""fact_latency_histogram, counted as requests stream by.

A cell is a slice, a metric and a bucket in one integer, so that adding up compares one number
per value instead of ten columns.
"""

import numpy as np
import pyarrow as pa

from exports.facts import FACT_LATENCY_HISTOGRAM, LATENCY_BOUNDS_SECONDS, LATENCY_METRICS
from exports.slices import SLICE_COLUMNS, Slices, summed_by

_BOUNDS = np.array(LATENCY_BOUNDS_SECONDS)
_LAST_BUCKET = len(_BOUNDS) - 1
_IGNORED_BITS = 45
"""Of a float's 64. What is left, its class, tells apart numbers that differ by 1 %."""
_LOWEST, _HIGHEST = (int(_BOUNDS[end].view(np.int64)) >> _IGNORED_BITS for end in (0, -1))
_LOWEST, _HIGHEST = _LOWEST - 1, _HIGHEST + 1
_BUCKET_OF_CLASS = np.searchsorted(
    _BOUNDS,
    (np.arange(_LOWEST, _HIGHEST + 1, dtype=np.int64) << _IGNORED_BITS).view(np.float64),
).clip(max=_LAST_BUCKET)
"""Of the smallest number of each class."""
_METRICS = sorted(LATENCY_METRICS)
_CELLS_PER_SLICE = len(_METRICS) * len(_BOUNDS)
_FOLD_AFTER = 1_000_000
"""Cells that may wait to be added up: some 24 MB."""

_Cells = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Cells, requests in each, microseconds in each; all [num_cells]."""


class LatencyHistogram:
    """Counts the latencies of requests; holds one number per cell, not per request."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._parts: list[_Cells] = []
        self._num_waiting = 0

    def add(self, requests: pa.Table, slices: Slices) -> None:
        """Take in rows of fact_request and the slices they belong to."""
        of_slice = np.array([self._place(row) for row in slices.members()], dtype=np.int64)
        first = of_slice[slices.places] * _CELLS_PER_SLICE
        cells: list[np.ndarray] = []
        seconds: list[np.ndarray] = []
        for index, metric in enumerate(_METRICS):
            values = requests.column(f"{metric}_seconds").combine_chunks()
            of_metric = first + index * len(_BOUNDS)
            if values.null_count:
                of_metric, values = of_metric[values.is_valid().to_numpy(False)], values.drop_null()
            cells.append(of_metric)
            seconds.append(values.to_numpy())
        latency = np.concatenate(seconds)
        bucket = buckets_of(latency)
        microseconds = np.rint(latency * 1e6).astype(np.int64)
        part = _added((np.concatenate(cells) + bucket, np.ones_like(bucket), microseconds))
        self._parts.append(part)
        self._num_waiting += len(part[0])
        if self._num_waiting >= _FOLD_AFTER:
            self._fold()

    def result(self) -> pa.Table:
        """fact_latency_histogram, ordered by its keys."""
        self._fold()
        keys = sorted(self._places)
        rank = np.empty(len(keys), dtype=np.int64)
        rank[[self._places[key] for key in keys]] = np.arange(len(keys))
        [(cells, counts, sums)] = self._parts
        cells = rank[cells // _CELLS_PER_SLICE] * _CELLS_PER_SLICE + cells % _CELLS_PER_SLICE
        order = np.argsort(cells)
        of_slice, in_slice = np.divmod(cells[order], _CELLS_PER_SLICE)
        metric, bucket = np.divmod(in_slice, len(_BOUNDS))
        columns = {
            name: pa.array(np.array([key[index] for key in keys], dtype=np.int64)[of_slice])
            for index, name in enumerate(SLICE_COLUMNS)
        } | {
            "metric": pa.array(_METRICS).take(pa.array(metric)),
            "bucket": pa.array(bucket),
            "upper_seconds": pa.array(_BOUNDS[bucket]),
            "num_requests": pa.array(counts[order]),
            "sum_microseconds": pa.array(sums[order]),
        }
        schema = FACT_LATENCY_HISTOGRAM.schema
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _place(self, key: tuple[int, ...]) -> int:
        return self._places.setdefault(key, len(self._places))

    def _fold(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        parts = self._parts or [(none, none, none)]
        cells, counts, sums = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._parts = [_added((cells, counts, sums))]
        # What stays is not counted as waiting: else a large histogram would fold at every batch.
        self._num_waiting = 0


def buckets_of(latency: np.ndarray) -> np.ndarray:
    """The bucket of each number of seconds: the first whose bound is not below it, else the last.

    What np.searchsorted says, five times faster: the leading bits of a float are in order, and a
    table of them leaves one comparison, because no two bounds share theirs.
    """
    classes = (latency.view(np.int64) >> _IGNORED_BITS).clip(_LOWEST, _HIGHEST)
    bucket = _BUCKET_OF_CLASS[classes - _LOWEST]
    found: np.ndarray = np.minimum(bucket + (latency > _BOUNDS[bucket]), _LAST_BUCKET)
    return found


def _added(cells: _Cells) -> _Cells:
    unique, (counts, sums) = summed_by(cells[0], cells[1:])
    return unique, counts, sums
