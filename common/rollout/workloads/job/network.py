"""The network access of a phase of a trial: none, all, or a list of hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Literal, Self

from pydantic import field_validator, model_validator

from rollout.config.section import Section

NetworkMode = Literal["no-network", "public", "allowlist"]
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class NetworkPolicy(Section):
    """`allowed_hosts` are names, names after `*.`, IP addresses and CIDR ranges, in lower case."""

    mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] = ()


class NetworkKeys(Section):
    """The keys by which a section of task.toml sets a policy."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, value: list[str] | None) -> list[str] | None:
        return None if value is None else [allowed_host(host) for host in value]

    @model_validator(mode="after")
    def _only_with_a_list(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts means nothing without network_mode = "allowlist": add it')
        return self

    @property
    def policy(self) -> NetworkPolicy | None:
        """The policy, or None if this section sets none."""
        if self.network_mode is None:
            return None
        return NetworkPolicy(mode=self.network_mode, allowed_hosts=tuple(self.allowed_hosts or ()))


def allowed_host(text: str) -> str:
    """Normalise a host for comparison. Raises ValueError for a URL, a port, a path, an inner wildcard, or anything that
    is not a host."""
    host = text.strip().lower().rstrip(".")
    try:
        if "/" in host:
            return ip_network(host, strict=True).compressed
        if ":" in host and "%" not in host:
            return ip_address(host).compressed
    except ValueError:
        raise ValueError(f'"{text[:80]}" must be a host, an IP address or a CIDR range: no URL, port or path') from None
    name = host.removeprefix("*.")
    labels = name.split(".")
    if not name or not all(_LABEL.fullmatch(label) for label in labels) or len(name) > 253:
        raise ValueError(f'"{text[:80]}" must be a host such as pypi.org, *.pypi.org, 192.0.2.1 or 192.0.2.0/24')
    if name != host and _is_address(name):
        raise ValueError(f'"{text[:80]}": a wildcard stands before a name, not an address')
    return host


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def allowed_hosts(hosts: Sequence[str]) -> list[str]:
    """Return each as `allowed_host`."""
    return [allowed_host(host) for host in hosts]
