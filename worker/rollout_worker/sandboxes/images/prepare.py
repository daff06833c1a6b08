"""From what a task says of its environment to what a provider can start from.

    prepared = await prepare(task.environment, task.directory, provider, state, force_build=False, timeout_s=600,
                             choice="auto")
    spec = Spec(root=prepared.root, workdir=prepared.workdir, env=prepared.env, user=prepared.user, ...)
    sandbox = await provider.create(spec)
    await replay(prepared, sandbox, task.directory / task.environment.build, 600)

docs/sandboxes.md says what each choice means for each provider.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

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
    Host,
    Image,
    ImageChoice,
    KeepsWritten,
    Limits,
    MakesImages,
    Network,
    NetworkMode,
    Provider,
    Root,
    RootFs,
    Sandbox,
    Spec,
)

ROOM = "waiting for room"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Environment(Protocol):
    """What is asked of a task's environment: an image's name, or a directory with a Dockerfile."""

    @property
    def docker_image(self) -> str | None: ...

    @property
    def build(self) -> str | None: ...

    @property
    def cpus(self) -> float | None: ...

    @property
    def memory_mb(self) -> int | None: ...

    @property
    def storage_mb(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a sandbox is to begin with.

    `workdir`, `env`, `user`: as the image has them; None: it says nothing.
    `remarks`: what is not as the image would be, or not isolated, a sentence each; they must be told.
    `image_key`: equal for sandboxes that begin with the same files.
    `replay`: what is still to be done in each sandbox, by `replay`.
    `directories`: what the sandbox must have of its own for that, beside those of tasks.
    `entrypoint`: the program of the image that starts what commands then find running, where no engine runs it.
    """

    root: Root
    workdir: str | None
    env: dict[str, str]
    user: str | None
    remarks: tuple[str, ...]
    image_key: str
    replay: tuple[recipe.Step, ...] = ()
    directories: tuple[str, ...] = field(default=())
    entrypoint: tuple[str, ...] = field(default=())


async def prepare(
    environment: Environment,
    task_directory: Path,
    provider: Provider,
    state: Path,
    *,
    force_build: bool,
    timeout_s: float,
    choice: ImageChoice,
    pause: Pause = no_pause,
    shares_host: bool = False,
) -> Prepared:
    """Build, fetch or plan what the sandbox begins with; what is there already is used again, unless `force_build`.

    `pause`: entered while it waits for room, or for another one that makes the same.
    `shares_host`: a sandbox that builds has this host's network; else a public one, or none where there is none.
    `state`: where images are kept; for `bubblewrap`, on the file system of its sandboxes.
    ImageBuildError, ImageBuildTimeoutError, ImagePullError, ImageNotFoundError, ImageError (no room, or `choice` is
    nothing for this provider); SandboxRefusedError of `probe`.
    """
    capabilities = await provider.probe()
    usual = Limits()
    work = _Work(
        provider,
        Store(state),
        environment.docker_image,
        task_directory / environment.build if environment.build is not None else None,
        force_build,
        timeout_s,
        Limits(
            environment.cpus or usual.cpus,
            environment.memory_mb or usual.memory_mb,
            environment.storage_mb or usual.storage_mb,
        ),
        "host" if shares_host else "public" if "public" in capabilities.networks else "none",
        pause,
    )
    try:
        prepared = await work.done(choice)
    except DockerfileError as error:
        raise ImageBuildError(error.message) from error
    if capabilities.users or prepared.user in (None, "root", "0"):
        return prepared
    remark = f"commands do not run as the image's user {prepared.user}: sandboxes here have one user only"
    return replace(prepared, user=None, remarks=(*prepared.remarks, remark))


async def replay(
    prepared: Prepared, sandbox: Sandbox, context_directory: Path, timeout_s: float, *, build_s: float | None = None
) -> None:
    """Do in a new sandbox what is left to do of its image, in the `timeout_s` that are left of `build_s`.

    ImageBuildError, ImageBuildTimeoutError.
    """
    await carry_out(prepared.replay, sandbox, context_directory, timeout_s, build_s=build_s)


