"""A sandbox of this host, as its owner sees it: commands and files through its sandbox_init, limits, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rollout_worker.sandboxes import cgroups, pipes
from rollout_worker.sandboxes.claims import Claim
from rollout_worker.sandboxes.errors import SandboxError, SandboxRefusedError, SandboxTeardownError
from rollout_worker.sandboxes.keeping import SandboxInit
from rollout_worker.sandboxes.local_files import LocalFiles
from rollout_worker.sandboxes.port import Asked, Command, Made
from rollout_worker.sandboxes.proxy import Proxy
from rollout_worker.sandboxes.running import Hits, Running
from rollout_worker.sandboxes.watched import WatchedSandbox

END_S = 10.0
_KILLS = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the provider for a sandbox's commands. `may_be` says whether they can run as a user."""

    environment: Mapping[str, str]
    rlimits: Mapping[str, int]
    may_be: Callable[[str | int], bool]


class LocalSandbox(WatchedSandbox):
    """A sandbox of this host."""

    look_s = 1.0

    def __init__(
        self, made: Made, claim: Claim, setting: Setting, sandbox_init: SandboxInit, proxy: Proxy | None
    ) -> None:
        self._local_files = LocalFiles(made.name, sandbox_init)
        super().__init__(replace(made, out=made.out / "out"), self._local_files)
        self._setting = setting
        self._sandbox_init = sandbox_init
        self._proxy = proxy
        self._memory_events = cgroups.memory_events(claim.groups)
        self._strays: set[asyncio.Task[None]] = set()
        self.watch()

    @property
    def warden_pid(self) -> int:
        """The process outside the sandbox whose end ends everything in it."""
        return self._sandbox_init.pid

    @property
    def _is_lost(self) -> bool:
        return self._sandbox_init.gone.done()

    # Commands

    async def _begin(self, asked: Asked) -> Command:
        if asked.user is not None and not self._setting.may_be(asked.user):
            why = f"commands cannot run as user {asked.user} here"
            raise SandboxRefusedError(why, reasons=[why])
        body = {
            "argv": asked.words,
            "env": {**self._setting.environment, **asked.env},
            "cwd": self._absolute(asked.cwd) if asked.cwd else self.workdir,
            "user": asked.user,
            "home": "HOME" not in self.spec.env and "HOME" not in asked.env,
            "rlimits": self._setting.rlimits,
        }
        async with self._killing:  # a command started during a kill would be killed too
            pass
        return Running(self._sandbox_init, body, asked, self._hits, self._keep_draining)

    def _hits(self) -> Hits:
        """Return how often the storage and the memory limit have killed its processes."""
        return self.storage_hits, cgroups.memory_kills(self._memory_events)

    def _keep_draining(self, running: Running) -> None:
        """Keep reading what processes left behind print, so that a full or closed pipe does not stop them."""
        stray = asyncio.ensure_future(running.discard())
        self._strays.add(stray)
        stray.add_done_callback(self._strays.discard)

    async def kill(self) -> None:
        async with self._killing:  # two kills at once would kill each other
            for _ in range(_KILLS):  # the killer runs in the sandbox, where others may kill it first
                answer = await self._sandbox_init.ask("kill")
                if answer.get("exit") == 0:
                    return
                if "exit" in answer:
                    break
        raise SandboxError(f"processes in {self.name} do not end")

    async def names(self, *paths: str) -> dict[str, list[str]]:
        found = await self._local_files.names([*map(self._absolute, paths)])
        return {path: names for path, names in zip(paths, found, strict=True) if names is not None}

    # Its life

    async def listen(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                answer = self._sandbox_init.ask("listen", [theirs.fileno()])
            if (await answer).get("exit") != 0:
                raise SandboxError(f"no socket could be made in {self.name}")
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        return socket.socket(fileno=fds[0])

    async def storage_used(self) -> int:
        """Return the bytes used on disk."""
        reader, writer = pipes.pipe()
        try:
            try:
                answer = self._sandbox_init.ask("usage", [writer])
            finally:
                os.close(writer)
            said = await pipes.read_all(reader)
            await answer
        finally:
            os.close(reader)
        return int(json.loads(said)["size"]) if said else 0

    async def end(self) -> bool:
        """End every process and mount for good and return whether they ended. Files stay until it is destroyed."""
        self._stopped = True
        return await self._sandbox_init.end(END_S)

    async def _destroy(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop()
        ended = await self._sandbox_init.end(END_S)
        for stray in list(self._strays):
            stray.cancel()
        if self._strays:
            await asyncio.wait(list(self._strays))
        await super()._destroy()
        if not ended:
            raise SandboxTeardownError(f"processes of {self.name} do not end")
