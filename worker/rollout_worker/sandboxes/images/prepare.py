"""Preparation of what a provider can start from, given a task's image or Dockerfile.

    prepared = await Preparation(provider, Store(state), None, task / "environment", Limits(), 600).run("auto")
    spec = Spec(root=prepared.root, workdir=prepared.workdir, env=prepared.env, user=prepared.user, ...)
    sandbox = await provider.create(spec)
    await carry_out(prepared.replay, sandbox, task / "environment", 600)

docs/sandboxes.md says what each choice means for each provider.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollout.workloads.job import dockerfile
from rollout.workloads.job.dockerfile import DockerfileError

from rollout_worker.sandboxes.errors import (
    ImageBuildError,
    ImageError,
    ImageToolsMissingError,
    RegistryUnreachableError,
    SandboxError,
    SandboxNoRoomError,
)
from rollout_worker.sandboxes.images import context, recipe
from rollout_worker.sandboxes.images.fetch import fetch, is_reachable
from rollout_worker.sandboxes.images.programs import Builder, find_builder, lacking
from rollout_worker.sandboxes.images.replay import carry_out
from rollout_worker.sandboxes.images.store import Made, Pause, Store, no_pause
from rollout_worker.sandboxes.port import (
    TASK_DIRECTORIES,
    BuiltImage,
    Capabilities,
    Host,
    Image,
    ImageChoice,
    KeepsWritten,
    Limits,
    MakesImages,
    Network,
    Provider,
    Root,
    RootFs,
    Sandbox,
    Spec,
)

ROOM = "waiting for room"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a sandbox starts with.

    `workdir`, `env` and `user` are the image's; None if it says nothing. `remarks` are sentences on what differs from
    the image or is not isolated; users must see them. `image_key` is equal for sandboxes that start with the same
    files. `replay` are steps that `carry_out` must still do in each sandbox, and `directories` the private directories
    that these need beside those of tasks. `entrypoint` is the image's program that starts what commands then find
    running, where no engine runs it.
    """

    root: Root
    image_key: str
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    remarks: tuple[str, ...] = ()
    replay: tuple[recipe.Step, ...] = ()
    directories: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares what a sandbox of `provider` starts with: `image`, or the result of the Dockerfile in `directory`.

    `store`, used for `bubblewrap`, is on the file system of its sandboxes. `limits` and `timeout_s` hold for a sandbox
    that builds. With `anew` nothing that exists is reused. With `shares_host` a sandbox that builds has this host's
    network, otherwise a public one, or none if there is none. `pause` is entered while it waits for room, or for
    another one that makes the same.
    """

    provider: Provider
    store: Store
    image: str | None
    directory: Path | None
    limits: Limits
    timeout_s: float
    anew: bool = False
    shares_host: bool = False
    pause: Pause = no_pause

    async def run(self, choice: ImageChoice) -> Prepared:
        """Build, fetch or plan it.

        Raises ImageBuildError, ImageBuildTimeoutError, ImagePullError, ImageNotFoundError or ImageToolsMissingError;
        ImageError if there is no room or `choice` does not fit the provider; SandboxRefusedError as `probe` does.
        """
        capabilities = await self.provider.probe()
        try:
            prepared = await self._chosen(choice, capabilities)
        except DockerfileError as error:
            raise ImageBuildError(error.message) from error
        if capabilities.users or prepared.user in (None, "root", "0"):
            return prepared
        remark = f"commands do not run as the image's user {prepared.user}: sandboxes here have one user only"
        return replace(prepared, user=None, remarks=(*prepared.remarks, remark))

    async def _chosen(self, choice: ImageChoice, capabilities: Capabilities) -> Prepared:
        if choice == "build" and self.directory is None and capabilities.roots & {"image", "rootfs"}:
            raise ImageError(f"there is nothing to build: the task names the image {self.image}; use image: pull")
        if isinstance(self.provider, MakesImages):
            return await self._by_engine(self.provider, choice)
        if "rootfs" in capabilities.roots:
            return await self._locally(choice)
        if "image" in capabilities.roots:
            return self._by_reference(choice)
        name = self.provider.name
        if choice not in ("auto", "host"):
            raise ImageError(
                f"`{name}` sandboxes have no root of their own: image: {choice} needs bubblewrap, docker or podman"
            )
        return await self._on_host(f"`{name}` sandboxes have this host's root", may_change=choice == "host")

    # Engines and remote services

    async def _by_engine(self, provider: MakesImages, choice: ImageChoice) -> Prepared:
        if choice == "host":
            raise ImageError(f"`{self.provider.name}` sandboxes cannot have this host's root: leave out image: host")
        if self.image is not None or self.directory is None:
            return _of_engine(await self._pull(provider, self.image or ""))
        if choice != "pull":
            return _of_engine(await provider.build_image(self.directory, timeout_s=self.timeout_s, anew=self.anew))
        instructions = self._instructions()
        built = await self._pull(provider, recipe.base_of(instructions))
        plan = recipe.read(instructions, built.env, workdir=built.workdir or "/")
        return _replayed(_of_engine(built), plan, self.directory)

    async def _pull(self, provider: MakesImages, reference: str) -> BuiltImage:
        return await provider.pull_image(reference, timeout_s=self.timeout_s, anew=self.anew)

    def _by_reference(self, choice: ImageChoice) -> Prepared:
        """Refer to the image, or to FROM of a Dockerfile, which whoever starts the sandbox pulls."""
        name = self.provider.name
        if choice in ("host", "build"):
            raise ImageError(f"`{name}` sandboxes start from images of a registry: image: {choice} is not possible")
        if self.directory is None:
            return Prepared(Image(self.image or ""), f"image:{self.image}")
        instructions = self._instructions()
        plan = recipe.read(instructions, {"PATH": PATH})
        remark = f"the image is not built: the Dockerfile is carried out in each sandbox of {plan.base}"
        base = Prepared(Image(plan.base), f"image:{plan.base}", remarks=(remark,))
        return _replayed(base, plan, self.directory)

    # This host

    async def _locally(self, choice: ImageChoice) -> Prepared:
        if choice == "host":
            return await self._on_host("image: host", may_change=True)
        why: list[str] = []
        if choice != "pull" and self.directory is not None:
            key = f"built-{(await asyncio.to_thread(context.content_id, self.directory))[:32]}"
            made = None if self.anew else await asyncio.to_thread(self.store.find, key)
            if made is not None:
                return _unpacked(made, key)
            if choice == "build" and (missing := lacking(build=True)):
                raise ImageToolsMissingError(missing)
            builder = await find_builder()
            if builder is None:
                why.append("neither podman, buildah nor docker works here")
                if choice == "build":
                    raise ImageBuildError(f"{why[0]}: start one, or leave out image: build")
            elif choice == "build" or await self._has_base(builder):
                return await self._built(builder, key)
        return await self._from_registry(choice, why)

    async def _has_base(self, builder: Builder) -> bool:
        """Return whether a build is worth a try: a base that nobody can fetch is not the task's fault."""
        base = recipe.base_of(self._instructions())
        return not lacking() and (base == "scratch" or await is_reachable(base) or await builder.has(base))

    async def _from_registry(self, choice: ImageChoice, why: list[str]) -> Prepared:
        try:
            return await self._fetched()
        except (RegistryUnreachableError, ImageToolsMissingError) as error:
            if choice == "pull":
                raise
            return await self._on_host("; ".join([*why, error.message]), may_change=False)

    async def _built(self, builder: Builder, key: str) -> Prepared:
        directory, base = _there(self.directory), recipe.base_of(self._instructions())

        async def make(path: Path) -> Made:
            return await builder.build(directory, path, self.timeout_s, base=base, anew=self.anew)

        return _unpacked(await self.store.get(key, make, anew=self.anew), key)

    async def _fetched(self) -> Prepared:
        """Fetch and unpack the image; for a Dockerfile that of FROM, overlaid with what the rest writes."""
        if self.directory is None:
            made, key = await fetch(self.image or "", self.store, self.timeout_s, anew=self.anew)
            return _unpacked(made, key)
        instructions = self._instructions()
        begun = time.monotonic()
        base = recipe.base_of(instructions)
        if base == "scratch":
            raise ImageBuildError("FROM scratch needs an engine that builds: there is no shell to run anything with")
        made, key = await fetch(base, self.store, self.timeout_s, anew=self.anew)
        plan = recipe.read(instructions, made.env, workdir=made.workdir or "/")
        left = max(1.0, self.timeout_s - (time.monotonic() - begun))
        return await self._written(_replayed(_unpacked(made, key), plan, self.directory), left)

    async def _on_host(self, why: str, *, may_change: bool) -> Prepared:
        """Use the host's programs, overlaid with what the Dockerfile does after FROM.

        `may_change` allows changes to this host, where the provider's sandboxes write to it.
        """
        name = self.provider.name
        capabilities = await self.provider.probe()
        path = os.environ.get("PATH", PATH) if name == "process" else PATH
        if self.directory is None:
            return Prepared(Host(), "host", remarks=(_host_remark(name, self.image or "", why),))
        plan = recipe.read(self._instructions(), {"PATH": path})
        key = f"host-{host_programs()}"  # what is written overlays them, and must not outlive an upgrade
        base = Prepared(Host(), key, remarks=(_host_remark(name, plan.base, why),))
        own = _own_directories(plan)
        if not capabilities.hides_host and not may_change:
            _spare_host(plan, (*TASK_DIRECTORIES, *own) if capabilities.private_directories else ())
        prepared = replace(_replayed(base, plan, self.directory), directories=own)
        return await self._written(prepared, self.timeout_s)

    async def _written(self, prepared: Prepared, timeout_s: float) -> Prepared:
        """Do the replay once, and let sandboxes start with what it wrote, if the provider can."""
        provider = self.provider
        if not prepared.replay or not isinstance(provider, KeepsWritten) or not await provider.can_keep_written():
            return prepared
        directory = _there(self.directory)
        key = f"written-{prepared.image_key.rpartition(':')[2][:32]}"

        networks = (await provider.probe()).networks
        network = Network("host" if self.shares_host else "public" if "public" in networks else "none")
        spec = Spec(prepared.root, self.limits, network, TASK_DIRECTORIES, env=prepared.env)

        async def make(path: Path) -> Made:
            sandbox = await create(self.provider, spec, self.pause)
            try:
                await carry_out(prepared.replay, sandbox, directory, timeout_s, build_s=self.timeout_s)
                await provider.keep_written(sandbox, path / "written")
            finally:
                await sandbox.destroy()
            return Made(path)

        try:
            made = await self.store.get(key, make, anew=self.anew, pause=self.pause)
        except ImageError:
            raise
        except SandboxError as error:
            raise ImageBuildError(f"the sandbox for the build: {error.message}") from error
        written = made.path / "written"
        assert not isinstance(prepared.root, Image)
        return replace(prepared, root=replace(prepared.root, written=written), replay=(), directories=())

    def _instructions(self) -> tuple[dockerfile.Instruction, ...]:
        return dockerfile.parse(context.read_dockerfile(_there(self.directory)))


