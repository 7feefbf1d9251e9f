"""grpc.health.v1 by the progress of the engine: alive is not enough."""

import asyncio
from collections.abc import Callable

from grpc_health.v1 import health, health_pb2

from service.pb import generation_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthMonitor:
    """Asks is_healthy every interval and tells watchers of "" and of the generation service."""

    def __init__(self, is_healthy: Callable[[], bool], interval_seconds: float) -> None:
        self.servicer = health.aio.HealthServicer()
        self._is_healthy = is_healthy
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.update()
        self._task = asyncio.create_task(self._watch(), name="health")

    async def update(self) -> None:
        status = _SERVING if self._is_healthy() else _NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self.servicer.set(service, status)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            await self.update()

    async def close(self) -> None:
        """NOT_SERVING for good."""
        if self._task is not None:
            self._task.cancel()
        await self.servicer.enter_graceful_shutdown()
