"""Chooses the cluster to talk to, by the same rule for every command.

Options come first, then the environment, then `./rollout.toml`, then the cluster that was joined here (`./data/tls`) or
that `rollout context use` chose. Without any, workloads start a private cluster, and commands that look at runs take
that of the directory they are in.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollout.client.client_telemetry import CLIENT_FILE, client_telemetry
from rollout.client.contexts import Context, Contexts
from rollout.client.private import STATE_DIR, address_of, command_of, private_runs, state_of, states_below
from rollout.config.load import load_settings, refuse_strangers
from rollout.config.section import Section
from rollout.config.settings import TelemetrySection, TransportSection
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError
from rollout.security import files
from rollout.workloads.staging import is_staging, output_bucket, staging_directory

if TYPE_CHECKING:
    from rollout.client.runs import Runs, Trouble

DEFAULT_TLS_DIR = "./data/tls"
_SHOWN = 10


class ClientTransport(Section):
    coordinator_addrs: list[str] = Field(
        default_factory=list[str], description="All coordinators, leader and standbys."
    )
    tls_dir: str = Field(default="", description="Directory of the operator's certificates.")
    cluster: str = Field(default="", description="Name of the cluster; default: the joined one.")


class ClientSettings(Section):
    """`./rollout.toml`: the cluster of `rollout` commands started in this directory."""

    transport: ClientTransport = ClientTransport()
    telemetry: TelemetrySection = TelemetrySection()


@dataclass(frozen=True, slots=True)
class ClusterSelector:
    """Options that name a cluster besides `--coordinator` and `--tls-dir`."""

    context: str = ""
    directory: Path | None = None
    """`--dir`: an output directory, which stands for its private cluster."""
    local: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    addresses: list[str]
    """Empty if none is named, or if the cluster is a private one."""
    tls_dir: Path
    cluster: str
    explicit: bool
    """Whether an option, the environment or rollout.toml named it, rather than a directory that was joined."""
    why: str = ""
    """What named it, in words."""
    private: Path | None = None
    """The state directory of a private cluster."""
    by: Literal["option", "environment", ""] = ""
    """How directly the user named it."""

    @property
    def asked(self) -> str:
        """Where its coordinators should be, while none has answered."""
        return f"{', '.join(self.addresses)}{self._from}"

    def __str__(self) -> str:
        if self.private is not None:
            return f"the private cluster in {self.private}{self._from}"
        return f'cluster "{self.cluster}" at {", ".join(self.addresses)}{self._from}'

    @property
    def _from(self) -> str:
        source = "" if self.why.startswith("joined") else "from "
        return f" ({source}{self.why})" if self.why else ""


def find_target(
    coordinators: list[str] | None, tls_dir: Path | None, selector: ClusterSelector | None = None
) -> Target:
    """Return the target; without addresses and `private`, nothing names a cluster. Raises ConfigError for unusable
    values."""
    file, identity = _here(tls_dir)
    return _named(coordinators, selector or ClusterSelector(), identity) or _found(file, identity, tls_dir)


def _here(tls_dir: Path | None) -> tuple[ClientSettings, _Identity]:
    file = load_settings(ClientSettings, CLIENT_FILE) if CLIENT_FILE.is_file() else ClientSettings()
    refuse_strangers(ClientSettings, os.environ)
    client_telemetry()
    told = str(tls_dir or "") or os.environ.get("ROLLOUT_TLS_DIR") or file.transport.tls_dir
    return file, _Identity(told or DEFAULT_TLS_DIR, file.transport.cluster, fixed=bool(told))


def _named(coordinators: list[str] | None, selector: ClusterSelector, identity: _Identity) -> Target | None:
    """Return the target named by options or the environment."""
    _refuse_contradictions(coordinators, selector)
    if selector.local:
        return Target([], Path(), "rollout", False, "--local", by="option")
    if selector.directory is not None:
        return _private(selector.directory)
    if coordinators:
        return replace(identity.at(coordinators, "--coordinator"), by="option")
    if selector.context:
        return replace(_of_context(selector.context, f"context {selector.context}"), by="option")
    if environment := _listed(os.environ.get("ROLLOUT_COORDINATOR", "")):
        return replace(identity.at(environment, "ROLLOUT_COORDINATOR"), by="environment")
    if context := os.environ.get("ROLLOUT_CONTEXT", ""):
        return replace(_of_context(context, f"context {context}, ROLLOUT_CONTEXT"), by="environment")
    return None


def _found(file: ClientSettings, identity: _Identity, tls_dir: Path | None) -> Target:
    """Return the target that is configured here, was joined, or is the current context."""
    if file.transport.coordinator_addrs:
        return identity.at(file.transport.coordinator_addrs, f"./{CLIENT_FILE}")
    if joined := identity.joined():
        return replace(joined, by="option") if tls_dir is not None else joined
    if current := Contexts.read().current:
        return replace(_of_context(current, f"context {current}"), explicit=False)
    return Target([], identity.directory, file.transport.cluster or "rollout", False)


def _refuse_contradictions(coordinators: list[str] | None, selector: ClusterSelector) -> None:
    options = {
        "--coordinator": bool(coordinators),
        "--context": bool(selector.context),
        "--dir": selector.directory is not None,
        "--local": selector.local,
    }
    given = [option for option, there in options.items() if there]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} name different clusters: give one of them")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _checked(addresses: list[str], key: str) -> list[str]:
    for address in addresses:
        parse_address(address, key, need_port=True)
    return addresses


def _joined_addresses(directory: Path) -> list[str]:
    return [str(address) for address in files.joined(directory).get("coordinator_addrs", [])]


class _Identity:
    """A directory of certificates. `fixed` means that it was named, rather than the default."""

    def __init__(self, named: str, cluster: str, *, fixed: bool) -> None:
        self.directory = files.expand(Path(named))
        self._named = named
        self._cluster = cluster
        self._fixed = fixed

    def at(self, addresses: list[str], why: str) -> Target:
        """Return the named coordinators, followed by others of the same cluster that the directory knows: the named one
        may be down."""
        addresses = _checked(list(addresses), why)
        directory = self.directory
        if not self._fixed and not any((directory / name).exists() for name in (files.HOST, files.CA_KEY)):
            directory = _of_address(addresses) or directory
        known = [address for address in _joined_addresses(directory) if address not in addresses]
        return Target([*addresses, *known], directory, self._cluster_of(directory), True, why)

    def joined(self) -> Target | None:
        """Return the cluster that was joined with it."""
        if not (addresses := _joined_addresses(self.directory)):
            return None
        cluster = self._cluster_of(self.directory)
        return Target(addresses, self.directory, cluster, False, f"joined; {self._named}")

    def _cluster_of(self, directory: Path) -> str:
        return self._cluster or str(files.joined(directory).get("cluster") or "rollout")


def _of_address(addresses: list[str]) -> Path | None:
    """Return the identity of a context that has one of these coordinators."""
    for context in Contexts.read().known.values():
        directory = files.expand(Path(context.tls_dir))
        if set(addresses) & {*context.coordinator_addrs, *_joined_addresses(directory)}:
            return directory
    return None


def _of_context(name: str, why: str) -> Target:
    return context_target(name, Contexts.read().get(name), why)


def context_target(name: str, context: Context, why: str) -> Target:
    """Return the cluster of a context. Raises ConfigError if no address of it is known, or one is invalid."""
    directory = files.expand(Path(context.tls_dir))
    addresses = list(dict.fromkeys([*context.coordinator_addrs, *_joined_addresses(directory)]))
    if not addresses:
        raise ConfigError(
            f"context {name}: no coordinator is known in {directory}: join the cluster again, forget it with `rollout "
            f"context remove {name}`, or take another: --coordinator, --context, or --local for a private cluster"
        )
    cluster = context.cluster or str(files.joined(directory).get("cluster") or "rollout")
    return Target(_checked(addresses, f"context {name}"), directory, cluster, True, why)


def _private(directory: Path) -> Target:
    """Return the target of `--dir`."""
    state = state_of(_on_this_machine(directory))
    if state is None:
        raise ConfigError(
            f"--dir {directory}: no private cluster has run there: name the output directory of a command that ran "
            f"without a cluster (it holds {STATE_DIR})"
        )
    return replace(private_target(state, "--dir"), by="option")


def _staged_from_here() -> list[Path]:
    """Return state directories of commands that were given in this directory and whose output is in a bucket, the
    newest first."""
    states = dict.fromkeys(run.state for run in reversed(private_runs()))
    staged = [state for state in states if is_staging(state.parent)]
    return [state for state in staged if (command := command_of(state)) is not None and command.is_of_here]


def _on_this_machine(directory: Path) -> Path:
    """Return the local directory in which results for a bucket are collected. Raises ConfigError."""
    for scheme in ("s3", "gs"):
        if str(directory).startswith(f"{scheme}:/"):  # a path has no double slash
            bucket = output_bucket(f"{scheme}://{str(directory).removeprefix(f'{scheme}:').lstrip('/')}")
            if bucket is not None:
                return staging_directory(bucket)
    return directory.expanduser()


def private_target(state: Path, why: str = "") -> Target:
    """Return the private cluster of a state directory."""
    return Target([], state / "tls", "rollout", False, why, private=state)


def owned(target: Target) -> Target:
    """Return a private cluster with its owner's address; without addresses if it is not running."""
    assert target.private is not None
    address = address_of(target.private)
    return replace(target, addresses=[address] if address else [])


