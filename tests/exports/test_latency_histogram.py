"""Latencies counted in batches are those counted one by one, whatever the batches."""

import random
from bisect import bisect_left
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from exports import latency_histogram
from exports.facts import FACT_LATENCY_HISTOGRAM, LATENCY_BOUNDS_SECONDS, LATENCY_METRICS
from exports.latency_histogram import LatencyHistogram, buckets_of
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


def test_a_number_is_in_the_first_bucket_whose_bound_is_not_below_it() -> None:
    bounds = np.array(LATENCY_BOUNDS_SECONDS)
    draw = np.random.default_rng(5)
    numbers = np.concatenate(
        [
            bounds,
            np.nextafter(bounds, 0),
            np.nextafter(bounds, np.inf),
            draw.lognormal(-2, 4, 50_000),
            [0.0, -0.0, -1.0, 5e-324, 1e-5, 1e7, 1e300, np.inf],
        ]
    )
    expected = np.searchsorted(bounds, numbers, side="left").clip(max=len(bounds) - 1)
    assert np.array_equal(buckets_of(numbers), expected)


def test_no_two_bounds_share_the_leading_bits_that_are_looked_up() -> None:
    classes = np.array(LATENCY_BOUNDS_SECONDS).view(np.int64) >> latency_histogram._IGNORED_BITS
    assert (np.diff(classes) > 0).all()
