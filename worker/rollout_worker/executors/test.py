"""Executor of the `test` workload: passes a batch of tests to a warm process of their framework, and returns
outcomes."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ValidationError
from rollout.model.errors import AttemptError, ConfigError, InputError
from rollout.processes.command import run_async
from rollout.processes.exits import exit_text
from rollout.workloads import test
from rollout.workloads.test.batch_progress import BatchProgress
from rollout.workloads.test.cases import GOOD, Batch, BatchResult, CaseResult, Try
from rollout.workloads.test.frameworks import FRAMEWORKS
from rollout.workloads.test.run_config import GroupConfig, RunConfig

from rollout_worker.executors.port import Attempt, Context, Done, Run, UnsuitableError
from rollout_worker.executors.test_children import ELSEWHERE, ELSEWHERE_MS, Children
from rollout_worker.executors.trees import host_directory, shared_tree
from rollout_worker.sandboxes.errors import SandboxError
from rollout_worker.testing.commands import CommandHost
from rollout_worker.testing.downloads import gather
from rollout_worker.testing.host import Doing, Host
from rollout_worker.testing.place import LocalPlace, Place

if TYPE_CHECKING:
    from rollout_worker.testing.sandboxed import Sandboxes

RUNNER = Path(test.__file__).with_name("pytest_runner.py")
TELL_S = 1.0


class TestExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "slot"
    concurrency = 1
    __test__ = False

    def __init__(self) -> None:
        self._config: RunConfig | None = None
        self._local: Path | None = None
        self._sandboxes: Sandboxes | None = None
        self._lacking: UnsuitableError | None = None
        self._place: Place | None = None
        self._hosts: dict[str, Host | CommandHost] = {}

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """Return a key per run, because the project may change before the next."""
        return run.run_id

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return {}

    async def start(self, run: Run, context: Context) -> None:
        try:
            self._config = config = RunConfig.model_validate(run.config)
        except ValidationError as error:
            raise AttemptError(
                f"this is no configuration of tests: {error}", code="bad_run_config", retry=False
            ) from error
        if config.in_place:
            if not await asyncio.to_thread(Path(config.root).is_dir):
                message = f"there is no directory {config.root} on this worker"
                raise AttemptError(message, code="project_missing", retry=False)
            self._local = Path(config.root)
            return
        manifest = bytes.fromhex(config.tree)
        tree = await shared_tree(manifest, context)
        if config.provider.get("type", "local") == "local":
            self._local = await asyncio.to_thread(_copy, tree, context.scratch / "project")
            if command := config.sandbox.get("init_cmd"):
                await _initialise(str(command), self._local, config.env)
            return
        state = host_directory(await context.object_path(manifest), context, "sandboxes")
        from rollout_worker.testing.sandboxed import Sandboxes  # takes a while to import

        copies = [(await shared_tree(bytes.fromhex(one.tree), context), one.there) for one in config.copies.values()]
        self._sandboxes = Sandboxes(config, tree, state, RUNNER, copies)
        try:
            await self._sandboxes.open()
        except (ConfigError, SandboxError) as error:
            # Another worker may have what this one lacks.
            self._lacking = UnsuitableError(error.message, code=error.code, retry=error.retryable)

    async def close(self) -> None:
        await self._end_hosts()
        if self._sandboxes is not None:
            await self._sandboxes.close()

    async def _end_hosts(self) -> None:
        hosts, self._hosts = self._hosts, {}
        for group, host in hosts.items():
            if fault := await host.close():
                print(f"group {group}: fixtures of the session failed at their end: {fault}", flush=True)  # noqa: T201
        place, self._place = self._place, None
        if place is not None:
            await place.close()

    async def _the_place(self) -> Place:
        """Return the place of the tests. Raises AttemptError if there is none."""
        assert self._config is not None
        if self._place is None:
            if self._sandboxes is None:
                assert self._local is not None
                self._place = LocalPlace(RUNNER, self._local, self._config.env, alone=True)
            else:
                try:
                    self._place = await self._sandboxes.place()
                except SandboxError as error:
                    raise AttemptError(error.message, code=error.code, retry=error.retryable) from error
        return self._place

    async def run(self, attempt: Attempt, context: Context) -> Done:
        try:
            batch = Batch.parse(attempt.payload)
        except ValidationError as error:
            raise AttemptError(f"this is no batch of tests: {error}", code="bad_payload", retry=False) from error
        here, is_retry = _here(), batch.attempt > 1
        if batch.avoid == here and not is_retry:
            raise AttemptError("a duplicate is for another worker", code=ELSEWHERE, retry_after_ms=ELSEWHERE_MS)
        if batch.avoid == here and not attempt.failures:
            message = "the last try at a test is for another worker, if there is one"
            raise AttemptError(message, code=ELSEWHERE, retry_after_ms=0)
        if self._lacking is not None:
            raise self._lacking
        if is_retry and self._sandboxes is not None:  # there may be room for one only
            await self._end_hosts()
        host = self._host(batch.group, await self._the_place(), fresh=is_retry)
        children = Children(batch, attempt, context, here)
        showing = Showing(context)
        tries: dict[str, Try] = {}
        files, files_error = b"", ""
        try:
            last = is_retry or batch.ends_session
            running = host.run(batch.ids, batch.limit_s, showing.show, tries, last=last)
            if self._hedges and not batch.avoid:
                await children.hedge(running, tries)
            else:
                await running
            if not is_retry:
                files, files_error = await self._files(tries, context)
        finally:
            showing.close()
            if is_retry:
                await host.close()
            if is_retry and self._sandboxes is not None:
                await self._end_hosts()
        cases = {one: [made.model_copy(update={"worker": made.worker or here})] for one, made in tries.items()}
        await children.retry(cases, lambda one: self._again(batch, one))
        results = [CaseResult(id=one, group=batch.group, tries=tuple(made)) for one, made in cases.items()]
        failed = sum(not one.good for one in results)
        result = BatchResult(cases=tuple(results), files=files.hex(), files_error=files_error)
        return Done(result.encode(), units_in=len(results), units_out=failed, keeps=(files,) if files else ())

    async def _again(self, batch: Batch, one: str) -> Try:
        """Run a test in a fresh process."""
        if self._sandboxes is not None:
            await self._end_hosts()
        host = self._host(batch.group, await self._the_place(), fresh=True)
        tries: dict[str, Try] = {}
        try:
            await host.run((one,), batch.limit_s, lambda _: None, tries, last=True)
        finally:
            await host.close()
            if self._sandboxes is not None:
                await self._end_hosts()
        return tries[one].model_copy(update={"worker": _here()})

    async def _files(self, tries: Mapping[str, Try], context: Context) -> tuple[bytes, str]:
        """Return the object with the files that the run asks for, and why there is none."""
        config = self._config
        assert config is not None
        failed = any(one.outcome not in GOOD for one in tries.values())
        if not config.download or config.in_place or (config.download_failure_only and not failed):
            return b"", ""
        try:
            return await gather(await self._the_place(), config.download, context.put_object) or b"", ""
        except (SandboxError, OSError, InputError) as error:
            return b"", f"[report] download_globs: {error}"[:4000]

    @property
    def _hedges(self) -> bool:
        assert self._config is not None
        return self._config.hedge and not self._config.download  # files are of the worker that ran all of the batch

    def _host(self, group: str, place: Place, *, fresh: bool) -> Host | CommandHost:
        assert self._config is not None
        settings = self._config.groups.get(group)
        if settings is None:
            raise AttemptError(f"the run has no group {group}", code="bad_payload", retry=False)
        if fresh:
            return self._new_host(group, settings, place)
        if group not in self._hosts:
            self._hosts[group] = self._new_host(group, settings, place)
        return self._hosts[group]

    def _new_host(self, group: str, settings: GroupConfig, place: Place) -> Host | CommandHost:
        framework = FRAMEWORKS.get(settings.framework)
        if framework is None:
            message = f"this worker runs no tests of {settings.framework}: it is of another version"
            raise AttemptError(message, code="bad_run_config", retry=False)
        if not framework.warm:
            return CommandHost(place, framework, group, settings)
        arguments = [*settings.args, *settings.options.get("run_args", []), *settings.options.get("paths", [])]
        return Host(place, settings.python, arguments)


def _copy(tree: Path, target: Path) -> Path:
    """Copy the tree, because tests may write to it and it is shared."""
    shutil.copytree(tree, target, dirs_exist_ok=True)
    return target


async def _initialise(command: str, directory: Path, env: Mapping[str, str]) -> None:
    done = await run_async(["/bin/sh", "-c", command], cwd=directory, env={**os.environ, **env}, merged=True)
    if done.code:
        message = f"sandbox_init_cmd ended with {exit_text(done.code)}: {done.stdout.strip()[-2000:]}"
        raise AttemptError(message, code="init_failed", retry=False)


def _here() -> str:
    """Return the name of the worker that owns this process."""
    return f"{socket.gethostname()}/{os.getppid()}"


class Showing:
    """Reports about once a second which test runs, and for how long."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._task: asyncio.Task[None] | None = None
        self._doing = Doing(0)

    def show(self, doing: Doing) -> None:
        self._doing = doing
        if self._task is None:
            self._tell()
            self._task = asyncio.create_task(self._go_on())

    def _tell(self) -> None:
        now = self._doing
        seconds = time.monotonic() - now.began if now.id else 0.0
        note = str(BatchProgress(now.done, now.count, now.id, seconds))
        self._context.progress(note, done=now.done, count=now.count, test=now.id, seconds=round(seconds, 1))

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self._tell()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
