"""Which hosts a sandbox may reach."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


class Allowlist:
    """Names (`pypi.org`), names below one (`*.pypi.org`, not `pypi.org`), addresses and CIDR blocks.

    A name says nothing about the addresses it resolves to: where they are this host's own, link-local (which is where
    clouds give out credentials) or no host's at all, they must be listed as addresses.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._suffixes: set[str] = set()
        self._blocks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for host in hosts:
            if (block := _block(host)) is not None:
                self._blocks.append(block)
            elif host.startswith("*."):
                self._suffixes.add(_plain(host[1:]))
            else:
                self._names.add(_plain(host))

    @staticmethod
    def faults(hosts: Iterable[str]) -> list[str]:
        """A sentence for each entry that is none of the above."""
        return [
            f"{host!r} is neither a host name, *.name, an address nor a CIDR block"
            for host in hosts
            if _block(host) is None and not _is_name(host.removeprefix("*."))
        ]

    def allows_name(self, name: str) -> bool:
        name = _plain(name)
        return name in self._names or any(name.endswith(suffix) for suffix in self._suffixes)

    def allows_address(self, address: Address) -> bool:
        address = _unmapped(address)
        return any(address in block for block in self._blocks)

    def may_connect(self, host: str, address: Address) -> bool:
        """To `address`, which `host` (a name or an address) resolved to."""
        if self.allows_address(address):
            return True
        address = _unmapped(address)
        special = (
            address.is_loopback
            or address.is_link_local
            or address.is_unspecified
            or address.is_multicast
            or address.is_reserved
        )
        return as_address(host) is None and self.allows_name(host) and not special


def names_among(hosts: Iterable[str]) -> list[str]:
    """Those that are neither addresses nor blocks."""
    return [host for host in hosts if _block(host) is None]


def as_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _unmapped(address: Address) -> Address:
    """::ffff:10.0.0.1 is 10.0.0.1."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _block(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        block = ipaddress.ip_network(host.strip("[]"), strict=False)
    except ValueError:
        return None
    mapped = _unmapped(block.network_address)
    if block.version == 6 and mapped.version == 4 and block.prefixlen >= 96:
        return ipaddress.ip_network((int(mapped), block.prefixlen - 96))
    return block


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_name(host: str) -> bool:
    labels = _plain(host).split(".")
    return all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()
