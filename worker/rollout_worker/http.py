"""`[http]` of a worker: /healthz, /readyz, /metrics. GET only; a scraper's connection never outlives its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError
from rollout.telemetry.free_space import FreeSpace
from rollout.wire.waiting import AT_ONCE, Waiting, lengthen_queue

from rollout_worker.session import Phase, Session

READ_S = 5.0


class WorkerHttp:
    """HTTP server of a worker.

    `session()` returns that of the present incarnation, or None between two; `certificate_ends()` returns Unix seconds,
    or 0. `registry` has further metrics; `directories` are those whose free space is exported.
    """

    def __init__(
        self,
        listen_addr: str,
        session: Callable[[], Session | None],
        certificate_ends: Callable[[], float],
        registry: CollectorRegistry,
        directories: Iterable[str],
    ) -> None:
        self._address = parse_address(listen_addr, "http.listen_addr")
        self._session = session
        self._certificate_ends = certificate_ends
        self._server: asyncio.Server | None = None
        self._waiting = Waiting()
        self._registry = registry
        self._space = FreeSpace("rollout_worker", directories, registry)
        self._gauges = {
            name: Gauge(f"rollout_worker_{name}", text, registry=self._registry)
            for name, text in (
                ("running", "Attempts that child processes run now."),
                ("held", "Attempts assigned here that have no result yet."),
                ("unacknowledged", "Results that no coordinator has confirmed."),
                ("children", "Child processes."),
                ("asyncio_tasks", "Tasks of the daemon's event loop."),
                ("certificate_not_after_seconds", "Unix time at which this incarnation's certificate ends."),
                ("ready", "1 while a coordinator answers and work is taken."),
            )
        }

    async def start(self) -> str:
        """Listen and return the address. Raises ConfigError if it is in use."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._address.host or None, self._address.port, backlog=AT_ONCE
            )
        except OSError as error:
            raise ConfigError(
                f"[http] listen_addr {str(self._address)!r} cannot be listened on: {error}. Choose a free host:port, "
                "or leave it empty to switch metrics off."
            ) from error
        lengthen_queue(self._server)
        return str(self._address._replace(port=self._server.sockets[0].getsockname()[1]))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with self._waiting.heard(writer):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_S)
            method, path = [*head.split(b"\r\n", 1)[0].decode("latin-1").split(" "), "", ""][:2]
            status, kind, body = self._answer(method, path.partition("?")[0])
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the other side's trouble
        finally:
            writer.close()

    def _answer(self, method: str, path: str) -> tuple[str, str, bytes]:
        session = self._session()
        ready = session is not None and session.phase is Phase.READY
        if method != "GET":
            return "405 Method Not Allowed", "text/plain", b"GET only\n"
        if path == "/healthz":
            return "200 OK", "text/plain", b"ok\n"
        if path == "/readyz":
            phase = session.phase.value if session is not None else "init"
            return ("200 OK" if ready else "503 Service Unavailable"), "text/plain", f"{phase}\n".encode()
        if path == "/metrics":
            self._space.look()
            self._gauges["ready"].set(ready)
            self._gauges["running"].set(session.running if session else 0)
            self._gauges["held"].set(session.backlog if session else 0)
            self._gauges["unacknowledged"].set(len(session.unacknowledged) if session else 0)
            self._gauges["children"].set(len(session.place.children) if session else 0)
            self._gauges["asyncio_tasks"].set(len(asyncio.all_tasks()))
            self._gauges["certificate_not_after_seconds"].set(self._certificate_ends())
            return "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        return "404 Not Found", "text/plain", b"/healthz /readyz /metrics\n"
