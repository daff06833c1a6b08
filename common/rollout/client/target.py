"""Which cluster is spoken to: options, environment, `./rollout.toml`, then what `join` wrote down."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from rollout.config.load import load_settings, refuse_strangers
from rollout.config.settings import Section, TransportSection
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError
from rollout.security import files

if TYPE_CHECKING:
    from rollout.client.runs import Runs, Trouble

CLIENT_FILE = Path("rollout.toml")
DEFAULT_TLS_DIR = "./data/tls"


class ClientTransport(Section):
    coordinator_addrs: list[str] = Field(default_factory=list[str], description="Every coordinator, leader or standby.")
    tls_dir: str = Field(default="", description="Directory of the operator's certificates.")
    cluster: str = Field(default="", description="Name of the cluster; default: the one that was joined.")


class ClientSettings(Section):
    """`./rollout.toml`: where `rollout` commands started in this directory go."""

    transport: ClientTransport = ClientTransport()


@dataclass(frozen=True, slots=True)
class Target:
    addresses: list[str]
    tls_dir: Path
    cluster: str
    explicit: bool
    """Named by an option, the environment or rollout.toml, rather than found in a directory that was joined."""


def find_target(coordinators: list[str] | None, tls_dir: Path | None) -> Target:
    """Addresses may be empty: nothing names a coordinator. ConfigError for addresses and files that are not usable."""
    file = load_settings(ClientSettings, CLIENT_FILE) if CLIENT_FILE.is_file() else ClientSettings()
    refuse_strangers(ClientSettings, os.environ)
    environment = [part.strip() for part in os.environ.get("ROLLOUT_COORDINATOR", "").split(",") if part.strip()]
    addresses = list(coordinators or []) or environment or file.transport.coordinator_addrs
    named = tls_dir or Path(os.environ.get("ROLLOUT_TLS_DIR") or file.transport.tls_dir or DEFAULT_TLS_DIR)
    directory = files.expand(named)
    joined = files.joined(directory)
    explicit = bool(addresses)
    if not addresses:
        addresses = [str(a) for a in joined.get("coordinator_addrs", [])]
    for address in addresses:
        parse_address(address, "--coordinator", need_port=True)
    cluster = file.transport.cluster or str(joined.get("cluster") or "rollout")
    return Target(addresses, directory, cluster, explicit)


def as_joined(transport: TransportSection) -> TransportSection:
    """A worker's: what its settings leave open is as the cluster told it when this host joined. ConfigError."""
    joined = files.joined(files.expand(Path(transport.tls_dir)))
    told: dict[str, object] = {}
    if not transport.coordinator_addrs:
        told["coordinator_addrs"] = [str(address) for address in joined.get("coordinator_addrs", [])]
    if "cluster" in joined and "cluster" not in transport.model_fields_set:
        told["cluster"] = str(joined["cluster"])
    return transport.model_copy(update=told)


def need_target(coordinators: list[str] | None, tls_dir: Path | None) -> Target:
    """As `find_target`; ConfigError that says what to do when there is no address."""
    target = find_target(coordinators, tls_dir)
    if not target.addresses:
        raise ConfigError(
            "no coordinator is named: give --coordinator HOST:PORT, set ROLLOUT_COORDINATOR, write it into "
            "./rollout.toml ([transport] coordinator_addrs), or join a cluster first: rollout join --coordinator "
            f"HOST:JOIN_PORT --token TOKEN (looked for {target.tls_dir}/join.json)"
        )
    return target


@asynccontextmanager
async def connected(
    target: Target, *, patience_s: float = 15.0, on_trouble: Trouble | None = None
) -> AsyncGenerator[Runs, None]:
    """A client of `target`."""
    from rollout.client.runs import Runs  # grpc takes longer to import than `--help` to print

    runs = await Runs.connect(
        target.addresses, tls_dir=target.tls_dir, cluster=target.cluster, patience_s=patience_s, on_trouble=on_trouble
    )
    async with runs:
        yield runs