def as_joined(transport: TransportSection, *, also_former: bool = False) -> TransportSection:
    """Complete a worker's settings by what the cluster reported last. With `also_former`, coordinators that it no
    longer reports are added, to try when no other responds. Raises ConfigError."""
    joined = files.joined(files.expand(Path(transport.tls_dir)))
    told: dict[str, object] = {}
    if not transport.coordinator_addrs:
        known = [str(address) for address in joined.get("coordinator_addrs", [])]
        former = files.former_addresses(files.expand(Path(transport.tls_dir))) if also_former else []
        told["coordinator_addrs"] = [*known, *former]
    if "cluster" in joined and "cluster" not in transport.model_fields_set:
        told["cluster"] = str(joined["cluster"])
    return transport.model_copy(update=told)


def named_or_here(
    coordinators: list[str] | None, tls_dir: Path | None, selector: ClusterSelector | None = None
) -> Target | None:
    """Return the target as `need_target` does, ignoring the directories below this one."""
    file, identity = _here(tls_dir)
    target = _named(coordinators, selector or ClusterSelector(), identity)
    here = state_of(Path()) if target is None else None
    if here is not None and tls_dir is None:
        return private_target(here, "this directory")  # whatever is in use elsewhere, though it could not be used
    target = target or _found(file, identity, tls_dir)
    if here is not None and not target.by:
        return private_target(here, "this directory")
    return target if target.addresses or target.private is not None else None


