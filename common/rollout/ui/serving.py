"""The process of the live page: its server, and what it says at the start."""

from __future__ import annotations

import asyncio
import socket
import ssl
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from rollout.client.target import Target
from rollout.model.address import is_loopback, parse_address
from rollout.model.errors import ConfigError
from rollout.ui.access import Everyone, Operators
from rollout.ui.app import application, end_streams
from rollout.ui.cluster import Cluster

_GRACE_S = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where the page answers. `prefix`: that a proxy adds; `certificate`, `key`: of https."""

    listen: str
    prefix: str = ""
    join_address: str = ""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def is_private(self) -> bool:
        """Nobody but this machine's users can reach it."""
        return is_loopback(parse_address(self.listen, "--listen").host) and not self.prefix

    def check(self, target: Target) -> None:
        """ConfigError."""
        parse_address(self.listen, "--listen")
        if self.prefix and (not self.prefix.startswith("/") or self.prefix.endswith("/")):
            raise ConfigError(f"--prefix {self.prefix}: must begin with a slash and end without one, such as /rollout")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--certificate and --key go together")
        if self.is_private:
            return
        if target.private is not None:
            raise ConfigError("a private cluster can be looked at from its own machine only: leave out --listen")
        if not self.join_address:
            raise ConfigError(
                "a page that others can reach needs a login: give --join-address HOST:JOIN_PORT, where a coordinator "
                "takes operators' tokens"
            )
        parse_address(self.join_address, "--join-address", need_port=True)


async def serve(
    target: Target, place: Place, tell: Callable[[str], None], at: Callable[[str], None], *, browse: bool = False
) -> None:
    """Until it is cancelled. `at` gets the URL once the page answers. ConfigError: the address cannot be used."""
    access = Everyone() if place.is_private else Operators(place.join_address, target)
    secure = place.certificate is not None
    address = parse_address(place.listen, "--listen")
    async with Cluster(target, tell) as cluster:
        app = application(cluster, access, base=place.prefix, secure=secure)
        config = uvicorn.Config(
            app,
            host=address.host,
            port=address.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=place.certificate,
            ssl_keyfile=place.key,
            lifespan="on",
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--certificate {place.certificate}: cannot be used: {error}") from error
        server = _Server(config, app)
        try:
            await _run(server, address.host, place, at, browse=browse, secure=secure)
        finally:
            if isinstance(access, Operators):
                access.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """It would wait for those who read a stream, and then cut them off as a fault."""
        await end_streams(self._app)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The program has handlers of its own."""
        yield


async def _run(
    server: _Server, host: str, place: Place, at: Callable[[str], None], *, browse: bool, secure: bool
) -> None:
    bound = _bound(server.config)
    port = bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if secure else 'http'}://{shown}:{port}{place.prefix}/"
    serving = asyncio.create_task(server.serve([bound]))
    try:
        at(url)
        if browse:
            await asyncio.to_thread(webbrowser.open, url)
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def _bound(config: uvicorn.Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((config.host, config.port))
    except OSError as error:
        made.close()
        raise ConfigError(f"--listen {config.host}:{config.port}: {error.strerror or error}") from error
    return made
