"""Waiting for ledger rows to be on disk, for servers that promise it before they say OK."""

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import Future

from service import errors


async def wait_until_durable(rows: "Iterable[Future[bool]]", deadline_at: float) -> None:
    """Return once every row is committed, or fsynced in the local journal.

    Raises ServiceError: INTERNAL when a row could be written nowhere, DEADLINE_EXCEEDED at
    deadline_at, a monotonic instant.
    """
    # Shielded: a call that is cancelled must not cancel the write that others batch with.
    waits = [asyncio.shield(asyncio.wrap_future(row)) for row in rows]
    try:
        async with asyncio.timeout(deadline_at - time.monotonic()):
            are_written = await asyncio.gather(*waits)
    except TimeoutError as error:
        raise errors.deadline_exceeded("the deadline passed before the ledger's row") from error
    if not all(are_written):
        raise errors.unrecorded("the ledger could not record the request")
