"""Sandboxes with a root, processes and a network of their own, made with bubblewrap; no daemon, as root or not.

The root is the host's programs (/usr, and of /etc what everybody may read) or an unpacked image, under an overlay that
takes what is written; everything else starts empty. bubblewrap builds it and ends: commands enter its namespaces.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.claims import Capacity
from rollout_worker.sandboxes.local import Features, LocalProvider, Price
from rollout_worker.sandboxes.port import Capabilities, Host, RootFs, Spec

_DIRECTORIES = ("etc", "home", "media", "mnt", "opt", "root", "run", "srv", "usr", "var", "var/lib", "var/log")
_OPEN_DIRECTORIES = ("tmp", "var/tmp")
_PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BubblewrapProvider(LocalProvider):
    name = "bubblewrap"

    def __init__(
        self,
        state: Path,
        *,
        program: str | None = None,
        overlay: bool = True,
        capacity: Capacity | None = None,
        price: Price | None = None,
    ) -> None:
        """`program`: bubblewrap, if not `bwrap` in PATH. `overlay=False`: as where the kernel refuses overlays."""
        super().__init__(state, capacity=capacity, price=price)
        self._program = program or shutil.which("bwrap")
        self._overlay = overlay
        self._etc: Path | None = None

    def _ways(self) -> Sequence[Features]:
        if self._program is None:
            return []
        overlays = (True, False) if self._overlay else (False,)
        return [Features(namespaces=True, network=n, overlay=o) for n in (True, False) for o in overlays]

    def _describe(self, features: Features) -> Capabilities:
        notes = ["the kernel is shared", "the network `public` is this host's, its loopback included"]
        if not features.overlay:
            notes.append("/usr and /etc, or an image's files, cannot be written: there are no overlay mounts")
        if os.geteuid() != 0:
            notes.append("there is no user but root, who is the worker's user outside")
        networks: set[Literal["none", "public", "allowlist"]] = {"public"}
        if features.network:
            networks |= {"none", "allowlist"}
        return Capabilities(
            private_directories=True,
            own_processes=True,
            hides_sandboxes=True,
            hides_host=True,
            writable_root=features.overlay,
            users=os.geteuid() == 0,
            roots=frozenset({"host", "rootfs"}),
            networks=frozenset(networks),
            limits=self.enforcement(features),
            notes=(*notes, *features.notes),
        )

    def _refusals(self, spec: Spec, features: Features) -> list[str]:
        root = spec.root
        if isinstance(root, Host):
            return []
        if not isinstance(root, RootFs):
            return ["`bubblewrap` sandboxes have this host's root or an unpacked one: unpack the image first"]
        if not (root.path / "bin" / "sh").exists() and not (root.path / "bin" / "sh").is_symlink():
            return [f"there is no /bin/sh in {root.path}"]
        if not features.overlay and spec.directories:
            return ["directories cannot be made in an image here: there are no overlay mounts"]
        return []

    def _map(self) -> tuple[int, int]:
        return 0, 0  # images and scripts expect root, who owns what the worker's user made

    def _home(self, box: Path, features: Features) -> str:
        return "/root"

    def _path(self) -> str:
        return _PATH

    def _prepare(self, box: Path, spec: Spec, features: Features) -> dict[str, Any]:
        overlays: list[tuple[str, str, str, str, str]] = []

        def layered(lower: Path, name: str) -> str:
            """Where `lower` is, under an overlay if there are any."""
            if not features.overlay:
                return str(lower)
            upper, work, where = box / "in" / f"{name}-upper", box / "in" / f"{name}-work", box / f"{name}-merged"
            for directory in (upper, work, where):
                directory.mkdir(mode=0o755)
            # In a user namespace the overlay's own marks must be attributes that a user may set (overlayfs.rst).
            options = "" if os.geteuid() == 0 else ",userxattr"
            overlays.append((str(lower), str(upper), str(work), str(where), options))
            return str(where)

        if isinstance(spec.root, RootFs):
            arguments = self._image_root(layered(spec.root.path.absolute(), "root"), spec, features)
        else:
            arguments = self._host_root(box / "in" / "root", spec, features, layered)
        arguments += ["--dev", "/dev", "--proc", "/proc"]
        for mount in spec.mounts:
            arguments += ["--ro-bind" if mount.read_only else "--bind", str(mount.source.absolute()), mount.target]
        return {"bubblewrap": {"program": self._program, "arguments": arguments, "overlays": overlays}, "drop": True}

    def _image_root(self, where: str, spec: Spec, features: Features) -> list[str]:
        arguments = ["--bind" if features.overlay else "--ro-bind", where, "/"]
        if not features.overlay:
            return [*arguments, "--tmpfs", "/tmp"]
        for path in spec.directories:
            arguments += ["--dir", path]
        return arguments

    def _host_root(self, root: Path, spec: Spec, features: Features, layered: Any) -> list[str]:
        root.mkdir(mode=0o755)
        for name in _DIRECTORIES:
            (root / name).mkdir(mode=0o755)
        for name in _OPEN_DIRECTORIES:
            (root / name).mkdir()
            (root / name).chmod(0o1777)
        for path in spec.directories:
            (root / path[1:]).mkdir(mode=0o755, parents=True, exist_ok=True)
        kind = "--bind" if features.overlay else "--ro-bind"
        arguments = ["--bind", str(root), "/", kind, layered(Path("/usr"), "usr"), "/usr"]
        arguments += [kind, layered(self._host_etc(), "etc"), "/etc"]
        for name in _PROGRAMS:
            path = Path("/", name)
            if path.is_symlink():
                arguments += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                arguments += [kind, layered(path, name), str(path)]
        return arguments

    def _host_etc(self) -> Path:
        """A copy of what everybody may read in /etc: root in a sandbox could read the rest too. Made when it changes."""
        if self._etc is None:
            self._etc = copy_readable(Path("/etc"), self.state / "cache")
        return self._etc


def copy_readable(source: Path, cache: Path) -> Path:
    """A copy of files and directories that others may read, below `cache`, named by what they were."""
    found: list[tuple[str, os.stat_result]] = []

    def look(directory: str) -> None:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                status = entry.stat(follow_symlinks=False)
                mode = status.st_mode
                if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and mode & stat.S_IROTH):
                    found.append((entry.path, status))
                elif stat.S_ISDIR(mode) and mode & stat.S_IROTH and mode & stat.S_IXOTH:
                    found.append((entry.path, status))
                    look(entry.path)

    look(str(source))
    listing = "\n".join(f"{path} {s.st_mode} {s.st_size} {s.st_mtime_ns}" for path, s in found)
    target = cache / hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
    if target.is_dir():
        return target
    cache.mkdir(mode=0o700, exist_ok=True)
    making = cache / f".{target.name}-{os.getpid()}"
    trees.remove(str(making))
    making.mkdir(mode=0o755)
    for path, status in found:
        copy = making / os.path.relpath(path, source)
        if stat.S_ISDIR(status.st_mode):
            copy.mkdir(mode=0o755)
        elif stat.S_ISREG(status.st_mode):
            shutil.copy2(path, copy, follow_symlinks=False)
        elif path.endswith("/resolv.conf") and Path(path).is_file():  # it may lead to /run, which is not in there
            shutil.copyfile(path, copy)
        else:
            copy.symlink_to(Path(path).readlink())
    try:
        making.rename(target)
    except OSError:  # another owner was faster
        trees.remove(str(making))
    return target


def open_bubblewrap(
    state: Path,
    *,
    program: str | None = None,
    overlay: bool = True,
    capacity: Capacity | None = None,
    price: Price | None = None,
) -> BubblewrapProvider:
    """The provider `bubblewrap`; use it with `async with`."""
    return BubblewrapProvider(state, program=program, overlay=overlay, capacity=capacity, price=price)