def need_target(
    coordinators: list[str] | None, tls_dir: Path | None, selector: ClusterSelector | None = None
) -> Target:
    """Return the target for commands that look at runs: a private cluster whose output directory is the current one has
    precedence over everything except options and environment; one in a directory below it comes last. Raises
    ConfigError, with the remedy, if there is none."""
    if (target := named_or_here(coordinators, tls_dir, selector)) is not None:
        return target
    below = [*states_below(Path()), *_staged_from_here()]
    if len(below) == 1:
        return private_target(below[0])
    if below:
        lines = [f"  --dir {state.parent}" for state in below[:_SHOWN]]
        more = [f"  and {len(below) - _SHOWN} more"] if len(below) > _SHOWN else []
        raise ConfigError(
            f"no cluster is named, and commands have run on this machine alone in {len(below)} directories here. Name "
            "one of them with an option; the newest comes first\n" + "\n".join([*lines, *more])
        )
    known = sorted(Contexts.read().known)
    joined = [f"  --context NAME            a cluster that was joined before: {', '.join(known)}"] if known else []
    raise ConfigError(
        "\n".join(
            [
                "which cluster? None is named, and no command has run in this directory before. Name it with an option",
                "  --coordinator HOST:PORT   a cluster, by the address of its coordinator",
                *joined,
                "  --dir OUTPUT_DIRECTORY    a run of this machine alone, by its output directory",
                "or join a cluster once, and commands find it by themselves: rollout join --coordinator HOST:JOIN_PORT "
                "--token-file FILE",
                "(who runs the cluster knows its join port, and makes the token: rollout-coordinator token create "
                "--role operator)",
            ]
        )
    )


@asynccontextmanager
async def connected(
    target: Target,
    *,
    patience_s: float = 15.0,
    on_trouble: Trouble | None = None,
    on_answer: Callable[[], None] | None = None,
) -> AsyncGenerator[Runs, None]:
    """Yield a client of `target`."""
    from rollout.client.runs import Runs  # grpc takes longer to import than `--help` to print

    former = files.former_addresses(target.tls_dir)
    runs = await Runs.connect(
        [*target.addresses, *former],
        tls_dir=target.tls_dir,
        cluster=target.cluster,
        patience_s=patience_s,
        on_trouble=on_trouble,
        on_answer=on_answer,
    )
    async with runs:
        yield runs
