"""The API of container engines: Docker's, which podman serves too. https://docs.docker.com/reference/api/engine/."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxGoneError,
    SandboxProviderError,
    SandboxRefusedError,
)

if TYPE_CHECKING:
    import aiodocker
    import aiohttp
    from aiodocker.stream import Stream as AiodockerStream

_CHUNK = 1 << 18
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0
_RUNTIME_PIDS = 12  # threads of the runtime that starts a command
_ANSWER_S = 120.0
"""Timeout of everything but builds, pulls, and commands."""


class EngineError(Exception):
    """The engine refused a request. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class EngineUnreachableError(Exception):
    """There is no engine, or the connection to it was lost."""


@dataclass(frozen=True, slots=True)
class PathStatus:
    """A path in a container. `kind` is file, directory, link or other, `link` the absolute target of a link."""

    kind: str
    size: int
    mode: int
    link: str


class Engine:
    """A connection to an engine, once it is open."""

    def __init__(self, url: str, *, globs: bool = False) -> None:
        """With `globs` the engine takes paths of archives for patterns and finds none with pattern characters."""
        self.url = url
        self.globs = globs
        self._docker: aiodocker.Docker | None = None

    async def open(self) -> None:
        """Connect. Raises SandboxRefusedError if aiodocker is missing, SandboxCreateError if no engine answers."""
        try:
            import aiodocker
            import aiohttp
        except ImportError as error:
            why = "container engines need aiodocker: pip install 'rollout-engine[docker]'"
            raise SandboxRefusedError(why, reasons=[why]) from error
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=20.0)
        self._docker = aiodocker.Docker(url=self.url, timeout=timeout)
        try:
            await self.info()
        except (EngineUnreachableError, EngineError) as error:
            await self.close()
            raise SandboxCreateError(f"the container engine at {self.url} does not answer: {error}") from error

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()
            self._docker = None

    @property
    def docker(self) -> aiodocker.Docker:
        if self._docker is None:
            raise SandboxCreateError("the provider is not open")
        return self._docker

    @contextlib.asynccontextmanager
    async def asking(self, patience_s: float | None = _ANSWER_S) -> AsyncGenerator[aiodocker.Docker]:
        """Yield the client for one request. Raises EngineError or EngineUnreachableError."""
        import aiodocker
        import aiohttp

        try:
            async with asyncio.timeout(patience_s):
                yield self.docker
        except aiodocker.DockerError as error:
            raise EngineError(int(error.status), _message(str(error.message).encode())) from error
        except (aiohttp.ClientError, ConnectionError, FileNotFoundError) as error:
            raise EngineUnreachableError(f"{self.url}: {error}") from error
        except TimeoutError as error:
            raise EngineUnreachableError(f"{self.url} gave no answer in {patience_s:g} s") from error

    async def info(self) -> dict[str, Any]:
        async with self.asking() as docker:
            system: Any = docker.system
            return dict(await system.info())

    # Containers

    async def create(self, name: str, config: Mapping[str, Any]) -> str:
        """Create a container and return its id."""
        async with self.asking() as docker:
            return (await docker.containers.create(dict(config), name=name)).id

    async def start(self, container: str) -> None:
        async with self.asking() as docker:
            await _container(docker, container).start()

    async def kill(self, container: str) -> None:
        """End the container's processes; it is no error if none run."""
        try:
            async with self.asking() as docker:
                await _container(docker, container).kill()
        except EngineError as error:
            if error.status not in (409, 500) or (await self.show(container))["State"]["Running"]:
                raise
        async with self.asking() as docker:
            await _container(docker, container).wait()

    async def show(self, container: str) -> dict[str, Any]:
        async with self.asking() as docker:
            return await _container(docker, container).show()

    async def size(self, container: str) -> int:
        """Return the number of bytes written in the container."""
        async with self.asking() as docker:
            shown = await _container(docker, container).show(size=1)
            return int(shown.get("SizeRw") or 0)

    async def remove(self, container: str) -> None:
        """Remove a container with its volumes; it is no error if it does not exist."""
        try:
            async with self.asking() as docker:
                await _container(docker, container).delete(force=True, v=True)
        except EngineError as error:
            if error.status == 409:  # it is being removed already
                await self._removed(container)
            elif error.status != 404:
                raise

    async def _removed(self, container: str) -> None:
        for _ in range(100):
            try:
                await self.show(container)
            except EngineError as error:
                if error.status == 404:
                    return
                raise
            await asyncio.sleep(0.1)
        raise EngineError(409, f"{container} is being removed, but does not go")

    async def labelled(self, label: str) -> list[tuple[str, dict[str, str]]]:
        """Return (name, labels) of all containers, running or not, with this label, given as `name=value`."""
        async with self.asking() as docker:
            filters = json.dumps({"label": [label]})
            containers: Any = docker.containers
            found = await containers.list(all=1, filters=filters)
            return [(str(c["Names"][0]).lstrip("/"), dict(c["Labels"] or {})) for c in found]

    async def is_full(self, container: str, most: int) -> bool:
        """Return whether so many of `most` processes run that the engine may be unable to start another one."""
        async with self.asking() as docker:
            found: list[dict[str, Any]] = await _container(docker, container).stats(stream=False)
        pids: dict[str, Any] = (found[0] if found else {}).get("pids_stats") or {}
        return int(pids.get("current") or 0) + _RUNTIME_PIDS >= most  # podman does not report the limit

    async def has_network(self, name: str) -> bool:
        try:
            async with self.asking() as docker:
                await (await docker.networks.get(name)).show()
                return True
        except EngineError as error:
            if error.status != 404:
                raise
            return False

    # Commands

    async def exec(
        self,
        container: str,
        argv: list[str],
        *,
        env: Mapping[str, str],
        user: str,
        stdin: bool = False,
    ) -> str:
        """Prepare a command and return its id."""
        async with self.asking() as docker:
            made = await _container(docker, container).exec(argv, stdin=stdin, environment=env, user=user, workdir="/")
            return made.id

    @contextlib.asynccontextmanager
    async def attached(self, exec_id: str) -> AsyncGenerator[AttachedStream]:
        """Start a prepared command and yield its stream. Raises EngineError if it cannot be started."""
        from aiodocker.execs import Exec

        async with self.asking() as docker:
            stream = Exec(docker, exec_id, tty=False).start(detach=False)
            await stream.__aenter__()
        try:
            yield AttachedStream(stream)
        finally:
            with contextlib.suppress(AssertionError, OSError):  # it was closed by the other end
                await stream.close()

    async def exec_state(self, exec_id: str) -> tuple[bool, int | None]:
        """Return (whether it runs, its exit code). An exec that the engine forgot has ended with an unknown code."""
        try:
            async with self.asking() as docker:
                shown = await docker.containers.exec(exec_id).inspect()
        except EngineError as error:
            if error.status != 404:
                raise
            return False, None
        return bool(shown["Running"]), shown.get("ExitCode")

    async def exit_code(self, exec_id: str) -> int | None:
        """Wait for a command's end and return its exit code; the engine does not report the end, so poll it."""
        wait = _FIRST_LOOK_S
        while True:
            runs, code = await self.exec_state(exec_id)
            if not runs:
                return code
            await asyncio.sleep(wait)
            wait = min(_LONGEST_LOOK_S, 1.5 * wait)

    async def run(self, container: str, script: str, *arguments: str, user: str = "0") -> tuple[int | None, bytes]:
        """Run a short script and return (exit code, output). Raises EngineError."""
        exec_id = await self.exec(container, ["/bin/sh", "-c", script, "sh", *arguments], env={}, user=user)
        printed = bytearray()
        async with asyncio.timeout(_ANSWER_S):
            async with self.attached(exec_id) as stream:
                while (piece := await stream.read()) is not None:
                    printed += piece[1]
            return await self.exit_code(exec_id), bytes(printed)

    # Files

    async def status(self, container: str, path: str) -> PathStatus:
        """Return the status of a path. Raises EngineError 404 if there is nothing."""
        async with self._archive("HEAD", container, path) as answer:
            header = answer.headers["X-Docker-Container-Path-Stat"]
            said = json.loads(base64.b64decode(header.replace("-", "+").replace("_", "/")))  # podman's is URL-safe
            mode = int(said["mode"])  # bits of Go's os.FileMode
            kind = "other"
            if mode & (1 << 31):
                kind = "directory"
            elif mode & (1 << 27):
                kind = "link"
            elif not mode & (1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19):
                kind = "file"
            return PathStatus(kind, int(said["size"]), mode & 0o777, str(said.get("linkTarget") or ""))

    @contextlib.asynccontextmanager
    async def get_archive(self, container: str, path: str) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Yield the tar of a file or a directory as it arrives. Its first member has the name of the requested path."""
        async with self._archive("GET", container, path) as answer:
            yield _pieces(answer)

    async def put_archive(self, container: str, path: str, data: AsyncIterator[bytes] | bytes) -> None:
        """Unpack a tar in an existing directory; nothing is replaced by something of another kind."""
        async with self._archive("PUT", container, path, data, noOverwriteDirNonDir="true"):
            pass

    @contextlib.asynccontextmanager
    async def _archive(
        self,
        method: str,
        container: str,
        path: str,
        data: AsyncIterator[bytes] | bytes | None = None,
        **parameters: str,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        # aiodocker reads whole archives into memory: large ones must be streamed.
        host = self.docker.docker_host.replace("tcp://", "http://")
        base = host if host.startswith("http") else "http://localhost"
        async with self.asking(None) as docker:
            answer = await docker.session.request(
                method,
                f"{base}/containers/{container}/archive",
                params={"path": path, **parameters},
                data=data,
                headers={"Content-Type": "application/x-tar"} if data is not None else {},
            )
            if answer.status >= 400:
                raise EngineError(answer.status, _message(await answer.read()))
        try:
            yield answer
        finally:
            answer.close()


def _container(docker: aiodocker.Docker, name: str) -> Any:
    """Return a container as Any, because aiodocker's types do not say what its methods return."""
    return docker.containers.container(name)  # pyright: ignore[reportUnknownMemberType]


