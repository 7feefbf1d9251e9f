"""A PostgreSQL server of the test run's own, from the machine's binaries."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

UNPRIVILEGED_USER = "nobody"


def postgres_binaries() -> Path | None:
    """The folder with initdb and postgres; None when PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: p.parts[-3])
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


class PostgresServer:
    """A server that can be stopped and started again, to be away for a while.

    Without fsync its data survive the death of its processes, not of the machine: enough for
    tests, not for measurements.
    """

    def __init__(self, binaries: Path, folder: Path, *, fsync: bool = False) -> None:
        self._binaries = binaries
        self._fsync = fsync
        self._data = folder / "data"
        self._folder = folder
        self.port = free_port()
        self.url = f"postgresql://tandem@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(self._data), "-U", "tandem", "--auth=trust", "-N")

    def start(self) -> None:
        options = [
            *("-D", str(self._data), "-p", str(self.port), "-k", str(self._folder)),
            *("-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=32MB"),
            *("-c", f"fsync={'on' if self._fsync else 'off'}"),
        ]
        self._process = subprocess.Popen(
            [*_as_unprivileged(), str(self._binaries / "postgres"), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        ready = [str(self._binaries / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port), "-q"]
        while subprocess.run(ready, check=False).returncode != 0:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("PostgreSQL did not start")
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is None:
            return
        self._run("pg_ctl", "-D", str(self._data), "stop", "-m", "immediate")
        self._process.wait(30)
        self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*_as_unprivileged(), str(self._binaries / program), *arguments],
            check=True,
            capture_output=True,
            cwd=self._folder,
        )


@contextmanager
def running_postgres(*, fsync: bool = False) -> Iterator[PostgresServer | None]:
    """A started server; None when the machine has no PostgreSQL."""
    binaries = postgres_binaries()
    if binaries is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="tandem-pg-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, UNPRIVILEGED_USER)
    server = PostgresServer(binaries, folder, fsync=fsync)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _as_unprivileged() -> list[str]:
    # PostgreSQL refuses to run as root.
    return ["runuser", "-u", UNPRIVILEGED_USER, "--"] if os.geteuid() == 0 else []
