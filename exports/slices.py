"""The slices (hour x model x drafter x variant x tenant) that requests are added up by."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SLICE_COLUMNS = ("date_key", "hour_key", "model_key", "drafter_key", "variant_key", "tenant_key")


@dataclass(frozen=True, slots=True)
class Slices:
    """Which of the `rows` (the distinct slices) each request belongs to."""

    rows: pa.Table
    places: np.ndarray  # [num_requests]

    def members(self) -> list[tuple[int, ...]]:
        """The distinct slices, each as its keys in the order of SLICE_COLUMNS."""
        return list(
            zip(*(self.rows.column(name).to_pylist() for name in SLICE_COLUMNS), strict=True)
        )

    def columns(self, places: np.ndarray) -> dict[str, pa.ChunkedArray]:
        """The key columns of these slices."""
        rows = self.rows.take(pa.array(places))
        return {name: rows.column(name) for name in SLICE_COLUMNS}


def slices_of(requests: pa.Table) -> Slices:
    """The slices of rows of fact_request."""
    places = np.zeros(requests.num_rows, dtype=np.int64)
    for name in SLICE_COLUMNS:
        encoded = pc.dictionary_encode(requests.column(name).combine_chunks())
        if len(encoded.dictionary) <= 1:
            continue
        # Packed again after each key, so that the number never exceeds that of the requests.
        packed = pa.array(places * len(encoded.dictionary) + encoded.indices.to_numpy())
        places = pc.dictionary_encode(packed).indices.to_numpy().astype(np.int64)
    first = np.unique(places, return_index=True)[1]
    return Slices(requests.select(SLICE_COLUMNS).take(pa.array(first)), places)


def summed_by(
    cells: np.ndarray, measures: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The distinct cells and each measure's sum in them. All inputs are [num_values]."""
    # np.bincount would add in floating point; these are sums of money and time to the last unit.
    names = [f"measure_{index}" for index in range(len(measures))]
    table = pa.table([pa.array(cells), *map(pa.array, measures)], ["cell", *names])
    summed = table.group_by("cell", use_threads=False).aggregate([(name, "sum") for name in names])
    sums = [summed.column(f"{name}_sum").to_numpy() for name in names]
    return summed.column("cell").to_numpy(), sums
