"""Health for HTTP probes and for gRPC's standard health check, and the metrics page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import RolloutError
from rollout.telemetry.free_space import FreeSpace

from rollout_coordinator.http.server import TEXT, HttpServer, Response
from rollout_coordinator.leadership import Part
from rollout_coordinator.wiring import Parts

SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse{status: SERVING}


def directories(settings: CoordinatorSettings) -> list[str]:
    """Return the local directories that a coordinator writes to."""
    embedded = settings.storage.backend == "embedded"
    ledger = [str(Path(settings.storage.embedded.path).parent)] if embedded else []
    own_objects = settings.objects.backend == "fs" or (embedded and not settings.objects.backend)
    return [*ledger, *([settings.objects.path] if own_objects and not settings.cloud.bucket else [])]


class Probes:
    """/healthz: the process answers. /readyz: it leads or stands by, and its database answers. /metrics: Prometheus."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: HttpServer | None = None
        self._space: FreeSpace | None = None

    @property
    def addr(self) -> str:
        return self._server.addr if self._server is not None else ""

    async def start(self) -> None:
        listen = self._parts.settings.http.listen_addr
        if listen:
            routes = {"/healthz": self._alive, "/readyz": self._ready, "/metrics": self._metrics}
            self._server = HttpServer(listen, routes)
            await self._server.start()
            self._space = FreeSpace("rollout", directories(self._parts.settings), self._parts.metrics.registry)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def _alive(self) -> Response:
        return 200, TEXT, b"ok\n"

    async def _ready(self) -> Response:
        leadership = self._parts.leadership
        part, trouble = leadership.part, leadership.trouble
        if trouble:
            return 503, TEXT, f"{part}: the database cannot be used at present: {trouble}\n".encode()
        return (200 if part in (Part.LEADER, Part.STANDBY) else 503), TEXT, f"{part}\n".encode()

    async def _metrics(self) -> Response:
        p = self._parts
        if self._space is not None:
            self._space.look()
        p.metrics.queue.set(p.driver.queued)
        p.metrics.sessions.set(p.router.open_sessions)
        p.metrics.watchers.set(p.watchers.count)
        p.metrics.tasks.set(len(asyncio.all_tasks()))
        try:
            p.metrics.observe(
                *await p.driver.query(lambda core, now: (core.run_views(), core.worker_views(now), core.gauges()))
            )
        except RolloutError:
            p.metrics.observe([], [], {})  # a standby knows none
        return 200, "text/plain; version=0.0.4; charset=utf-8", p.metrics.render()


def health_handler() -> grpc.GenericRpcHandler:
    """grpc.health.v1.Health/Check: answers while leading; a standby's interceptor says UNAVAILABLE before it."""

    async def check(request: bytes, context: Any) -> bytes:
        return SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
