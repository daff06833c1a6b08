"""A sandbox elsewhere, of which its owner can do no more than run something there and read what that printed.

Commands run detached, under a supervisor inside, and are looked at until they have ended; see `scripts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Literal

from rollout_worker.sandboxes import scripts
from rollout_worker.sandboxes.claims import MARK
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxRefusedError,
)
from rollout_worker.sandboxes.port import MIB, Asked, Capabilities, Command, Sandbox, Spec, Transfer
from rollout_worker.sandboxes.reach import DroppedError, Shell
from rollout_worker.sandboxes.remote_command import Detached
from rollout_worker.sandboxes.remote_files import Files
from rollout_worker.sandboxes.trees import Selection


async def enter(shell: Shell, spec: Spec, *, home_is_here: bool) -> tuple[str, str, str]:
    """Make a new sandbox ready: its home, the directory for supervisors, and what runs in it from the beginning.

    `home_is_here`: the home is where commands start, if that can be written and is not /; else $HOME.
    SandboxCreateError: one of the directories cannot be made.
    """
    here = 'h=$PWD; if [ "$h" = / ] || ! [ -w "$h" ]; then h=${HOME:-/root}; fi' if home_is_here else "h=${HOME:-/root}"
    made = " ".join(map(quote, spec.directories))
    script = f"""
b="${{TMPDIR:-/tmp}}/.{shell.name}"
mkdir -p "$b" && chmod 711 "$b" || exit 3
{here}
mkdir -p "$h" && [ -w "$h" ] || {{ printf %s "$h"; exit 4; }}
for d in {made}; do
  mkdir -p "$d" 2> /dev/null && [ -w "$d" ] || {{ printf %s "$d"; exit 4; }}
  case $d in /tmp|/var/tmp) chmod 1777 "$d";; esac
done
{scripts.LIST}
printf '%s\n%s\n%s' "$h" "$b" "$left"
"""
    answer = await shell.run(script)
    said = answer.out.decode(errors="surrogateescape")
    if answer.code != 0:
        where = said or "its directory for files of ours"
        raise SandboxCreateError(f"in {shell.name} {where} cannot be made or written")
    home, base, old = said.split("\n")
    return home, base, old


KillHow = Literal["all", "marked"]
"""What ends a sandbox's processes: all of its pid namespace, or those that carry its mark and their descendants."""


@dataclass(frozen=True, slots=True)
class Remote:
    """What its provider knows of a sandbox.

    `base`: a directory in it for supervisors and files on their way. `out`: a directory here for long output.
    `old`: processes that were there from the beginning, and stay when all others are killed; numbers, with spaces.
    None: there is but the first, which is ours.
    `keep_env`: commands find what the sandbox's image set. `usd_per_hour`: its price.
    """

    home: str
    base: str
    out: Path
    kill: KillHow
    old: str | None
    keep_env: bool
    usd_per_hour: float
    remove: Callable[[], Awaitable[None]]


class RemoteSandbox(Sandbox):
    def __init__(self, name: str, spec: Spec, capabilities: Capabilities, shell: Shell, remote: Remote) -> None:
        self.name = name
        self.spec = spec
        self.capabilities = capabilities
        self.home = remote.home
        self._shell = shell
        self._remote = remote
        self._files = Files(shell, remote.base)
        self._mark = f"{MARK}={name};"
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._stopped = False
        self._litter: set[asyncio.Task[None]] = set()
        self._destroyed: asyncio.Task[None] | None = None

    @property
    def shell(self) -> Shell:
        return self._shell

    @property
    def mark(self) -> str:
        """In the environment of every process that a command starts."""
        return self._mark

    @property
    def out(self) -> Path:
        """Its directory on this host."""
        return self._remote.out

    # Commands

    @property
    def _outputs(self) -> Path:
        return self._remote.out

    def _check_usable(self) -> None:
        if self._stopped:
            raise SandboxGoneError(f"{self.name} was stopped")

    async def _begin(self, asked: Asked) -> Command:
        directory = f"{self._remote.base}/{secrets.token_hex(6)}"
        detached = Detached(self._shell, directory, asked, partial(self._clear_later, directory))
        try:
            user = "" if asked.user is None else str(asked.user)
            await detached.start(self._files, self._text(asked), user, self._mark)
        except SandboxFileError as error:
            await detached.close()
            if error.context["reason"] != "ENOUSER":
                raise
            why = f"commands cannot run as user {asked.user} in {self.name}"
            raise SandboxRefusedError(why, reasons=[why]) from None
        except SandboxGoneError:
            raise
        except BaseException:  # it may have begun
            await self._kill_left()
            await detached.close()
            raise
        return detached

    def _text(self, asked: Asked) -> str:
        env = {**self.spec.env, **asked.env}
        if any("\0" in word for word in (*asked.words, *env, *env.values(), asked.cwd or "")):
            raise ValueError("a command, its environment and its directory hold no NUL")
        where = self._absolute(asked.cwd) if asked.cwd else self.workdir
        return scripts.command_text(asked.words, env, where, self.home, self._mark, keep_env=self._remote.keep_env)

    def _clear_later(self, directory: str) -> None:
        """Nobody waits for it: it costs a call."""

        async def clear() -> None:
            with contextlib.suppress(SandboxError):
                await self._shell.run(scripts.remove([directory]))

        task = asyncio.ensure_future(clear())
        self._litter.add(task)
        task.add_done_callback(self._litter.discard)

    async def kill(self) -> None:
        if self._remote.kill == "marked":
            answer = await self._shell.run(scripts.kill_marked(self._mark))
            if answer.code == 0:
                return
            raise SandboxError(f"processes in {self.name} do not end: {answer.out.decode().strip()}")
        left = b""
        old = self._remote.old
        script = f"old='{old or ''}' ours={'1' if old is None else ''}\n{scripts.KILL_ALL}"
        for _ in range(10):
            with contextlib.suppress(DroppedError):  # whoever waits for the call inside is killed too
                await self._shell.once(f"verify=0\n{script}")
            answer = await self._shell.run(f"verify=1\n{script}")
            left = answer.out
            if answer.code == 0:
                return
        raise SandboxError(f"processes in {self.name} do not end: {left.decode().strip()}")

    async def stop(self) -> None:
        self._stopped = True
        await self.kill()

    # Files

    def _absolute(self, path: str) -> str:
        if "\0" in path or not path:
            raise SandboxFileError(f"{path!r} is no path", reason="EINVAL")
        if path.startswith("/"):
            return path
        return os.path.normpath(f"{self.workdir}/{path}")

    async def read_file(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        return await self._files.read(self._absolute(path), max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._files.write(self._absolute(path), data, mode)

    async def upload(self, source: Path, target: str) -> Transfer:
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
        return await self._files.download(self._absolute(source), target, max_bytes, max_entries, selection)

    # Its life

    async def destroy(self) -> None:
        failed = self._destroyed is not None and self._destroyed.done() and self._destroyed.exception() is not None
        if self._destroyed is None or failed:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        self._ended = self._ended or time.monotonic()
        self._stopped = True
        self._shell.close(SandboxGoneError(f"{self.name} was destroyed"))
        if self._litter:
            await asyncio.wait(list(self._litter))
        await self._remote.remove()

    def cost(self) -> float:
        return ((self._ended or time.monotonic()) - self._begun) / 3600 * self._remote.usd_per_hour
