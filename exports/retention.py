"""Telling the ledger how far it has been exported, so that retention deletes nothing earlier."""

import hashlib
import logging
from datetime import datetime

from sqlalchemy import insert, update
from sqlalchemy.exc import SQLAlchemyError

from telemetry.ledger.models import ExportWatermark
from telemetry.ledger.session import open_ledger

logger = logging.getLogger(__name__)

_MAX_NAME = 128


def watermark_name(location: str) -> str:
    """The name under which exports to a target are known to the ledger."""
    if len(location) <= _MAX_NAME:
        return location
    digest = hashlib.sha256(location.encode()).hexdigest()[:16]
    return f"{location[: _MAX_NAME - 17]}-{digest}"


def record_watermark(ledger_url: str, location: str, ledger_id: int, now: datetime) -> bool:
    """Record that everything up to `ledger_id` is published at `location`.

    False, with a warning, when the ledger refuses the write: an export needs no more than the
    right to read, but then pruning does not know about it.
    """
    name = watermark_name(location)
    values = {"ledger_id": ledger_id, "exported_at": now}
    engine = open_ledger(ledger_url)
    try:
        with engine.begin() as connection:
            changed = connection.execute(
                update(ExportWatermark).where(ExportWatermark.name == name).values(values)
            )
            if not changed.rowcount:
                connection.execute(insert(ExportWatermark).values(name=name, **values))
        return True
    except SQLAlchemyError as error:
        logger.warning("the ledger does not record how far it was exported: %s", error)
        return False
    finally:
        engine.dispose()