class AttachedStream:
    """The output of a command, and its standard input."""

    def __init__(self, stream: AiodockerStream) -> None:
        from aiohttp import ClientError

        self._stream = stream
        self._broken = ClientError

    async def read(self) -> tuple[int, bytes] | None:
        """Return (1 for stdout or 2 for stderr, bytes), or None at the end, also that of a broken connection."""
        try:
            message = await self._stream.read_out()
        except (OSError, self._broken):
            return None
        return None if message is None else (message.stream, message.data)

    async def write(self, data: bytes) -> bool:
        """Write to standard input; return whether it is still open."""
        transport = self._transport()
        if transport is None or transport.is_closing():
            return False
        try:
            await self._stream.write_in(data)
        except (OSError, AssertionError, self._broken):
            return False
        return True

    def end_input(self) -> None:
        transport = self._transport()
        if transport is not None and not transport.is_closing():
            transport.write_eof()

    def _transport(self) -> asyncio.Transport | None:
        """Return the transport, because aiodocker can only close both directions and writes to closed streams."""
        answer = self._stream._resp  # pyright: ignore[reportPrivateUsage]
        return answer.connection.transport if answer is not None and answer.connection is not None else None


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    import aiohttp

    try:
        async for piece in answer.content.iter_chunked(_CHUNK):
            yield piece
    except aiohttp.ClientError as error:
        raise EngineUnreachableError(f"an archive broke off: {error}") from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def as_sandbox_error(name: str, error: EngineError | EngineUnreachableError) -> SandboxError:
    """Convert an error about a container that existed: it is gone, or the engine failed."""
    if isinstance(error, EngineUnreachableError) or error.status == 404:
        return SandboxGoneError(f"{name} is gone: {error}")
    return SandboxProviderError(f"{name}: the engine answered {error.status}: {error.message}")


@contextlib.contextmanager
def of_sandbox(name: str) -> Generator[None]:
    """Convert errors of the engine to errors of sandboxes."""
    try:
        yield
    except (EngineError, EngineUnreachableError) as error:
        raise as_sandbox_error(name, error) from error
