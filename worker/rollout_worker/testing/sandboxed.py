"""Test processes in sandboxes of any provider, each with a copy of the project, prepared by `sandbox_init_cmd`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from blake3 import blake3
from rollout.processes.exits import exit_text
from rollout.workloads.json_form import canonical
from rollout.workloads.test.run_config import REPO_ROOT, RunConfig

from rollout_worker.sandboxes.errors import ImageBuildError, ImageError, SandboxError
from rollout_worker.sandboxes.images.prepare import Preparation, Prepared, host_programs
from rollout_worker.sandboxes.images.replay import carry_out
from rollout_worker.sandboxes.images.store import Made, Store
from rollout_worker.sandboxes.port import (
    Finished,
    Host,
    KeepsWritten,
    Limits,
    Network,
    NetworkMode,
    Provider,
    RootFs,
    Sandbox,
    Spec,
)
from rollout_worker.sandboxes.providers import open_provider
from rollout_worker.testing.place import Directory, OnOutput, Place, Stream, TestProcess

PROVIDERS = {"default": "command"}
"""Provider names of offload.toml that differ here."""
COMMAND_KEYS = (
    "prepare_command", "create_command", "exec_command", "download_command", "destroy_command", "working_dir",
    "timeout_secs",
)  # fmt: skip
LOCK_FILES = (
    "uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pyproject.toml", "setup.py", "setup.cfg",
    "requirements*.txt", "package.json", "package-lock.json", "yarn.lock", "pnpm-lock.yaml", "Cargo.toml",
    "Cargo.lock", "go.mod", "go.sum", "Dockerfile",
)  # fmt: skip
"""Files that define an environment; it is reused while they are unchanged."""
BUILD_S = 3600.0
SHOW_S = 5.0
LISTED_MAX = 8 << 20
"""Maximum bytes of file names."""
FILE_MAX = 256 << 20
_NETWORKS: tuple[NetworkMode, ...] = ("public", "host", "none")


class Sandboxes:
    """Sandboxes of one run on this worker.

    `tree` has the project's files; `state` is where sandboxes of this host are claimed; `copies` are further
    directories and their places in a sandbox.
    """

    def __init__(
        self, config: RunConfig, tree: Path, state: Path, runner: Path, copies: Sequence[tuple[Path, str]] = ()
    ) -> None:
        self._config = config
        self._given = config.provider
        self._tree = tree
        self._copies = tuple(copies)
        self._state = state
        self._runner = runner
        self._provider: Provider | None = None
        self._begin: Prepared | None = None
        self._limit_s = float(self._given.get("timeout_secs") or BUILD_S)
        self._init = str(config.sandbox.get("init_cmd") or "")
        self._context: Path | None = None  # of the Dockerfile

    async def open(self) -> None:
        """Open the provider and prepare what sandboxes begin with. Raises ConfigError and SandboxError."""
        kind = str(self._given["type"])
        settings: dict[str, Any] = {}
        if kind == "default":
            settings = {key: self._given[key] for key in COMMAND_KEYS if self._given.get(key) is not None}
        self._provider = provider = open_provider(PROVIDERS.get(kind, kind), self._state, settings, key="provider.type")
        await provider.open()
        self._begin = await self._prepared(provider)

    async def _prepared(self, provider: Provider) -> Prepared:
        image, dockerfile = self._given.get("image"), self._given.get("dockerfile")
        if not image and not dockerfile:
            if "host" not in (await provider.probe()).roots:
                raise ImageError(f"{provider.name} needs an image: set provider.image or provider.dockerfile")
            begin = Prepared(Host(), f"host-{host_programs()}")
            return await self._with_init(provider, begin)
        self._context = await asyncio.to_thread(_context, self._tree, dockerfile) if dockerfile else None
        store, limits = Store(self._state), self._limits()
        preparation = Preparation(provider, store, None if dockerfile else image, self._context, limits, BUILD_S)
        return await self._with_init(provider, await preparation.run("auto"))

    async def _with_init(self, provider: Provider, begin: Prepared) -> Prepared:
        if not self._init or begin.replay or not isinstance(provider, KeepsWritten):
            return begin
        if not isinstance(begin.root, Host | RootFs) or begin.root.written is not None:
            return begin
        return await self._with_environment(provider, provider, begin, begin.root)

    async def _with_environment(
        self, provider: Provider, keeps: KeepsWritten, begin: Prepared, root: Host | RootFs
    ) -> Prepared:
        """Run the project's command once per content of its lock files; sandboxes begin with the result."""
        if not await keeps.can_keep_written():
            return begin

        async def make(path: Path) -> Made:
            sandbox = await provider.create(await self._spec(provider, begin))
            try:
                place = await self._root(sandbox)
                await self._upload(sandbox, place)
                await self._prepare(sandbox, place)
                for tree, there in self._trees(sandbox, place):
                    files = await asyncio.to_thread(_files, tree)
                    for at in range(0, len(files), 1000):  # of this tree: another one may not have them
                        (await sandbox.exec(["rm", "-f", "--", *files[at : at + 1000]], cwd=there)).check()
                await keeps.keep_written(sandbox, path / "written")
            finally:
                await sandbox.destroy()
            return Made(path)

        locks = await asyncio.to_thread(_locks, self._tree)
        key = blake3(canonical([begin.image_key, self._init, self._place_of_tree(), self._config.env, locks]))
        made = await Store(self._state).get(f"tests-{key.hexdigest()[:32]}", make)
        self._init = ""
        where = made.path / "written"
        with_it = Host(written=where) if isinstance(root, Host) else RootFs(root.path, written=where)
        return replace(begin, root=with_it)

    def _limits(self) -> Limits:
        memory = self._given.get("memory_gb")
        return Limits.of(self._given.get("cpu_cores"), round(memory * 1024) if memory else None)

    def _place_of_tree(self) -> str:
        return str(self._config.sandbox.get("repo_root") or REPO_ROOT)

    async def _spec(self, provider: Provider, begin: Prepared) -> Spec:
        capabilities = await provider.probe()
        network: NetworkMode = next(mode for mode in _NETWORKS if mode in capabilities.networks)
        places = (self._place_of_tree(), *(there for _, there in self._copies))
        own = places if capabilities.private_directories and not capabilities.writable_root else ()
        return Spec(
            root=begin.root,
            limits=self._limits(),
            network=Network(network),
            directories=tuple(dict.fromkeys((*begin.directories, *own))),
            env={**begin.env, **self._config.env},
            user=begin.user,
        )

    async def place(self) -> SandboxPlace:
        """Return a new sandbox with the project in it. Raises SandboxError."""
        provider, begin = self._provider, self._begin
        assert provider is not None and begin is not None
        sandbox = await provider.create(await self._spec(provider, begin))
        try:
            if begin.replay:
                await carry_out(begin.replay, sandbox, self._context or self._tree, BUILD_S)
            root = await self._root(sandbox)
            await self._upload(sandbox, root)
            if self._init:
                await self._prepare(sandbox, root)
            runner = f"{sandbox.home}/.rollout-pytest-runner.py"
            await sandbox.write_file(runner, await asyncio.to_thread(self._runner.read_bytes))
        except BaseException:
            await sandbox.destroy()
            raise
        directory = str(self._config.sandbox.get("project_root") or root)
        return SandboxPlace(sandbox, runner, directory, self._config.env)

    def _trees(self, sandbox: Sandbox, root: str) -> list[tuple[Path, str]]:
        """Return directories and their places in the sandbox, which are never directories of this host."""
        above = "" if _has_own_root(sandbox) else sandbox.home
        return [(self._tree, root), *((path, f"{above}{there}") for path, there in self._copies)]

    async def _upload(self, sandbox: Sandbox, root: str) -> None:
        for tree, there in self._trees(sandbox, root):
            await sandbox.upload(tree, there)

    async def _root(self, sandbox: Sandbox) -> str:
        """Return the project's directory in the sandbox, which is never a directory of this host."""
        return self._place_of_tree() if _has_own_root(sandbox) else f"{sandbox.home}/project"

    async def _prepare(self, sandbox: Sandbox, root: str) -> None:
        finished = await sandbox.exec(self._init, cwd=root, env=self._config.env, timeout_s=self._limit_s)
        if not finished.ok:
            said = (finished.stderr.text().strip() or finished.stdout.text().strip())[-2000:]
            raise ImageBuildError(f"sandbox_init_cmd {_ending(finished)}: {said}")

    async def close(self) -> None:
        if self._provider is not None:
            await self._provider.close()
        if self._context is not None:
            await asyncio.to_thread(shutil.rmtree, self._context, ignore_errors=True)


