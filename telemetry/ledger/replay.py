"""Bringing a journal into the database by hand, for a server that does not start again."""

from dataclasses import dataclass
from pathlib import Path

from telemetry.ledger.journal import Journal
from telemetry.ledger.session import open_ledger, require_current_schema
from telemetry.ledger.store import LedgerStore
from telemetry.ledger.writer import LedgerWriter


@dataclass(frozen=True, slots=True)
class Replayed:
    """What happened to a journal. is_complete: nothing is left in it."""

    num_records: int
    num_set_aside: int
    is_complete: bool


def replay_journal(url: str, folder: Path, *, timeout_seconds: float = 300.0) -> Replayed:
    """Write everything in a journal folder to the ledger, once, and empty the folder.

    Raises JournalLockedError when a server that runs holds the folder, LedgerSchemaError when the
    ledger is not migrated, sqlalchemy.exc.SQLAlchemyError when it does not answer.
    """
    engine = open_ledger(url)
    try:
        require_current_schema(engine)
        writer = LedgerWriter(LedgerStore(engine), Journal(folder))
        is_complete = writer.wait_until_written(timeout_seconds)
        writer.close()
        status = writer.status()
        return Replayed(status.num_written, status.num_set_aside, is_complete)
    finally:
        engine.dispose()
