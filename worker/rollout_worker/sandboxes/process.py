"""Sandboxes that are directories of this host: its root file system, as the worker's user, with private directories.

Where the kernel allows it, they have mount, pid, network, IPC and UTS namespaces of their own: /app, /tests and such
are private, no process outside can be signalled, and the network can be closed. Elsewhere commands are found and killed
by descent, and what needs more is refused. Only the user's permissions protect files of the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_worker.sandboxes.claims import Capacity
from rollout_worker.sandboxes.local import Features, LocalProvider
from rollout_worker.sandboxes.port import Capabilities, Host, Price, Spec
from rollout_worker.sandboxes.settings import ImageSettings, settings_of
from rollout_worker.sandboxes.uplink import RESOLV_CONF

_HOME = "/sandbox"


class ProcessProvider(LocalProvider):
    name = "process"

    def __init__(
        self,
        state: Path,
        *,
        namespaces: bool = True,
        capacity: Capacity | None = None,
        price: Price | None = None,
    ) -> None:
        """`namespaces=False` uses none, as where the kernel allows none."""
        super().__init__(state, capacity=capacity, price=price)
        self._wanted = namespaces

    def _ways(self) -> Sequence[Features]:
        bare = Features(namespaces=False, network=False, overlay=False)
        if not self._wanted:
            return [bare]
        return [
            Features(namespaces=True, network=True, overlay=False, uplink=True),
            Features(namespaces=True, network=True, overlay=False),
            Features(namespaces=True, network=False, overlay=False),
            bare,
        ]

    def _describe(self, features: Features) -> Capabilities:
        notes = [
            "files of this host can be read, and written, as the worker's user can",
            "what is written beside the private directories counts to no limit",
        ]
        if features.namespaces:
            notes.append("programs like sudo gain nothing")
        else:
            notes.append("processes of this host can be seen, and signalled, as the worker's user can")
        return Capabilities(
            private_directories=features.namespaces,
            own_processes=features.namespaces,
            hides_sandboxes=features.namespaces,
            hides_host=False,
            writable_root=False,
            users=features.namespaces and os.geteuid() == 0,  # without namespaces, others cannot access its directory
            roots=frozenset({"host"}),
            networks=self.networks(features),
            limits=self.enforcement(features),
            mounts=features.namespaces,
            notes=(*notes, *self.network_notes(features), *features.notes),
        )

    def _unkept(self, spec: Spec, features: Features) -> list[str]:
        reasons: list[str] = []
        if not isinstance(spec.root, Host):
            reasons.append("`process` sandboxes have this host's root only")
        elif spec.root.written is not None:
            reasons.append("`process` sandboxes cannot have what another sandbox wrote: there are no overlay mounts")
        if features.namespaces:
            reasons += [f for path in spec.directories if (f := _not_private(path, spec.directories)) is not None]
            for mount in spec.mounts:
                is_there = Path(mount.target).is_file() and mount.source.is_file()
                if not is_there and (fault := _not_private(mount.target, spec.directories)) is not None:
                    reasons.append(fault)
        return reasons

    def _prepare(self, box: Path, spec: Spec, features: Features) -> dict[str, Any]:
        home = box / "in" / "home"
        home.mkdir(mode=0o755)
        if not features.namespaces:
            return {}
        private = [(_HOME, str(home))]
        for number, path in enumerate(spec.directories):
            directory = box / "in" / str(number)
            directory.mkdir()
            directory.chmod(0o1777 if path in ("/tmp", "/var/tmp") else 0o755)
            private.append((path, str(directory)))
        mounts = [(str(m.source.absolute()), m.target, m.read_only) for m in spec.mounts]
        if spec.network.mode == "public" and RESOLV_CONF.is_file():
            self.write_resolv_conf(box / "in" / "resolv.conf", spec)
            mounts.insert(0, (str(box / "in" / "resolv.conf"), str(RESOLV_CONF.resolve()), True))
        return {
            # Otherwise root could unmount what covers other sandboxes.
            "drop": True,
            "host": {
                "point": str(self.mount_point),
                "private": private,
                "mounts": mounts,
                "hidden": str(self.state),
            },
        }

    def _home(self, box: Path, features: Features) -> str:
        return _HOME if features.namespaces else str(box / "in" / "home")

    def _path(self) -> str:
        return os.environ.get("PATH", os.defpath)


def _not_private(path: str, directories: tuple[str, ...]) -> str | None:
    """Return why nothing can be mounted at `path` without making a directory on the host, or None if it can."""
    if not path.startswith("/") or any(path.startswith(f"{other}/") for other in directories):
        return None
    top = Path("/", path.split("/")[1])
    if not os.path.lexists(top):
        return None
    if path == str(top) and (top.is_dir() or top.is_symlink()):
        return None
    if not Path(path).is_dir():
        return f"{path} cannot be made without making it on this host"
    if Path(path).resolve() != Path(path):
        return f"{path} leads through a link on this host"
    return None


def open_process(
    state: Path,
    config: Mapping[str, Any] = MappingProxyType({}),
    *,
    namespaces: bool = True,
    capacity: Capacity | None = None,
    price: Price | None = None,
) -> ProcessProvider:
    """Open the provider `process`; use it with `async with`. Raises ConfigError if `config` is wrong."""
    settings_of(ImageSettings, config, ProcessProvider.name)
    return ProcessProvider(state, namespaces=namespaces, capacity=capacity, price=price)
