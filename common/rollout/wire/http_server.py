"""HTTP server within a program that has its own signal handlers; its socket is bound before anything else starts."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rollout.model.address import Address
from rollout.model.errors import ConfigError

_GRACE_S = 2
_REMEDIES = {
    errno.EADDRINUSE: "end the program that uses it, or choose another port (0: any that is free)",
    errno.EADDRNOTAVAIL: "this machine has no such address; 0.0.0.0 stands for all that it has",
    errno.EACCES: "choose a port from 1024 on, or grant the right to use lower ones",
}
"""Remedies for an address that cannot be used."""
_BACKLOG = 2048
SILENT_S = 30.0
"""Seconds without a complete request head after which an idle connection is closed."""


@dataclass(frozen=True, slots=True)
class Https:
    """PEM files. `key_of` is the name of the certificate's setting, for people."""

    certificate: Path
    key: Path
    key_of: str


class _Protocol(AutoHTTPProtocol):
    """Protocol with a time limit for a request head; uvicorn waits forever, and a silent client would hold a
    descriptor."""

    cycle: Any  # of the request that came last
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._look_later(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look_later(self, seen: Any) -> None:
        self._timer = asyncio.get_running_loop().call_later(SILENT_S, self._look, seen)

    def _look(self, seen: Any) -> None:
        if self.cycle is seen and (seen is None or seen.response_complete):
            self.transport.close()
        else:
            self._look_later(self.cycle)


class Server(uvicorn.Server):
    """HTTP server. `before_end` is awaited before connections are closed, because uvicorn waits for readers of a stream
    and then cuts them off as a fault."""

    def __init__(self, config: uvicorn.Config, bound: socket.socket, before_end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._bound = bound
        self._before_end = before_end

    @property
    def port(self) -> int:
        return self._bound.getsockname()[1]

    @property
    def url(self) -> str:
        """URL without a trailing slash."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'https' if self.config.is_ssl else 'http'}://{host}:{self.port}"

    async def run_until_cancelled(self) -> None:
        serving = asyncio.create_task(self.serve([self._bound]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self.should_exit = True
            await serving
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._before_end()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the program has its own handlers."""
        yield


async def _nothing() -> None: ...


def server(
    app: Any,
    address: Address,
    key: str,
    https: Https | None = None,
    before_end: Callable[[], Awaitable[None]] = _nothing,
) -> Server:
    """Return a server that listens, and answers once it serves. `key` is the name of the address, for people.

    Raises ConfigError if the address or the certificate cannot be used.
    """
    config = uvicorn.Config(
        app,
        host=address.host,
        port=address.port,
        http=_Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=https.certificate if https is not None else None,
        ssl_keyfile=https.key if https is not None else None,
        lifespan="on",
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        assert https is not None
        raise ConfigError(
            f"{https.key_of}: {https.certificate} and {https.key} cannot be used ({error}): name a "
            "certificate chain in PEM, and its private key without a password"
        ) from error
    return Server(config, _bound(address, key), before_end)


def _bound(address: Address, key: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With its protocol named, asyncio sends what is written at once (TCP_NODELAY): a first token would wait 40 ms else.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address.host, address.port))
        made.listen(_BACKLOG)  # two may bind one address, and only one can listen; who connects now waits
    except OSError as error:
        made.close()
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise ConfigError(f"{key}: {address}: {error.strerror or error}{remedy and ': '}{remedy}") from error
    return made
