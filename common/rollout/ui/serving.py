"""The process of the live page: its server, and its messages at the start."""

from __future__ import annotations

import asyncio
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.client.target import Target
from rollout.config.settings import UI_PREFIX, UI_PREFIX_FORM
from rollout.model.address import is_loopback, parse_address
from rollout.model.errors import ConfigError
from rollout.ui.access import Everyone, Operators
from rollout.ui.app import application, end_streams
from rollout.ui.cluster import Cluster
from rollout.wire.http_server import Https, server


@dataclass(frozen=True, slots=True)
class Place:
    """The page's address. `prefix` is added by a proxy; `certificate` and `key` are for https."""

    listen: str
    prefix: str = ""
    join_address: str = ""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def is_private(self) -> bool:
        """Whether only users of this machine can reach it."""
        return is_loopback(parse_address(self.listen, "--listen").host) and not self.prefix

    @property
    def warning(self) -> str:
        """A warning for users who serve the page there, or ""."""
        if self.certificate is not None or is_loopback(parse_address(self.listen, "--listen").host):
            return ""
        return (
            f"warning: {self.listen} is plain http: tokens and sessions can be read on their way; give --certificate "
            "and --key, or let only a proxy with https reach it"
        )

    def check(self, target: Target) -> None:
        """Raise ConfigError if the place cannot be used."""
        parse_address(self.listen, "--listen")
        if self.prefix and not UI_PREFIX.fullmatch(self.prefix):
            raise ConfigError(f"--prefix {self.prefix}: {UI_PREFIX_FORM}")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--certificate and --key go together")
        if self.is_private:
            return
        if target.private is not None:
            raise ConfigError(
                "the page of a private cluster answers on its own machine only: give --listen a loopback address and "
                "leave out --prefix; from elsewhere, ssh -L 8265:127.0.0.1:8265 HOST brings it to your browser"
            )
        if not self.join_address:
            raise ConfigError(
                "a page that others can reach needs a login: give --join-address HOST:JOIN_PORT, where a coordinator "
                "takes operators' tokens"
            )
        parse_address(self.join_address, "--join-address", need_port=True)


async def serve(
    target: Target, place: Place, tell: Callable[[str], None], at: Callable[[str], None], *, browse: bool = False
) -> None:
    """Serve until cancelled. `at` gets the URL once the page responds. Raises ConfigError if the address cannot be
    used."""
    access = Everyone() if place.is_private else Operators(place.join_address, target)
    https = None
    if place.certificate is not None and place.key is not None:
        https = Https(place.certificate, place.key, "--certificate")
    async with Cluster(target, tell) as cluster:
        app = application(cluster, access, base=place.prefix, secure=https is not None)
        try:
            address = parse_address(place.listen, "--listen")
            page = server(app, address, "--listen", https, lambda: end_streams(app))
            serving = asyncio.ensure_future(page.run_until_cancelled())
            try:
                url = f"{page.url}{place.prefix}/"
                at(url)
                if browse:
                    await asyncio.to_thread(webbrowser.open, url)
                await serving
            finally:
                serving.cancel()
                await asyncio.wait([serving])
        finally:
            if isinstance(access, Operators):
                access.close()
