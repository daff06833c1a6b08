"""Parses addresses: `host:port`, with brackets around an IPv6 host."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import NamedTuple

from rollout.model.errors import ConfigError

_BRACKETED = re.compile(r"^\[(?P<host>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]:(?P<port>\d{1,5})$")
_PLAIN = re.compile(r"^(?P<host>[A-Za-z0-9_*](?:[A-Za-z0-9._-]{0,252}))?:(?P<port>\d{1,5})$")


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it listens on every interface, and so does not say where others reach it."""
        return self.host in ("", "0.0.0.0", "::", "*")

    @property
    def here(self) -> Address:
        """The address under which this host reaches it."""
        return Address("127.0.0.1", self.port) if self.is_wildcard else self


def parse_address(text: str, key: str = "address", *, need_port: bool = False) -> Address:
    """Parse `host:port` or `[ipv6]:port`. Raises ConfigError that names `key`; `need_port` refuses port 0."""
    match = _BRACKETED.match(text) or _PLAIN.match(text)
    if match is None:
        hint = "put an IPv6 host in brackets: [::1]:50051" if text.count(":") > 1 else "write host:port"
        if "://" in text:
            hint = "write host:port without a scheme"
        raise ConfigError(f"{key}: {text!r} is not an address; {hint}", key=key)
    port = int(match["port"])
    if port > 65535 or (need_port and port == 0):
        raise ConfigError(f"{key}: port {port} of {text!r} is not usable; it must be {1 if need_port else 0}..65535")
    return Address(match["host"] or "", port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
