"""The interface that every sandbox provider implements and its callers rely on.

    async with open_process(state) as provider:
        async with await provider.create(Spec(limits=Limits(cpus=2))) as sandbox:
            finished = await sandbox.exec("make test", timeout_s=60)
            print(finished.exit_code, finished.stdout.text())

What cannot be enforced is refused (`SandboxRefusedError`) before anything is made. `Sandbox.capabilities` says what is
enforced more loosely than by the kernel; `Spec.require` refuses that too.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Protocol, Self

from rollout_worker.sandboxes.errors import (
    CommandFailedError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxRefusedError,
)
from rollout_worker.sandboxes.output import Capture, Output
from rollout_worker.sandboxes.trees import Moved, Selection, TooLargeError

TASK_DIRECTORIES = ("/app", "/tests", "/logs", "/solution", "/tmp")
"""Directories where agent evaluation tasks keep files; `/tmp` too, because parallel trials use the same names there."""

MIB = 1 << 20

LimitName = Literal["cpus", "memory", "storage", "pids"]
Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
OnOutput = Callable[[Stream, bytes], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Host:
    """The sandbox sees the programs and libraries of this machine.

    `written` is laid over them: what an earlier sandbox wrote, as `KeepsWritten.keep_written` stored it.
    """

    written: Path | None = None


@dataclass(frozen=True, slots=True)
class RootFs:
    """The sandbox's root is a directory, an unpacked image, which is never written to. `written` is as in `Host`."""

    path: Path
    written: Path | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """The sandbox's root is an image, by reference (`debian:12`, `name@sha256:...`)."""

    reference: str


Root = Host | RootFs | Image


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits for all processes of a sandbox together; admission counts them too."""

    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    pids: int = 1024

    @classmethod
    def of(cls, cpus: float | None, memory_mb: int | None, storage_mb: int | None = None) -> Self:
        """Return limits with defaults for values that are not given."""
        usual = cls()
        return cls(cpus or usual.cpus, memory_mb or usual.memory_mb, storage_mb or usual.storage_mb)


NetworkMode = Literal["none", "public", "allowlist", "host"]
ImageChoice = Literal["auto", "host", "pull", "build"]
"""How to get the image of a task."""


@dataclass(frozen=True, slots=True)
class Network:
    """What a sandbox can reach.

    `none`: its own loopback. `public`: what this host reaches, except the host itself and the credential services of
    clouds. `allowlist`: `hosts`, which are names, `*.name` (not the name itself), addresses and blocks. `host`: all
    that this host reaches, through its own interfaces, including its loopback and abstract sockets. With `public`,
    `hosts` lists addresses and blocks that are reachable although they are among the exceptions.
    """

    mode: NetworkMode = "none"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host, mounted in the sandbox at `target`."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Spec:
    """The specification of a sandbox.

    `directories` are absolute paths that exist in it, are writable, and that no other sandbox sees. On the host's root
    they start empty; in an image they hold what the image has there. `user` runs commands, by name or number as the
    sandbox knows it; None is the provider's default. `workdir` is where commands start and what relative paths are
    relative to; None is the sandbox's home directory. `env` is the whole environment of commands, except PATH, HOME,
    LANG, TMPDIR and the network's proxy. `require` names limits that the kernel must enforce for the sandbox as a
    whole.
    """

    root: Root = field(default_factory=Host)
    limits: Limits = field(default_factory=Limits)
    network: Network = field(default_factory=Network)
    directories: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    workdir: str | None = None
    user: str | int | None = None
    require: frozenset[LimitName] = frozenset()


Enforcement = Literal["kernel", "process", "watched", "no"]
"""How a limit is enforced: by the kernel for the whole sandbox, for each process alone, by polling, or not at all."""


LIMITS: tuple[LimitName, ...] = ("cpus", "memory", "storage", "pids")
_NO_LIMITS: Mapping[LimitName, Enforcement] = MappingProxyType(dict.fromkeys(LIMITS, "no"))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider can do on this machine, as found by trying it."""

    private_directories: bool = False
    own_processes: bool = False  # cannot see or signal processes outside
    hides_sandboxes: bool = False  # files of other sandboxes are out of reach
    hides_host: bool = False  # files of the host are out of reach, except its programs and mounts
    writable_root: bool = False  # paths beside the private directories can be written, and no one else sees it
    users: bool = False  # commands can run as other users than the default
    roots: frozenset[Literal["host", "rootfs", "image"]] = frozenset()
    networks: frozenset[NetworkMode] = frozenset()
    limits: Mapping[LimitName, Enforcement] = field(default_factory=lambda: _NO_LIMITS)
    mounts: bool = True  # files of this host can be mounted
    ends_daemons: bool = True  # a deadline also kills what left its session, parent and environment
    left_behind: bool = True  # processes that a command leaves running may go on printing
    notes: tuple[str, ...] = ()  # one sentence each: what is not isolated, and why a feature is missing