def _has_own_root(sandbox: Sandbox) -> bool:
    found = sandbox.capabilities
    return found.private_directories or found.writable_root


def _context(tree: Path, dockerfile: str) -> Path:
    """Return a directory with the project's files, and the Dockerfile under its standard name."""
    source = tree / dockerfile
    if not source.is_file():
        raise ImageError(f"provider.dockerfile: {dockerfile} is not among the files of the project that travel")
    context = Path(tempfile.mkdtemp(prefix="rollout-image-"))
    shutil.copytree(tree, context, dirs_exist_ok=True)
    target = context / "Dockerfile"
    target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
    return context


def _files(tree: Path) -> list[str]:
    return [path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir()]


def _locks(tree: Path) -> list[list[str]]:
    found = sorted({path for name in LOCK_FILES for path in tree.glob(name) if path.is_file()})
    return [[path.name, blake3(path.read_bytes()).hexdigest()] for path in found]


def _ending(finished: Finished) -> str:
    if finished.how == "timed_out":
        return "was ended at its time limit"
    code = finished.exit_code if finished.exit_code is not None else -(finished.signal or 0)
    return f"ended with {exit_text(code)}"


class SandboxPlace(Place):
    def __init__(self, sandbox: Sandbox, runner: str, directory: str, env: Mapping[str, str]) -> None:
        self.runner = runner
        self._sandbox = sandbox
        self._directory = directory
        self._env = env

    async def start(self, words: Sequence[str], on_output: OnOutput) -> TestProcess:
        return SandboxProcess(self._sandbox, words, self._directory, self._env, on_output)

    @asynccontextmanager
    async def directory(self) -> AsyncGenerator[Directory]:
        name = f"{self._sandbox.home}/.rollout-{uuid4().hex[:12]}"
        (await self._sandbox.exec(["mkdir", name])).check()
        copy = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rollout-test-"))
        try:
            yield SandboxDirectory(self._sandbox, name, copy)
        finally:
            await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)
            with suppress(SandboxError):
                await self._sandbox.exec(["rm", "-rf", name])

    async def files(self) -> list[str]:
        find = ["find", ".", "-type", "f", "-print0"]
        listed = (await self._sandbox.exec(find, cwd=self._directory, keep_bytes=LISTED_MAX)).check().stdout
        names = (listed.head + (b"" if listed.missing else listed.tail)).split(b"\0")
        return [name.decode("utf-8", "surrogateescape").removeprefix("./") for name in names[:-1]]

    async def fetch(self, name: str, target: Path) -> None:
        await self._sandbox.download(f"{self._directory}/{name}", target, max_bytes=FILE_MAX)

    async def close(self) -> None:
        await self._sandbox.destroy()