def host_remark(provider: str, image: str, why: str = "") -> str:
    """What is told where a task's image is not used."""
    base = f"the image {image} is not used" + (f" ({why})" if why else "")
    if provider == "process":
        return (
            f"{base}: programs and libraries are this host's, its files can be read, and what the Dockerfile's RUN and "
            f"COPY write outside of {', '.join(TASK_DIRECTORIES)} is written on this host"
        )
    return f"{base}: programs and libraries are this host's"


@dataclass(frozen=True, slots=True)
class _Work:
    """One image to be had. `directory`: with a Dockerfile; None: `image` is named."""

    provider: Provider
    store: Store
    image: str | None
    directory: Path | None
    anew: bool
    timeout_s: float
    limits: Limits  # of a sandbox that builds, and its network
    network: NetworkMode
    pause: Pause

    async def done(self, choice: ImageChoice) -> Prepared:
        roots = (await self.provider.probe()).roots
        if isinstance(self.provider, MakesImages):
            return await self.by_engine(self.provider, choice)
        if "rootfs" in roots:
            return await self.locally(choice)
        if "image" in roots:
            return self.by_reference(choice)
        name = self.provider.name
        if choice not in ("auto", "host"):
            raise ImageError(
                f"`{name}` sandboxes have no root of their own: image: {choice} needs bubblewrap, docker or podman"
            )
        return await self.on_host(f"`{name}` sandboxes have this host's root", may_change=choice == "host")

    # An engine, or somebody else's

    async def by_engine(self, provider: MakesImages, choice: ImageChoice) -> Prepared:
        if choice == "host":
            raise ImageError(f"`{self.provider.name}` sandboxes cannot have this host's root: leave out image: host")
        if self.image is not None or self.directory is None:
            if choice == "build":
                raise ImageError(f"there is nothing to build: the task names the image {self.image}; use image: pull")
            return _of_engine(await self._pull(provider, self.image or ""))
        if choice != "pull":
            return _of_engine(await provider.build_image(self.directory, timeout_s=self.timeout_s, anew=self.anew))
        instructions = self._instructions()
        built = await self._pull(provider, recipe.base_of(instructions))
        plan = recipe.read(instructions, built.env, workdir=built.workdir or "/")
        return _replayed(_of_engine(built), plan, self.directory)

    async def _pull(self, provider: MakesImages, reference: str) -> BuiltImage:
        return await provider.pull_image(reference, timeout_s=self.timeout_s, anew=self.anew)

    def by_reference(self, choice: ImageChoice) -> Prepared:
        """Whoever starts the sandbox pulls the image; of a Dockerfile, that of FROM."""
        name = self.provider.name
        if choice in ("host", "build"):
            raise ImageError(f"`{name}` sandboxes start from images of a registry: image: {choice} is not possible")
        if self.directory is None:
            return Prepared(Image(self.image or ""), None, {}, None, (), f"image:{self.image}")
        instructions = self._instructions()
        plan = recipe.read(instructions, {"PATH": PATH})
        base = Prepared(Image(plan.base), None, {}, None, (), f"image:{plan.base}")
        remark = f"the image is not built: the Dockerfile is carried out in each sandbox of {plan.base}"
        return replace(_replayed(base, plan, self.directory), remarks=(remark, *plan.remarks))

    # This host

    async def locally(self, choice: ImageChoice) -> Prepared:
        if choice == "host":
            return await self.on_host("image: host", may_change=True)
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
        """Whether it is worth to try: a base that nobody can fetch is no fault of the task."""
        base = recipe.base_of(self._instructions())
        return not lacking() and (base == "scratch" or await is_reachable(base) or await builder.has(base))

    async def _from_registry(self, choice: ImageChoice, why: list[str]) -> Prepared:
        if choice == "build":
            raise ImageError(f"there is nothing to build: the task names the image {self.image}; use image: pull")
        try:
            return await self._fetched()
        except (RegistryUnreachableError, ImageToolsMissingError) as error:
            if choice == "pull":
                raise
            return await self.on_host("; ".join([*why, error.message]), may_change=False)

    async def _built(self, builder: Builder, key: str) -> Prepared:
        directory = _there(self.directory)

        async def make(path: Path) -> Made:
            return await builder.build(directory, path, self.timeout_s, anew=self.anew)

        return _unpacked(await self.store.get(key, make, anew=self.anew), key)

    async def _fetched(self) -> Prepared:
        """The image, unpacked; of a Dockerfile that of FROM, and over it what the rest writes."""
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

    async def on_host(self, why: str, *, may_change: bool) -> Prepared:
        """The host's programs, and over them what the Dockerfile does, but for FROM.

        `may_change`: this host, where the provider's sandboxes write to it.
        """
        name = self.provider.name
        capabilities = await self.provider.probe()
        path = os.environ.get("PATH", PATH) if name == "process" else PATH
        if self.directory is None:
            return Prepared(Host(), None, {}, None, (host_remark(name, self.image or "", why),), "host")
        plan = recipe.read(self._instructions(), {"PATH": path})
        key = f"host-{host_programs()}"  # what is written lies over them, and must not outlive an upgrade
        base = Prepared(Host(), None, {}, None, (host_remark(name, plan.base, why),), key)
        own = _own_directories(plan)
        if not capabilities.hides_host and not may_change:
            _spare_host(plan, (*TASK_DIRECTORIES, *own) if capabilities.private_directories else ())
        prepared = replace(_replayed(base, plan, self.directory), directories=own)
        return await self._written(prepared, self.timeout_s)

    async def _written(self, prepared: Prepared, timeout_s: float) -> Prepared:
        """Do the replay once, and let sandboxes begin with what it wrote, where the provider can."""
        provider = self.provider
        if not prepared.replay or not isinstance(provider, KeepsWritten) or not await provider.can_keep_written():
            return prepared
        directory = _there(self.directory)
        key = f"written-{prepared.image_key.rpartition(':')[2][:32]}"

        async def make(path: Path) -> Made:
            spec = Spec(
                root=prepared.root,
                network=Network(self.network),
                limits=self.limits,
                env=prepared.env,
                directories=TASK_DIRECTORIES,
            )
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
    """A new sandbox; `pause` is entered while there is no room for it. As `Provider.create`."""
    with suppress(SandboxNoRoomError):
        return await provider.create(spec, wait=False)
    with pause(ROOM):
        return await provider.create(spec)


