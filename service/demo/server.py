"""A real server in a process of its own, on a free loopback port, for the length of the demo."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

_START_SECONDS = 120.0
_DRAIN_SECONDS = 30.0
_LOG_LINES = 20


class ServerError(RuntimeError):
    """The server did not start or did not stop; the message ends with its last log lines."""


@contextmanager
def running_server(log: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Start `tandem serve`, yield its address once it is healthy, and drain it at the end.

    settings are TANDEM_ variables; everything the server writes goes to `log`.
    Raises ServerError.
    """
    port = _free_port()
    environ = {**os.environ, **settings, "TANDEM_HOST": "127.0.0.1", "TANDEM_PORT": str(port)}
    command = [str(Path(sys.executable).with_name("tandem")), "serve"]
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603  # our own command
            command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    address = f"127.0.0.1:{port}"
    try:
        _wait_until_healthy(process, address, log)
        yield address
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(_DRAIN_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"the server did not drain{_tail(log)}") from error
        if status:
            raise ServerError(f"the server ended with status {status}{_tail(log)}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    give_up_at = time.monotonic() + _START_SECONDS
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        while time.monotonic() < give_up_at:
            if process.poll() is not None:
                raise ServerError(f"the server ended while starting{_tail(log)}")
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                pass
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.1)
    raise ServerError(f"the server was not healthy after {_START_SECONDS:.0f} s{_tail(log)}")


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(f"\n  {line}" for line in lines)
