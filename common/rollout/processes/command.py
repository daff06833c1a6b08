"""Commands that run to their end for their output, and blocking handles of those that are talked to meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from rollout.processes.child import DEVNULL, PIPE, STDOUT, Child
from rollout.processes.lifeline import ask_kernel

Process: TypeAlias = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a command. `code` is its exit code, or the negative number of the signal that killed it."""

    code: int
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """Last line of its stderr, which mostly says why it failed; may be empty."""
        return (self.stderr.strip().splitlines() or [""])[-1]


def run(
    command: Sequence[str | Path],
    *,
    given: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    errors: str = "replace",
) -> Finished:
    """Run `command` to its end, with `given` on its stdin. Text is UTF-8. Blocking.

    Raises OSError if it cannot be started, TimeoutError if it was killed after `timeout_s`.
    """
    stdin: dict[str, Any] = {"stdin": DEVNULL} if given is None else {"input": given}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, timeout=timeout_s, check=False,
            capture_output=True, encoding="utf-8", errors=errors, **stdin,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error
    return Finished(done.returncode, done.stdout, done.stderr)


async def run_async(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    merged: bool = False,
    group: bool = False,
) -> Finished:
    """Run `command` in the event loop; the process is killed with the task.

    `merged` sends its stderr to its stdout. `group` also kills everything it started.
    """
    child = await Child.start(command, cwd=cwd, env=env, stdout=PIPE, stderr=STDOUT if merged else PIPE, group=group)
    try:
        streams = [child.stdout] if merged else [child.stdout, child.stderr]
        out, *err = await asyncio.gather(*(stream.read() for stream in streams))
        code = await child.wait()
    finally:
        child.kill()
        await child.wait()
    return Finished(code, out.decode("utf-8", "replace"), b"".join(err).decode("utf-8", "replace"))


def start(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] = DEVNULL,
    stdout: int | IO[bytes] = DEVNULL,
    stderr: int | IO[bytes] = DEVNULL,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    group: bool = False,
    buffered: bool = True,
    held: bool = False,
) -> Process:
    """Start a process for blocking code; `child` serves an event loop.

    `held`: on Linux the process ends with this thread, though it does not use `lifeline`.
    """
    return subprocess.Popen(
        command, bufsize=-1 if buffered else 0, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env,
        start_new_session=group, preexec_fn=ask_kernel if held and sys.platform == "linux" else None,
    )  # fmt: skip


@contextmanager
def ended(process: Process, grace_s: float = 0.0) -> Generator[Process]:
    """Kill a process that still runs at the end of the block: at once, or `grace_s` seconds after a SIGTERM."""
    with process:
        try:
            yield process
        finally:
            if process.poll() is None and grace_s:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            process.kill()


def wait(process: Process, tell: Callable[[], None], every_s: float) -> int:
    """Wait for the exit code, calling `tell` every `every_s` seconds."""
    while True:
        try:
            return process.wait(every_s)
        except subprocess.TimeoutExpired:
            tell()