def _there(directory: Path | None) -> Path:
    assert directory is not None
    return directory


def _of_engine(built: BuiltImage) -> Prepared:
    return Prepared(Image(built.reference), built.workdir, {}, built.user, (), built.key)


def _unpacked(made: Made, key: str) -> Prepared:
    return Prepared(
        RootFs(made.path / "root"),
        made.workdir,
        dict(made.env),
        made.user,
        made.remarks,
        key,
        entrypoint=made.entrypoint,
    )


def _replayed(base: Prepared, plan: recipe.Recipe, directory: Path) -> Prepared:
    """`base`, with the plan's steps to be done, and what they change for commands."""
    key = f"{base.image_key}:{context.content_id(directory, base.image_key)}"
    return replace(
        base,
        workdir=plan.workdir or base.workdir,
        env={**base.env, **plan.env},
        user=plan.user or base.user,
        remarks=(*base.remarks, *plan.remarks),
        image_key=key,
        replay=plan.steps,
        entrypoint=base.entrypoint if plan.entrypoint is None else plan.entrypoint,
    )


def host_programs() -> str:
    """Changes when programs or libraries are installed on this host."""
    found = [Path(name) for name in ("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib")]
    return hashlib.sha256(repr([path.stat().st_mtime_ns for path in found if path.exists()]).encode()).hexdigest()[:8]


def _spare_host(plan: recipe.Recipe, private: tuple[str, ...]) -> None:
    """ImageBuildError if the plan may change more of this host than directories that are a sandbox's own."""

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
    """Of those that the plan fills, what no directory of the host stands in the way of."""
    tops = dict.fromkeys("/" + path.split("/")[1] for path in plan.directories)
    return tuple(top for top in tops if top not in TASK_DIRECTORIES and not os.path.lexists(top))
