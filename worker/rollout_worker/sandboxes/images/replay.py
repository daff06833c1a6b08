"""Execution of a Dockerfile's instructions in a sandbox."""

from __future__ import annotations

import asyncio
import posixpath
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from types import MappingProxyType

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
_PATHS = 500  # per command
_NONE: Mapping[str, str] = MappingProxyType({})


async def carry_out(
    steps: Sequence[Step], sandbox: Sandbox, directory: Path, timeout_s: float, *, build_s: float | None = None
) -> None:
    """Carry out all steps within `timeout_s`. `build_s` is the timeout of the whole build, of which that is left.

    Raises ImageBuildError, ImageBuildTimeoutError or SandboxGoneError.
    """
    until = time.monotonic() + timeout_s
    own = sandbox.spec.directories  # they exist from the start
    replay = _Replay(sandbox, directory, until)
    for step in dropwhile(lambda step: isinstance(step, Directory) and step.path in own, steps):
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await replay.do(step)
        except TimeoutError as error:
            raise ImageBuildTimeoutError(
                f"Dockerfile, line {step.line}: the build did not end in {build_s or timeout_s:g} s; raise "
                "build_timeout_sec of the task's [environment]"
            ) from error
        except (ImageBuildError, SandboxFileError, SandboxRefusedError) as error:
            raise ImageBuildError(f"Dockerfile, line {step.line}: {error.message}") from error


@dataclass(frozen=True, slots=True)
class _Replay:
    sandbox: Sandbox
    directory: Path
    until: float

    async def do(self, step: Step) -> None:
        if isinstance(step, Run):
            await self._run(f"RUN {step.text.strip()}", step.argv, step.user, step.env, step.cwd)
        elif isinstance(step, Directory):
            await self._run(f"the directory {step.path}", ["mkdir", "-p", step.path])
        else:
            await self._copy(step)

    async def _run(
        self, what: str, argv: Sequence[str], user: str | int | None = 0, env: Mapping[str, str] = _NONE, cwd: str = "/"
    ) -> None:
        done = await self._exec(argv, user, env, cwd)
        if done.how == "timed_out":
            raise TimeoutError
        if done.ok:
            return
        how = f"ended with {done.exit_code}" if done.how == "exited" else f"was ended by signal {done.signal}"
        printed = (done.stdout.text() + done.stderr.text()).strip()[-_SHOWN:]
        limit = f", at the sandbox's {done.limit} limit" if done.limit else ""
        raise ImageBuildError(f"{what}: {how}{limit}" + (f": {printed}" if printed else ""))

    async def _exec(
        self, argv: Sequence[str], user: str | int | None = None, env: Mapping[str, str] = _NONE, cwd: str = "/"
    ) -> Finished:
        who = user if self.sandbox.capabilities.users else None  # `prepare` made a remark about it
        left = max(0.01, self.until - time.monotonic())
        return await self.sandbox.exec(argv, env=env, cwd=cwd, user=who, timeout_s=left)

    async def _copy(self, step: Copy) -> None:
        with tempfile.TemporaryDirectory(prefix="rollout-copy-", ignore_cleanup_errors=True) as name:
            staged, target = Path(name), step.target
            made = await asyncio.to_thread(self._stage, step, staged)
            is_file = not step.into and self._is_file(step)
            if is_file and (await self._exec(["test", "-d", target])).exit_code != 0:
                await self.sandbox.upload(staged / made[0], target)
                paths = [target]
            else:
                await self.sandbox.upload(staged, target)
                paths = [posixpath.join(target, name) for name in made]
        for program, value in (("chown", step.owner), ("chmod", step.mode)):
            options = ["-h"] if program == "chown" else []
            for at in range(0, len(paths) if value else 0, _PATHS):
                argv = [program, *options, str(value), "--", *paths[at : at + _PATHS]]
                await self._run(f"--{program}={value}", argv)

    def _is_file(self, step: Copy) -> bool:
        if step.heredocs:
            return True
        source = self.directory / step.sources[0].lstrip("/")
        return source.is_file() and not (step.extract and context.is_archive(source))

    def _stage(self, step: Copy, staged: Path) -> list[str]:
        made: list[str] = []
        for heredoc in step.heredocs:
            made.append(heredoc.name if step.into else "file")
            (staged / made[-1]).write_text(heredoc.text, encoding="utf-8")
        for source in step.sources:
            made += context.gather(self.directory, source, staged, extract=step.extract)
        staged.chmod(0o755)
        return made