class SandboxDirectory(Directory):
    def __init__(self, sandbox: Sandbox, name: str, copy: Path) -> None:
        self.name = name
        self._sandbox = sandbox
        self._copy = copy

    async def bring(self) -> Path:
        with suppress(SandboxError):  # what is not there is no result
            await self._sandbox.download(self.name, self._copy)
        return self._copy


class SandboxProcess(TestProcess):
    """A command of the sandbox. Its end, also by a kill, ends every process there."""

    def __init__(
        self, sandbox: Sandbox, words: Sequence[str], directory: str, env: Mapping[str, str], on_output: OnOutput
    ) -> None:
        self._sandbox = sandbox
        self._on_output = on_output
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._running = asyncio.ensure_future(
            sandbox.exec(
                list(words), stdin=self._commands(), env=env, cwd=directory, on_output=self._said, keep_bytes=1 << 10
            )
        )

    def _said(self, stream: Stream, data: bytes) -> None:
        self._on_output(stream, data)

    async def _commands(self) -> AsyncIterator[bytes]:
        while data := await self._input.get():
            yield data

    async def send(self, data: bytes) -> None:
        self._input.put_nowait(data)

    def close_input(self) -> None:
        self._input.put_nowait(b"")

    async def wait(self) -> str:
        await asyncio.wait([self._running])
        if self._running.cancelled():
            return "it was ended"
        error = self._running.exception()
        if error is not None:
            return f"its sandbox failed: {error}"
        finished = self._running.result()
        if finished.how != "timed_out":
            self.code = finished.exit_code if finished.exit_code is not None else -(finished.signal or 0)
        with suppress(SandboxError):
            await self._sandbox.kill()
        limit = f" (the sandbox's {finished.limit} limit was hit)" if finished.limit else ""
        return f"{_ending(finished).removeprefix('ended with ')}{limit}"

    async def show_stacks(self, pid: int) -> None:
        with suppress(SandboxError):
            await self._sandbox.exec(["kill", "-USR2", str(pid)], timeout_s=SHOW_S)

    async def kill(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
