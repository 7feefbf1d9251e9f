"""Comparing a written date with the ledger, and the row that keeps both sides."""

from datetime import date

import pyarrow as pa

from exports.day_pool import FinishedDay
from exports.dimensions import date_key
from exports.errors import ReconciliationError
from exports.facts import FACT_RECONCILIATION


def reconciliation_row(finished: FinishedDay) -> pa.Table:
    """The date's row of fact_reconciliation; none for a date without requests.

    Raises ReconciliationError when the written files do not hold what the ledger holds.
    """
    day, ledger, exported = finished.task.day, finished.ledger, finished.written.totals
    if exported != ledger:
        raise ReconciliationError(f"{day}: exported {exported}, the ledger holds {ledger}")
    if not ledger.num_requests:
        return FACT_RECONCILIATION.schema.empty_table()
    return _row(day, finished)


def _row(day: date, finished: FinishedDay) -> pa.Table:
    ledger, exported = finished.ledger, finished.written.totals
    quality = finished.written.quality
    values = {
        "date_key": date_key(day),
        "num_ledger_requests": ledger.num_requests,
        "num_exported_requests": exported.num_requests,
        "num_superseded_rows": exported.num_superseded,
        "num_without_price": quality.num_without_price,
        "num_without_energy": quality.num_without_energy,
        "num_without_model": quality.num_without_model,
        "num_without_tenant": quality.num_without_tenant,
        "ledger_cost_nano_usd": ledger.cost_nano_usd,
        "exported_cost_nano_usd": exported.cost_nano_usd,
        "num_ledger_output_tokens": ledger.num_output_tokens,
        "num_exported_output_tokens": exported.num_output_tokens,
        "last_ledger_id": quality.last_ledger_id,
        "last_recorded_at": quality.last_recorded_at_microseconds,
    }
    return pa.Table.from_pylist([values], schema=FACT_RECONCILIATION.schema)
