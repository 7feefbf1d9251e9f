"""Latencies counted in batches are those counted one by one, whatever the batches."""

import random
from bisect import bisect_left
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from exports import latency_histogram
from exports.facts import FACT_LATENCY_HISTOGRAM, LATENCY_BOUNDS_SECONDS, LATENCY_METRICS
from exports.latency_histogram import LatencyHistogram
from exports.slices import SLICE_COLUMNS, slices_of

SCHEMA = pa.schema(
    [(name, pa.int64()) for name in SLICE_COLUMNS]
    + [(f"{metric}_seconds", pa.float64()) for metric in LATENCY_METRICS]
)


def requests(number: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    return [
        {name: draw.choice((-1, 1, 20260328)) for name in SLICE_COLUMNS}
        | {
            f"{metric}_seconds": draw.choice((None, 0.0, draw.expovariate(2), 1e7, 0.25))
            for metric in LATENCY_METRICS
        }
        for _ in range(number)
    ]


def counted_one_by_one(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    sums: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        for metric in LATENCY_METRICS:
            if (seconds := row[f"{metric}_seconds"]) is None:
                continue
            bucket = min(
                bisect_left(LATENCY_BOUNDS_SECONDS, seconds), len(LATENCY_BOUNDS_SECONDS) - 1
            )
            key = (*(row[name] for name in SLICE_COLUMNS), metric, bucket)
            counts[key] += 1
            sums[key] += round(seconds * 1e6)
    return [
        (*key, LATENCY_BOUNDS_SECONDS[key[-1]], counts[key], sums[key]) for key in sorted(counts)
    ]


@pytest.mark.parametrize("batch_rows", [1, 13, 200])
@pytest.mark.parametrize("fold_after", [1, 10**6])
def test_batches_add_up(batch_rows: int, fold_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_histogram, "_FOLD_AFTER", fold_after)
    rows = requests(200)
    histogram = LatencyHistogram()
    for first in range(0, len(rows), batch_rows):
        batch = pa.Table.from_pylist(rows[first : first + batch_rows], schema=SCHEMA)
        histogram.add(batch, slices_of(batch))
    result = histogram.result()
    assert result.schema.equals(FACT_LATENCY_HISTOGRAM.schema, check_metadata=True)
    assert [tuple(row.values()) for row in result.to_pylist()] == counted_one_by_one(rows)


def test_nothing_makes_an_empty_table() -> None:
    histogram = LatencyHistogram()
    assert histogram.result().num_rows == 0
    histogram.add(SCHEMA.empty_table(), slices_of(SCHEMA.empty_table()))
    assert histogram.result().equals(FACT_LATENCY_HISTOGRAM.schema.empty_table())