CONTAINER = Capabilities(
    private_directories=True, own_processes=True, hides_sandboxes=True, hides_host=True, writable_root=True
)
"""Capabilities of a sandbox with namespaces and a root file system of its own; the rest is probed."""

Ending = Literal["exited", "signalled", "timed_out"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a command. `limit` is the sandbox's limit that was hit while it ran and killed processes."""

    how: Ending
    exit_code: int | None  # if `exited`; 127: command not found, 126: it cannot be run
    signal: int | None  # if `signalled`
    stdout: Output
    stderr: Output
    duration_s: float
    limit: Literal["memory", "storage"] | None = None

    @property
    def ok(self) -> bool:
        return self.how == "exited" and self.exit_code == 0

    def check(self) -> Self:
        """Return itself. Raises CommandFailedError unless the command ended with exit code 0."""
        if self.ok:
            return self
        how = {
            "exited": f"ended with exit code {self.exit_code}",
            "signalled": f"was ended by signal {self.signal}",
            "timed_out": f"was ended by its deadline after {self.duration_s:.1f} s",
        }[self.how]
        why = f" (the sandbox's {self.limit} limit was hit)" if self.limit else ""
        last = self.stderr.text()[-2000:].strip() or self.stdout.text()[-2000:].strip()
        raise CommandFailedError(f"the command {how}{why}" + (f": {last}" if last else ""), finished=self)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The result of an upload or a download. `skipped` has (path in the tree, reason) of the first of the `left_out`
    entries."""

    files: int
    size: int  # bytes
    skipped: tuple[tuple[str, str], ...] = ()
    left_out: int = 0

    @classmethod
    def of(cls, moved: Moved, before: Moved | None = None) -> Self:
        """Return the result of a transfer. `before` holds entries left out before."""
        left = before or Moved()
        return cls(moved.files, moved.size, (*left.skipped, *moved.skipped), left.left_out + moved.left_out)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a download. `max_bytes` counts file contents and 512 for each entry, `max_entries` files and
    directories."""

    max_bytes: int = 4096 * MIB
    max_entries: int | None = None
    selection: Selection | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in US dollars."""

    cpu_hour: float = 0.0
    gib_hour: float = 0.0

    def per_hour(self, limits: Limits) -> float:
        """Return US dollars per hour of a sandbox that declares these."""
        return limits.cpus * self.cpu_hour + limits.memory_mb / 1024 * self.gib_hour


@dataclass(frozen=True, slots=True)
class Made:
    """What a sandbox's provider knows of it.

    `out` is a directory of this host for what commands print; it is removed with the sandbox. `remove` removes the
    sandbox and its claim; it raises SandboxTeardownError.
    """

    name: str
    spec: Spec
    capabilities: Capabilities
    home: str
    out: Path
    usd_per_hour: float
    remove: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A command as its caller requested it. `env` adds to the environment of every command of the sandbox. A provider
    gives each piece of output to both `captures` and `on_output` (`take`)."""

    words: list[str]
    env: Mapping[str, str]
    cwd: str | None
    user: str | int | None
    stdin: bytes | AsyncIterator[bytes] | None
    captures: Mapping[Stream, Capture]
    on_output: OnOutput | None

    def take(self, stream: Stream, data: bytes) -> Awaitable[None] | None:
        self.captures[stream].feed(data)
        return self.on_output(stream, data) if self.on_output else None

    async def give(self, stream: Stream, data: bytes) -> None:
        """Call `take` and await `on_output`."""
        if data and (told := self.take(stream, data)) is not None:
            await told

    async def pieces(self, most: int) -> AsyncIterator[bytes]:
        """Yield its standard input in pieces of at most `most` bytes."""
        source = self.stdin or b""
        if isinstance(source, bytes):
            for start in range(0, len(source), most):
                yield source[start : start + most]
            return
        async for data in source:
            for start in range(0, len(data), most):
                yield data[start : start + most]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended by itself: with an exit code or by a signal."""

    code: int | None = None
    signal: int | None = None


class Command(Protocol):
    """A command that was started. `limit` is as in `Finished`, once it has ended."""

    async def finish(self) -> Ended:
        """Wait until it has ended and its output is read. Raises also what `on_output` or the source of stdin raises.
        It may be cancelled, and `drain` called then."""
        ...

    async def drain(self) -> None:
        """Read what it had printed after everything was killed, for a bounded time because `on_output` may be stuck."""
        ...

    async def limit(self, ended: Ended | None) -> Literal["memory", "storage"] | None: ...

    async def close(self) -> None:
        """Release it: nobody waits for it any more."""
        ...


class Files(Protocol):
    """Transfers files of a sandbox; all its paths are absolute. Methods raise SandboxFileError or SandboxGoneError."""

    async def read(self, path: str, max_bytes: int) -> bytes: ...

    async def write(self, path: str, data: bytes, mode: int) -> None: ...

    async def upload(self, source: Path, target: str) -> Transfer: ...

    async def download(self, source: str, target: Path, bounds: Bounds) -> Transfer:
        """Copy to this host. Raises also TooLargeError."""
        ...


class Sandbox(ABC):
    """A place to run commands in. Every method raises SandboxGoneError once it no longer exists.

    A provider says how a command starts (`_begin`), how all processes are killed (`kill`), how files are transferred
    and what is done before its end (`_destroy`).
    """

    def __init__(self, made: Made, files: Files) -> None:
        self.name = made.name
        self.spec = made.spec
        self.capabilities = made.capabilities
        self.home = made.home
        self._made = made
        self._files = files
        self._commands = 0
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._stopped = False
        self._destroyed: asyncio.Task[None] | None = None

    @property
    def workdir(self) -> str:
        return self.spec.workdir or self.home

    # Commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | AsyncIterator[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        keep_bytes: int = MIB,
        output_dir: Path | None = None,
    ) -> Finished:
        """Run a program with arguments, or a line for `/bin/sh -c`, until it ends.

        After `timeout_s`, **every process in the sandbox** is killed, also those that left the command's session or
        were started by earlier commands, and what had been printed is returned. Cancellation kills them too. A command
        that ends by itself may leave processes running; what they print later is not kept.

        `on_output` gets each piece as it arrives; while one is awaited, the command's output is not read. The first and
        last `keep_bytes` of each stream are kept in memory; a longer stream also goes to a file, whole up to a bound,
        in `output_dir` or in a place that is removed with the sandbox.
        """
        if self._stopped:
            raise SandboxGoneError(f"{self.name} was stopped")
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self._commands += 1
        captures: dict[Stream, Capture] = {name: self._capture(keep_bytes, output_dir, name) for name in STREAMS}
        user = self.spec.user if user is None else user
        asked = Asked(words, env or {}, cwd, user, stdin, captures, on_output)
        try:
            running = await self._begin(asked)
            begun = time.monotonic()  # startup does not count as the command's time
            ended = await self._until_ended(running, timeout_s)
        finally:
            outputs = {name: capture.close() for name, capture in captures.items()}
        lasted_s = time.monotonic() - begun
        how: Ending = "timed_out" if ended is None else "exited" if ended.signal is None else "signalled"
        said = ended or Ended()
        limit = await running.limit(ended)
        return Finished(how, said.code, said.signal, outputs["stdout"], outputs["stderr"], lasted_s, limit)

    async def _until_ended(self, running: Command, timeout_s: float | None) -> Ended | None:
        """Return how the command ended, or None if it was killed after `timeout_s`."""
        try:
            return await asyncio.wait_for(running.finish(), timeout_s)
        except TimeoutError:
            await self.kill()
            await running.drain()
            return None
        except SandboxGoneError:
            raise
        except BaseException:  # cancelled, or `on_output` failed: nobody waits for the command any more
            await self._kill_left()
            raise
        finally:
            await running.close()

    async def _kill_left(self) -> None:
        """Kill every process, as nobody waits for the command."""
        with contextlib.suppress(SandboxError):
            await asyncio.shield(self.kill())

    def _capture(self, keep_bytes: int, directory: Path | None, stream: Stream) -> Capture:
        number = self._commands
        return Capture(keep_bytes, lambda: (directory or self._made.out) / f"{number}-{stream}")

    @abstractmethod
    async def _begin(self, asked: Asked) -> Command:
        """Start a command. Raises SandboxRefusedError if it cannot run as that user."""

    # Files

    async def read_file(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        """Return the bytes of a regular file.

        Raises SandboxFileError: ENOENT, EISDIR, EACCES, EINVAL (a pipe, a device), too_large.
        """
        return await self._files.read(self._absolute(path), max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file and create missing directories. Raises SandboxFileError."""
        await self._files.write(self._absolute(path), data, mode)

    async def upload(self, source: Path, target: str) -> Transfer:
        """Copy a file to `target`, or the contents of a directory into `target`. Links are copied, never followed.

        Raises SandboxFileError if something in the sandbox is in the way, OSError if `source` is at fault.
        """
        return await self._files.upload(source, self._absolute(target))

    async def download(
        self,
        source: str,
        target: Path,
        *,
        max_bytes: int = 4096 * MIB,
        max_entries: int | None = None,
        selection: Selection | None = None,
    ) -> Transfer:
        r"""Copy a file to `target`, or the contents of a directory into `target`, even if the sandbox is hostile.

        Nothing outside `target` is written. Links that would lead out of it, pipes, sockets and devices are skipped, as
        is what lies more than 100 levels deep or has a path of more than 512 bytes. Bytes of names that are not UTF-8
        are escaped (`\xff`). `selection` limits what is copied of a directory; the rest never leaves the sandbox. With
        one, `source` itself must not be a link (ELOOP).

        Raises SandboxFileError: `too_large` beyond `max_bytes` of file contents and 512 for each entry, `too_many`
        beyond `max_entries` files and directories. Some files may have been copied then.
        """
        path = self._absolute(source)
        try:
            return await self._files.download(path, target, Bounds(max_bytes, max_entries, selection))
        except TooLargeError as error:
            raise SandboxFileError(f"{path} in {self.name}: {error.reason}", reason=error.reason, path=path) from error

    def _absolute(self, path: str) -> str:
        """Return an absolute path. Raises SandboxGoneError if it was destroyed."""
        if self._ended is not None:
            raise SandboxGoneError(f"{self.name} was destroyed")
        if "\0" in path:
            raise SandboxFileError(f"{path!r} is no path", reason="EINVAL")
        return path if path.startswith("/") else posixpath.normpath(posixpath.join(self.workdir, path))

    async def names(self, *paths: str) -> dict[str, list[str]] | None:
        """Return the first few names, of any kind, in each path that is a directory.

        Returns None if that would cost as much as `download` here. Runs no program of the sandbox.
        """
        return None

    async def listen(self) -> socket.socket:
        """Return a listening socket on the sandbox's loopback, at a port of its own; the caller accepts there what
        commands connect. It stays until it is closed. Raises SandboxRefusedError if this provider cannot do that."""
        raise SandboxRefusedError(f"commands in {self.name} cannot reach their worker: use bubblewrap or process")

    # Its life

    @abstractmethod
    async def kill(self) -> None:
        """Kill every process in the sandbox. Files stay, and commands can be run again."""

    async def allow_more_storage(self) -> None:
        """Allow as much to be written again as the limit says. Does nothing where storage is not watched from here."""
        return

    async def stop(self) -> None:
        """End every process for good: commands then raise SandboxGoneError, but files can still be read."""
        self._stopped = True
        await self.kill()

    async def destroy(self) -> None:
        """Remove it and all it holds; idempotent. Raises SandboxTeardownError if something is left."""
        failed = self._destroyed is not None and self._destroyed.done() and self._destroyed.exception() is not None
        if self._destroyed is None or failed:
            self._ended = self._ended or time.monotonic()
            self._stopped = True
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        """Remove it. A provider that has more to end overrides this and does that first."""
        await self._made.remove()

    def cost(self) -> float:
        """Return US dollars since it was created, until now or until it was destroyed."""
        return ((self._ended or time.monotonic()) - self._begun) / 3600 * self._made.usd_per_hour

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.destroy()


class Provider(ABC):
    """Makes sandboxes. Open it first (`async with`): that reaps what earlier owners left behind."""

    name: str

    @abstractmethod
    async def probe(self) -> Capabilities:
        """Return what this provider can do here, found once, by trying. Raises SandboxRefusedError if it cannot work at
        all."""

    @abstractmethod
    async def create(self, spec: Spec, *, wait: bool = True) -> Sandbox:
        """Make a sandbox once there is room for what it declares. `wait=False` raises SandboxNoRoomError if there is
        none now.

        Raises SandboxRefusedError, SandboxCreateError.
        """

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Destroy every sandbox of this provider."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image that an engine has. `key` is equal for images with the same files. `has_entrypoint` says whether it
    starts a program that commands then find running."""

    reference: str
    key: str
    env: Mapping[str, str]
    workdir: str | None
    user: str | None
    has_entrypoint: bool = False


class MakesImages(ABC):
    """A provider whose engine builds and pulls images itself."""

    @abstractmethod
    async def build_image(self, context: Path, *, timeout_s: float, anew: bool) -> BuiltImage:
        """Build the Dockerfile in `context`, unless an image of the same content exists and `anew` is false.

        Raises ImageBuildError, ImageBuildTimeoutError, ImagePullError.
        """

    @abstractmethod
    async def pull_image(self, reference: str, *, timeout_s: float, anew: bool) -> BuiltImage:
        """Pull an image unless it exists. Raises ImagePullError, ImageNotFoundError."""


class KeepsWritten(ABC):
    """A provider whose sandboxes can start with what another one wrote."""

    @abstractmethod
    async def can_keep_written(self) -> bool: ...

    @abstractmethod
    async def keep_written(self, sandbox: Sandbox, target: Path) -> None:
        """End the sandbox, and move what was written in it to `target`, a new directory on the same file system.

        Raises SandboxTeardownError if processes do not end, SandboxCreateError if it cannot be moved.
        """
