"""A remote sandbox, in which its owner can only run something and read what that printed.

Commands run detached, under a supervisor inside, and are polled until they have ended; see `scripts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
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
from rollout_worker.sandboxes.port import Asked, Command, Made, Sandbox, Spec
from rollout_worker.sandboxes.reach import DroppedError, Shell
from rollout_worker.sandboxes.remote_command import Detached
from rollout_worker.sandboxes.remote_files import RemoteFiles


@dataclass(frozen=True, slots=True)
class Entered:
    """A new sandbox after its preparation.

    `base` is a directory in it for supervisors and files in transit. `old` lists, with spaces, the pids that existed
    from the start and stay when all others are killed.
    """

    home: str
    base: str
    old: str


async def enter(shell: Shell, spec: Spec, *, home_is_here: bool) -> Entered:
    """Prepare a new sandbox.

    `home_is_here` makes the directory where commands start the home, if it is writable and not /; else it is $HOME.
    Raises SandboxCreateError if a directory cannot be made.
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
    return Entered(*said.split("\n"))


_END_S = 2.0

KillHow = Literal["all", "new", "marked"]
"""Which processes a kill ends: all of the pid namespace but the first, which is ours; all but those that existed from
the start; or those that carry the sandbox's mark and their descendants."""


class RemoteSandbox(Sandbox):
    """A remote sandbox. `keep_env` says whether commands inherit what its image set."""

    def __init__(self, made: Made, shell: Shell, entered: Entered, *, kill: KillHow, keep_env: bool) -> None:
        self._remote_files = RemoteFiles(shell, entered.base)
        super().__init__(made, self._remote_files)
        self._shell = shell
        self._base = entered.base
        self._old = entered.old
        self._kill = kill
        self._keep_env = keep_env
        self._mark = f"{MARK}={made.name};"
        """Mark in the environment of every process that a command starts."""
        self._litter: set[asyncio.Task[None]] = set()

    @property
    def shell(self) -> Shell:
        return self._shell

    @property
    def out(self) -> Path:
        """The sandbox's directory on this host."""
        return self._made.out

    # Commands

    async def _begin(self, asked: Asked) -> Command:
        directory = f"{self._base}/{secrets.token_hex(6)}"
        detached = Detached(self._shell, directory, asked, partial(self._clear_later, directory))
        try:
            user = "" if asked.user is None else str(asked.user)
            await detached.start(self._remote_files, self._text(asked), user, self._mark)
        except SandboxFileError as error:
            await detached.close()
            if error.context["reason"] != "ENOUSER":
                raise
            why = f"commands cannot run as user {asked.user} in {self.name}"
            raise SandboxRefusedError(why, reasons=[why]) from None
        except SandboxGoneError:
            raise
        except BaseException:  # it may have started
            await self._kill_left()
            await detached.close()
            raise
        return detached

    def _text(self, asked: Asked) -> str:
        env = {**self.spec.env, **asked.env}
        if any("\0" in word for word in (*asked.words, *env, *env.values(), asked.cwd or "")):
            raise ValueError("a command, its environment and its directory hold no NUL")
        where = self._absolute(asked.cwd) if asked.cwd else self.workdir
        return scripts.command_text(asked.words, env, where, self.home, self._mark, keep_env=self._keep_env)

    def _clear_later(self, directory: str) -> None:
        """Remove a directory in the background, because it costs a call."""

        async def clear() -> None:
            with contextlib.suppress(SandboxError):
                await self._shell.run(scripts.remove([directory]))

        task = asyncio.ensure_future(clear())
        self._litter.add(task)
        task.add_done_callback(self._litter.discard)

    def _end_all(self, *, verify: bool) -> str:
        """Return a script that kills. With `verify` it only reports what is left."""
        if self._kill == "marked":
            return scripts.kill_marked(self._mark)
        old, ours = ("", "1") if self._kill == "all" else (self._old, "")
        return f"verify={verify:d} old='{old}' ours={ours}\n{scripts.KILL_ALL}"

    async def kill(self) -> None:
        left = b""
        for _ in range(1 if self._kill == "marked" else 10):
            if self._kill != "marked":
                with contextlib.suppress(DroppedError):  # the process that waits for the call inside is killed too
                    await self._shell.once(self._end_all(verify=False))
            answer = await self._shell.run(self._end_all(verify=True))
            if answer.code == 0:
                return
            left = answer.out
        raise SandboxError(f"processes in {self.name} do not end: {left.decode().strip()}")

    # Its life

    async def _destroy(self) -> None:
        self._shell.close(SandboxGoneError(f"{self.name} was destroyed"))
        if self._litter:
            await asyncio.wait(list(self._litter))
        await super()._destroy()


class UncontainedSandbox(RemoteSandbox):
    """A sandbox whose processes may outlive its removal, so they are killed first."""

    async def _destroy(self) -> None:
        self._shell.close(SandboxGoneError(f"{self.name} was destroyed"))
        last = Shell(self.name, self._shell.reach)
        with contextlib.suppress(SandboxError, DroppedError, TimeoutError):
            script = f"rm -rf {quote(self._base)}\n{self._end_all(verify=False)}"
            await asyncio.wait_for(last.once(script), _END_S)
        await super()._destroy()
