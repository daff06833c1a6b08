"""Health and metrics over plain HTTP/1.1: three paths, GET only, one response a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rollout.model.errors import ConfigError
from rollout.wire.waiting import AT_ONCE, Waiting, lengthen_queue

Response = tuple[int, str, bytes]
Handler = Callable[[], Awaitable[Response]]

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_READ_LIMIT_S = 5.0
TEXT = "text/plain; charset=utf-8"


class HttpServer:
    """Serves `routes` (path to handler). `listen_addr` is host:port; port 0 takes any free one."""

    def __init__(self, listen_addr: str, routes: Mapping[str, Handler]) -> None:
        self._listen_addr = listen_addr
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._waiting = Waiting()
        self.addr = ""

    async def start(self) -> None:
        host, _, port = self._listen_addr.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=16_384, backlog=AT_ONCE
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"[http] listen_addr {self._listen_addr!r} cannot be listened on: {error}. "
                "Choose a free host:port, or leave it empty to switch metrics off."
            ) from error
        lengthen_queue(self._server)
        bound = self._server.sockets[0].getsockname()
        self.addr = f"{host}:{bound[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with self._waiting.heard(writer):
                async with asyncio.timeout(_READ_LIMIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
            status, kind, body = await self._answer(head.split(b"\r\n", 1)[0].decode("latin-1"))
            writer.write(
                f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                f"Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a probe that hung up, or somebody who does not speak HTTP
        finally:
            writer.close()

    async def _answer(self, request_line: str) -> Response:
        parts = request_line.split(" ")
        if len(parts) != 3:
            return 400, TEXT, b"bad request\n"
        if parts[0] not in ("GET", "HEAD"):
            return 405, TEXT, b"GET only\n"
        handler = self._routes.get(parts[1].split("?", 1)[0])
        if handler is None:
            return 404, TEXT, (" ".join(sorted(self._routes)) + "\n").encode()
        return await handler()
