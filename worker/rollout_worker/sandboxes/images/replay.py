"""Carrying out a Dockerfile's instructions in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

from rollout_worker.sandboxes.errors import (
    ImageBuildError,
    ImageBuildTimeoutError,
    SandboxFileError,
    SandboxRefusedError,
)
from rollout_worker.sandboxes.images import context
from rollout_worker.sandboxes.images.recipe import Copy, Directory, Run, Step
from rollout_worker.sandboxes.port import Finished, Sandbox

_SHOWN = 4000


async def carry_out(steps: Sequence[Step], sandbox: Sandbox, directory: Path, timeout_s: float) -> None:
    """All steps, in `timeout_s` together. ImageBuildError, ImageBuildTimeoutError, SandboxGoneError."""
    until = time.monotonic() + timeout_s
    own = sandbox.spec.directories  # they are there from the beginning
    for step in dropwhile(lambda step: isinstance(step, Directory) and step.path in own, steps):
        left = until - time.monotonic()
        if left <= 0:
            raise _late(step.line, timeout_s)
        try:
            async with asyncio.timeout(left):
                await _one(step, sandbox, directory, left)
        except TimeoutError as error:
            raise _late(step.line, timeout_s) from error
        except SandboxFileError as error:
            raise ImageBuildError(f"Dockerfile, line {step.line}: {error.message}") from error
        except SandboxRefusedError as error:
            raise ImageBuildError(f"Dockerfile, line {step.line}: {error.message}") from error


def _late(line: int, timeout_s: float) -> ImageBuildTimeoutError:
    return ImageBuildTimeoutError(
        f"Dockerfile, line {line}: the build did not end in {timeout_s:g} s; raise build_timeout_sec of the task's "
        f"[environment]"
    )


async def _one(step: Step, sandbox: Sandbox, directory: Path, left: float) -> None:
    if isinstance(step, Run):
        who = step.user if sandbox.capabilities.users else None  # `prepare` has told of it
        done = await sandbox.exec(step.argv, env=step.env, cwd=step.cwd, user=who, timeout_s=left)
        _check(done, step.line, f"RUN {step.text}", left)
    elif isinstance(step, Directory):
        done = await sandbox.exec(["mkdir", "-p", step.path], cwd="/", user=_root(sandbox), timeout_s=left)
        _check(done, step.line, f"the directory {step.path}", left)
    else:
        await _copy(step, sandbox, directory, left)


def _root(sandbox: Sandbox) -> int | None:
    return 0 if sandbox.capabilities.users else None


def _check(done: Finished, line: int, what: str, left: float) -> None:
    if done.how == "timed_out":
        raise _late(line, left)
    if done.ok:
        return
    how = f"ended with {done.exit_code}" if done.how == "exited" else f"was ended by signal {done.signal}"
    printed = (done.stdout.text() + done.stderr.text()).strip()[-_SHOWN:]
    limit = f", at the sandbox's {done.limit} limit" if done.limit else ""
    raise ImageBuildError(
        f"Dockerfile, line {line}: {what.strip()}: {how}{limit}" + (f": {printed}" if printed else "")
    )


async def _copy(step: Copy, sandbox: Sandbox, directory: Path, left: float) -> None:
    with contextlib.ExitStack() as stack:
        staged = Path(tempfile.mkdtemp(prefix="rollout-copy-"))
        stack.callback(shutil.rmtree, staged, ignore_errors=True)
        made = await asyncio.to_thread(_stage, step, directory, staged)
        target = step.target
        if not step.into and _one_file(step, directory):
            is_there = await sandbox.exec(["test", "-d", target], cwd="/", timeout_s=left)
            name = made[0] if not step.heredocs else "file"
            if is_there.exit_code != 0:
                await sandbox.upload(staged / name, target)
                await _own(step, sandbox, [target], left)
                return
        await sandbox.upload(staged, target)
        await _own(step, sandbox, [posixpath.join(target, name) for name in made], left)


def _one_file(step: Copy, directory: Path) -> bool:
    if step.heredocs:
        return True
    source = directory / step.sources[0].lstrip("/")
    return source.is_file() and not (step.extract and context.is_archive(source))


def _stage(step: Copy, directory: Path, staged: Path) -> list[str]:
    made: list[str] = []
    for heredoc in step.heredocs:
        name = heredoc.name if step.into else "file"
        (staged / name).write_text(heredoc.text, encoding="utf-8")
        made.append(name)
    for source in step.sources:
        made += context.gather(directory, source, staged, extract=step.extract)
    staged.chmod(0o755)
    return made


async def _own(step: Copy, sandbox: Sandbox, paths: list[str], left: float) -> None:
    """--chown and --chmod."""
    for program, value in (("chown", step.owner), ("chmod", step.mode)):
        if value and paths:
            for at in range(0, len(paths), 500):
                argv = [program, "-h", value] if program == "chown" else [program, value]
                done = await sandbox.exec(
                    [*argv, "--", *paths[at : at + 500]], cwd="/", user=_root(sandbox), timeout_s=left
                )
                _check(done, step.line, f"--{program}={value}", left)
