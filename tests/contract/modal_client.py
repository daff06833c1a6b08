"""As much of Modal's Python client as sandboxes need, over processes of this machine. Calls are checked against the
signatures of the real client where it is installed. As there, an exec that runs out of time ends with -1."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kubernetes_server import enter_box, start_box

try:
    from modal.app import _App as RealApp
    from modal.sandbox._sandbox import _Sandbox as Real
except ImportError:
    Real = RealApp = None  # type: ignore[assignment,misc]


class Error(Exception): ...


ERRORS = [
    "AuthError",
    "InvalidError",
    "PermissionDeniedError",
    "NotFoundError",
    "RemoteError",
    "ImageBuildError",
    "ResourceExhaustedError",
    "SandboxTerminatedError",
    "SandboxTimeoutError",
    "ConnectionError",
]
exception = SimpleNamespace(Error=Error, **{name: type(name, (Error,), {}) for name in ERRORS})


class Call:
    """`function.aio(...)`, bound against the real client's signature."""

    def __init__(self, real: Any, work: Callable[..., Any], *, method: bool = False) -> None:
        self._real, self._work, self._method = real, work, method

    def aio(self, *args: Any, **kwargs: Any) -> Any:
        if self._real is not None:
            inspect.signature(self._real).bind(*([None] if self._method else []), *args, **kwargs)
        return self._work(*args, **kwargs)


class FakeModal:
    """`fault`: what the next sandbox's making raises. `drop`: execs to come whose output breaks off."""

    exception = exception

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="modal-"))
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.made: list[dict[str, Any]] = []
        self.fault: Error | None = None
        self.drop = 0
        self.App = SimpleNamespace(lookup=Call(RealApp and RealApp.lookup, self._lookup))
        self.Image = SimpleNamespace(from_registry=lambda tag, secret: SimpleNamespace(entrypoint=lambda words: tag))
        self.Secret = SimpleNamespace(from_name=lambda name: name)
        self.Sandbox = SimpleNamespace(
            create=Call(Real and Real.create, self._create),
            from_name=Call(Real and Real.from_name, self._from_name),
            list=Call(Real and Real.list, self._list),
        )

    def close(self) -> None:
        for sandbox in self.sandboxes.values():
            sandbox.end(0)
        shutil.rmtree(self._directory)

    async def _lookup(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(app_id=f"ap-{name}")

    async def _create(self, *command: str, **options: Any) -> FakeSandbox:
        assert command[:2] == ("/bin/sh", "-c") and options["name"] not in self.sandboxes
        self.made.append(options)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        sandbox = self.sandboxes[options["name"]] = FakeSandbox(self, options, self._directory / options["name"])
        return sandbox

    async def _from_name(self, app: str, name: str, **_: Any) -> FakeSandbox:
        found = self.sandboxes.get(name)
        if found is None or found.code is not None:
            raise exception.NotFoundError(name)
        return found

    async def _list(self, *, app_id: str, tags: dict[str, str]) -> AsyncIterator[FakeSandbox]:
        for sandbox in list(self.sandboxes.values()):
            if sandbox.code is None and tags.items() <= sandbox.tags.items():
                yield sandbox


class FakeSandbox:
    def __init__(self, modal: FakeModal, options: dict[str, Any], place: Path) -> None:
        place.mkdir()
        self._modal = modal
        self.tags: dict[str, str] = options["tags"]
        self.code: int | None = None
        self._pid = start_box(place, closed=options.get("block_network", False))
        self.exec = Call(Real and Real.exec, self._exec, method=True)
        self.terminate = Call(Real and Real.terminate, self._terminate, method=True)
        self.poll = Call(Real and Real.poll, self._poll, method=True)
        self.get_tags = Call(Real and Real.get_tags, self._get_tags, method=True)
        self.filesystem = SimpleNamespace(copy_to_local=Call(None, self._copy))

    def end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def _exec(self, *command: str, text: bool, timeout: int) -> Any:
        assert not text and sum(map(len, command)) <= 1 << 16
        if self.code is not None:
            raise exception.SandboxTerminatedError
        pipe = asyncio.subprocess.PIPE
        words = enter_box(self._pid, {"PATH": "/usr/bin:/bin", "HOME": "/root", "FROM_IMAGE": "yes"})
        starting = asyncio.create_subprocess_exec(
            *words, *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        process = await asyncio.shield(asyncio.ensure_future(starting))  # cancelled halfway, it would hang
        assert process.stdin is not None and process.stdout is not None
        drop = self._modal.drop > 0
        self._modal.drop -= drop
        return SimpleNamespace(
            stdin=SimpleNamespace(write=process.stdin.write, drain=SimpleNamespace(aio=_quiet(process.stdin.drain))),
            stdout=_pieces(process, drop),
            returncode=-1,
        )

    async def _terminate(self, *, wait: bool = False) -> None:
        self.end(137)

    async def _poll(self) -> int | None:
        return self.code

    async def _get_tags(self) -> dict[str, str]:
        return self.tags

    async def _copy(self, path: str, target: str) -> None:
        await asyncio.to_thread(shutil.copyfile, f"/proc/{self._pid}/root{path}", target)


async def _pieces(process: asyncio.subprocess.Process, drop: bool) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        if drop:
            yield data[: len(data) // 2]
            raise exception.ConnectionError("the stream was reset")
        yield data
    await process.wait()


def _quiet(drain: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def drained() -> None:
        with contextlib.suppress(ConnectionError):
            await drain()

    return drained