async def create(provider: Provider, spec: Spec, pause: Pause) -> Sandbox:
    """Create a sandbox; `pause` is entered while there is no room for it. Raises what `Provider.create` raises."""
    with suppress(SandboxNoRoomError):
        return await provider.create(spec, wait=False)
    with pause(ROOM):
        return await provider.create(spec)


def _there(directory: Path | None) -> Path:
    assert directory is not None
    return directory


def _host_remark(provider: str, image: str, why: str) -> str:
    """Return the remark for a task whose image is not used."""
    told = f"the image {image} is not used ({why}): programs and libraries are this host's"
    if provider != "process":
        return told
    return (
        f"{told}, its files can be read, and what the Dockerfile's RUN and COPY write outside of "
        f"{', '.join(TASK_DIRECTORIES)} is written on this host"
    )


def _of_engine(built: BuiltImage) -> Prepared:
    return Prepared(Image(built.reference), built.key, built.workdir, user=built.user)


def _unpacked(made: Made, key: str) -> Prepared:
    root = RootFs(made.path / "root")
    return Prepared(root, key, made.workdir, made.env, made.user, entrypoint=made.entrypoint)


def _replayed(base: Prepared, plan: recipe.Recipe, directory: Path) -> Prepared:
    """Return `base` with the plan's steps still to be done, and with what they change for commands."""
    key = f"{base.image_key}:{context.content_id(directory, base.image_key)}"
    return replace(
        base,
        workdir=plan.workdir or base.workdir,
        env={**base.env, **plan.env},
        user=plan.user or base.user,
        remarks=(*base.remarks, *plan.remarks),
        image_key=key,
        replay=tuple(plan.steps),
        entrypoint=base.entrypoint if plan.entrypoint is None else plan.entrypoint,
    )


