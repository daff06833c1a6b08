"""Which hosts a sandbox may reach."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


class Allowlist:
    """Host names (`pypi.org`), names below one (`*.pypi.org`, without `pypi.org`), addresses and CIDR blocks.

    A listed name does not allow every address it resolves to: addresses that are private, link-local (where clouds
    serve credentials), this host's own or no host's at all must be listed themselves.
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
        """Return a sentence for each entry of any other form."""
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
        """Return whether `address`, which `host` (a name or an address) resolved to, may be connected to."""
        if self.allows_address(address):
            return True
        return as_address(host) is None and self.allows_name(host) and is_public(address)


def is_public(address: Address) -> bool:
    """Return whether the address is that of an internet host other than this one."""
    address = _embedded(address)
    return address.is_global and not address.is_multicast and not is_own(address)


def is_own(address: Address) -> bool:
    """Return whether this host has the address: the kernel then uses it as the source too. Nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError as error:
        return error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EAFNOSUPPORT)


def names_among(hosts: Iterable[str]) -> list[str]:
    """Return the hosts that are neither addresses nor CIDR blocks."""
    return [host for host in hosts if _block(host) is None]


def as_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address contains: mapped, 6to4 (RFC 3056) or NAT64 (RFC 6052)."""
    address = _unmapped(address)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.sixtofour or address
    return address


def _unmapped(address: Address) -> Address:
    """Return an IPv4-mapped address as IPv4: ::ffff:10.0.0.1 is 10.0.0.1."""
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
