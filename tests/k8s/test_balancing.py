"""The ways to balance that the guide offers do spread calls, and a single connection does not."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.k8s.manifests import K8S, build, named

GUIDE = (K8S / "README.md").read_text(encoding="utf-8")
NUM_CALLS, MOST_CALLS = 12, 2000


class _Counting(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self.num_calls = 0

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> health_pb2.HealthCheckResponse:
        self.num_calls += 1
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def _pods(number: int) -> AsyncIterator[tuple[str, list[_Counting]]]:
    """Servers, and their addresses as a resolver gives those of a headless Service."""
    servers, counting, ports = [], [], []
    for _ in range(number):
        server, found = aio.server(), _Counting()
        health_pb2_grpc.add_HealthServicer_to_server(found, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
        counting.append(found)
    try:
        yield "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports), counting
    finally:
        for server in servers:
            await server.stop(None)


def _service_config() -> str:
    (found,) = re.findall(r"`(\{\"loadBalancingConfig\".*?\})`", GUIDE)
    assert json.loads(found)
    return str(found)


@pytest.mark.parametrize("is_balanced", [True, False])
async def test_the_guides_service_config_spreads_calls_over_the_pods(is_balanced: bool) -> None:
    options = [("grpc.service_config", _service_config())] if is_balanced else []
    async with _pods(3) as (target, counting), aio.insecure_channel(target, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(MOST_CALLS if is_balanced else 0):  # until all are connected
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            if all(found.num_calls for found in counting):
                break
        before = [found.num_calls for found in counting]
        for _ in range(NUM_CALLS):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        calls = sorted(f.num_calls - b for f, b in zip(counting, before, strict=True))
    assert calls == ([NUM_CALLS // 3] * 3 if is_balanced else [0, 0, NUM_CALLS])


def test_the_guide_names_the_headless_service_and_its_port() -> None:
    (name, namespace, port) = re.findall(r"`dns:///([\w-]+)\.([\w-]+)\.svc:(\d+)`", GUIDE)[0]
    service = named(build("prod-gpu"), "Service", name)
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["namespace"] == namespace
    assert int(port) in {entry["port"] for entry in service["spec"]["ports"]}