def host_programs() -> str:
    """Return a hash that changes when programs or libraries are installed on this host."""
    found = [Path(name) for name in ("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib")]
    return hashlib.sha256(repr([path.stat().st_mtime_ns for path in found if path.exists()]).encode()).hexdigest()[:8]


def _spare_host(plan: recipe.Recipe, private: tuple[str, ...]) -> None:
    """Raise ImageBuildError if the plan may change more of this host than the sandbox's own directories."""

    def is_private(path: str) -> bool:
        return any(path == own or path.startswith(f"{own}/") for own in private)

    faults: list[str] = []
    for step in plan.steps:
        if isinstance(step, recipe.Run):
            faults.append(f"line {step.line}: RUN {step.text[:60]}")
        elif isinstance(step, recipe.Copy) and not is_private(step.target):
            faults.append(f"line {step.line}: a copy to {step.target}")
        elif isinstance(step, recipe.Directory) and not is_private(step.path) and not Path(step.path).is_dir():
            faults.append(f"line {step.line}: the directory {step.path}")
    if faults:
        raise ImageBuildError(
            "the Dockerfile would change this host, as `process` sandboxes have its root: use bubblewrap, docker or "
            f"podman, or allow it with image: host under provider_config ({'; '.join(faults)})"
        )


def _own_directories(plan: recipe.Recipe) -> tuple[str, ...]:
    """Return the top directories that the plan fills and that do not exist on the host, without those of tasks."""
    tops = dict.fromkeys("/" + path.split("/")[1] for path in plan.directories)
    return tuple(top for top in tops if top not in TASK_DIRECTORIES and not os.path.lexists(top))
