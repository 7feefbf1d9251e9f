"""One export at a time per target: a second one waits or leaves.

The lock is a file lock, which the system releases when its owner dies. It guards a local
target on one machine; exports of one object store from several machines are kept apart by
their scheduler and, at the latest, by the generation check before publication.
"""

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exports.errors import LockedError, TargetError
from exports.storage import Target

LOCK_NAME = ".export.lock"
_POLL_SECONDS = 0.1


@contextmanager
def exclusive(target: Target, wait_seconds: float) -> Iterator[None]:
    """Hold the target's lock. Raises LockedError when it is not free within `wait_seconds`."""
    path = _lock_path(target)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise TargetError(f"cannot lock {target.location}: {error}") from error
    try:
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise LockedError(f"another export is writing to {target.location}")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _lock_path(target: Target) -> Path:
    if target.local_root is not None:
        return target.local_root / LOCK_NAME
    digest = hashlib.sha256(target.location.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tandem-export-{digest}.lock"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
