"""The bounds of the ledger's writer, and a reading of where it stands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Bounds of the writer.

    max_queued_records: beyond this many waiting records new ones are refused (the disk hangs).
    max_batch_records: records in one transaction.
    first_retry_seconds, last_retry_seconds: waits between tries while the database is away.
    """

    max_queued_records: int = 100_000
    max_batch_records: int = 2_000
    first_retry_seconds: float = 0.25
    last_retry_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """A momentary reading, for metrics. Counts are totals since the start.

    lag_seconds is the age of the oldest record that is not in the database yet; records that an
    earlier process left in the journal count from the start of this one.
    """

    num_queued: int
    num_written: int
    num_requests_written: int
    num_spilled: int
    num_set_aside: int
    num_lost: int
    journal_bytes: int
    lag_seconds: float
    is_database_away: bool
