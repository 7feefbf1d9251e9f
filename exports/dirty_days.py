"""Which UTC dates of requests an export has to write anew."""

import logging
from collections.abc import Mapping
from datetime import date, datetime, timedelta

from exports.extract import LedgerSource

logger = logging.getLogger(__name__)

RECOUNTED = timedelta(days=3)
"""Recent dates are counted again, to find rows that were committed later than the lag allowed."""


def dirty_request_days(
    source: LedgerSource,
    published: Mapping[date, int],
    new_rows: tuple[int, int],
    since: date | None,
    now: datetime,
) -> tuple[set[date], set[date]]:
    """The dates to write, and dates that changed but must stay as published.

    published: requests of each date at the target. new_rows: (after, until], the ledger rows
    that were not exported yet. since: write the dates from here on in any case.
    """
    after, until = new_rows
    days = source.request_dates(after, until)
    recent = (now - RECOUNTED).date()
    known = (day for day in days if published.get(day))  # only these can hold too few rows now
    counted_from = min([recent, *known, *filter(None, [since])])
    counts = source.day_counts(counted_from, until)
    for day, count in counts.items():
        is_late = day >= recent and count > published.get(day, 0)
        if is_late or (since is not None and day >= since):
            days.add(day)
    protected = set()
    for day in sorted(days):
        if counts.get(day, 0) >= published.get(day, 0):
            continue
        # A correction may move a request to another date, pruning takes its row away.
        totals = source.day_totals(day, until)
        if totals.num_requests + totals.num_superseded < published[day]:
            protected.add(day)
            logger.warning(
                "%s stays as published: the ledger holds %d requests of it, the export %d",
                day,
                totals.num_requests,
                published[day],
            )
    return days - protected, protected
