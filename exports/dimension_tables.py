"""All dimensions of an export, as they are now."""

from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import pyarrow as pa

from exports.columns import Table
from exports.dimensions import (
    LEDGER_COLUMNS,
    dim_date,
    dim_outcome,
    dim_time_band,
    ledger_dimension,
)
from exports.extract import LedgerSource
from exports.schemas import (
    DIM_DATE,
    DIM_DRAFTER,
    DIM_MODEL,
    DIM_OUTCOME,
    DIM_PRICE,
    DIM_TENANT,
    DIM_TIME_BAND,
    DIM_VARIANT,
)
from telemetry.ledger.models import Drafter, Model, Price, Tenant, Variant

_LEDGER_DIMENSIONS: tuple[tuple[Table, type[Any]], ...] = (
    (DIM_MODEL, Model),
    (DIM_DRAFTER, Drafter),
    (DIM_VARIANT, Variant),
    (DIM_TENANT, Tenant),
    (DIM_PRICE, Price),
)


def dimension_tables(
    source: LedgerSource, days: Sequence[date], today: date
) -> Iterator[tuple[Table, pa.Table]]:
    """Each dimension with its rows. `days` are those of the facts; without any, `today`."""
    yield DIM_DATE, dim_date(min(days, default=today), max(days, default=today))
    yield DIM_TIME_BAND, dim_time_band()
    yield DIM_OUTCOME, dim_outcome()
    for table, model in _LEDGER_DIMENSIONS:
        members = source.dimension_rows(model, LEDGER_COLUMNS[table.name])
        yield table, ledger_dimension(table, members)
