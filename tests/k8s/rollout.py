"""A small cluster on loopback: server processes, and a layer 4 forwarder in front of them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.health import SERVICE_NAME
from tests.ports import free_port

_CHUNK_BYTES = 65536
_READY_SECONDS = 180.0


class Forwarder:
    """Passes each new connection to the next of `ports`; what is open stays where it is.

    It has an address for each client: channels of one process to one address share a connection.
    """

    def __init__(self, num_addresses: int) -> None:
        self.ports: list[int] = []
        self.addresses: list[str] = []
        self._num_addresses = num_addresses
        self._next = 0
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for _ in range(self._num_addresses):
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self._servers.append(server)
            self.addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._next += 1
        try:
            port = self.ports[self._next % len(self.ports)]
            backend_reader, backend_writer = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, ZeroDivisionError):
            writer.close()
            return
        for source, sink in ((reader, backend_writer), (backend_reader, writer)):
            task = asyncio.create_task(_pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while chunk := await source.read(_CHUNK_BYTES):
            sink.write(chunk)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()


class ServerProcess:
    """A `tandem serve` of its own, configured as in a pod: by the environment alone."""

    def __init__(self, model: Path, home: Path, grace_seconds: float, **variables: str) -> None:
        self.port = free_port()
        self._process: asyncio.subprocess.Process | None = None
        self._log = home.with_suffix(".log")
        self._environ = {
            **{name: v for name, v in os.environ.items() if not name.startswith("TANDEM_")},
            "TANDEM_TARGET": str(model),
            "TANDEM_MODEL_NAME": "tiny",
            "TANDEM_HOME": str(home),
            "TANDEM_PORT": str(self.port),
            "TANDEM_DTYPE": "float32",
            "TANDEM_NUM_THREADS": "1",
            "TANDEM_KV_CACHE_MEMORY": "200000000",
            "TANDEM_GRACE_SECONDS": str(grace_seconds),
            **variables,
        }

    @property
    def environ(self) -> dict[str, str]:
        return self._environ

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def command(self) -> list[str | Path]:
        return [Path(sys.executable).with_name("tandem"), "serve"]

    async def start(self) -> None:
        """Until the readiness probe would pass."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command(), env=self._environ, stderr=log
            )
        deadline_at = asyncio.get_running_loop().time() + _READY_SECONDS
        while not await self._is_ready():
            assert self._process.returncode is None, self._log.read_text(encoding="utf-8")
            assert asyncio.get_running_loop().time() < deadline_at, "not ready in time"
            await asyncio.sleep(0.2)

    async def terminate(self) -> int:
        """The exit status after SIGTERM."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return await self.wait()

    async def wait(self) -> int:
        """The exit status, once it has ended by itself."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _is_ready(self) -> bool:
        async with aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def forwarder(num_addresses: int) -> AsyncIterator[Forwarder]:
    front = Forwarder(num_addresses)
    await front.start()
    try:
        yield front
    finally:
        await front.close()
