"""Verification: runs the tests in the agent's sandbox, or in one of their own, and reads the rewards."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout.workloads.job.errors import VERIFIER_NOT_RUNNABLE
from rollout.workloads.job.rewards import (
    BYTES_MAX,
    REWARD_JSON,
    REWARD_TEXT,
    RewardError,
    Rewards,
    read_grade,
    read_rewards,
)
from rollout.workloads.job.task import Step

from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError, SandboxGoneError
from rollout_worker.sandboxes.port import Finished, Sandbox
from rollout_worker.trials.agents.plain import last_words, script
from rollout_worker.trials.clean import TESTS, VERIFIER_LOGS, clean
from rollout_worker.trials.faults import faults
from rollout_worker.trials.gathering import bring_logs
from rollout_worker.trials.making import LOGS, Made
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.streams import Streams
from rollout_worker.trials.told import Told

_SHOWN = 500
_GRADE = "$AGENTLAB_GRADE_PATH"
_NOT_RUN = (126, 127)
"""Exit codes of a shell for a command that is not executable, and for one that does not exist (POSIX)."""


async def verify(
    told: Told,
    step: Step,
    made: Made,
    env: Mapping[str, str],
    streams: Streams,
    remarks: list[str],
    *,
    removed: Sequence[str] | None,
    keeps_processes: bool = False,
) -> Rewards:
    """Return the rewards of `step`. Everything that the tests need is copied into the sandbox.

    `keeps_processes` lets processes in the sandbox continue afterwards. `removed` is what to remove from a sandbox in
    which an agent worked, besides what it left in the verifier's places; None means that no agent worked in it.

    Raises TrialFault with the type of the failure.
    """
    sandbox, user = made.sandbox, step.verifier.user
    used = removed is not None
    with faults("verifier_tests_copy_failed", "the tests were copied", by_agent=used):
        opened = () if made.is_root(user) else (VERIFIER_LOGS,)
        if removed is None:
            await clean(sandbox, VERIFIER_LOGS, opened=opened, is_new=True)
        else:
            await clean(sandbox, TESTS, VERIFIER_LOGS, mended=(made.workdir, *LOGS), opened=opened, removed=removed)
        for tests in step.tests:
            try:
                await sandbox.upload(told.task.directory / tests, TESTS)
            except OSError as error:
                raise TrialFault("verifier_tests_copy_failed", f"the tests cannot be read: {error}") from error

    limit = told.timeouts(step).verifier_s
    with faults("verifier_failed", "the tests ran", by_agent=True):
        finished = await sandbox.exec(
            script(f"{TESTS}/test.sh"), env=env, user=user, timeout_s=limit, on_output=streams.feed, cwd=made.workdir
        )
        if not keeps_processes:
            await sandbox.kill()  # what it left running writes no reward any more
        files = _RewardFiles(sandbox)
        remarks += await _logs(told, step, sandbox, files)
        return await _judge(told, finished, limit, files)


async def _judge(told: Told, finished: Finished, limit: float, files: _RewardFiles) -> Rewards:
    dialect, graded = told.task.dialect, told.contract is not None
    tests = "the grader" if graded else "the tests"
    last = last_words(finished, _SHOWN)
    limit_hit = f" (the sandbox's {finished.limit} limit was hit)" if finished.limit else ""
    said = limit_hit + (f": {last}" if last else "")
    if finished.how == "timed_out":
        raise TrialFault("verifier_timeout", f"{tests} had not ended after {limit:g} s{said}")
    if finished.how == "signalled":
        raise TrialFault(
            "verifier_failed", f"{tests} {'was' if graded else 'were'} ended by signal {finished.signal}{said}"
        )
    if finished.exit_code and dialect.exit_code_counts:
        raise TrialFault("verifier_failed", f"{tests} ended with exit code {finished.exit_code}{said}")
    try:
        found = await files.read()
        return read_grade(found[0]) if graded else read_rewards(*found, dialect)
    except RewardError as error:
        if graded and not error.what and finished.exit_code in _NOT_RUN:
            why = f"the command of the grader cannot be run: exit code {finished.exit_code}{said}"
            raise TrialFault(VERIFIER_NOT_RUNNABLE, why) from error
        ending = f"; {tests} ended with exit code {finished.exit_code}{said}" if finished.exit_code or graded else ""
        raise TrialFault(error.type, (_of_grade(error) if graded else error.message) + ending) from error


def _of_grade(error: RewardError) -> str:
    """Return the error in the words of an experiment."""
    return f"{_GRADE} {error.what}" if error.what else f"the grader left no {_GRADE}"


class _RewardFiles:
    """The reward files, read from the copy of the verifier's logs if it has them, else from the sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._found: tuple[bytes | None, bytes | None] | RewardError | None = None

    async def look(self, copy: Path | None) -> None:
        """Look for the files in the copy. Raises SandboxError."""
        try:
            self._found = await self._read(copy, REWARD_JSON), await self._read(copy, REWARD_TEXT)
        except RewardError as error:
            self._found = error

    async def read(self) -> tuple[bytes | None, bytes | None]:
        """Return both files, None for a missing one. Raises RewardError or SandboxError."""
        if self._found is None:  # the logs did not come
            await self.look(None)
        assert self._found is not None
        if isinstance(self._found, RewardError):
            raise self._found
        return self._found

    async def _read(self, copy: Path | None, name: str) -> bytes | None:
        if copy is None:
            return await _file(self._sandbox, name)
        path = copy / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size > BYTES_MAX:
            return await _file(self._sandbox, name)  # as a link is followed there, and what it says of others
        return path.read_bytes()


async def _file(sandbox: Sandbox, name: str) -> bytes | None:
    """Read a file. Raises RewardError if it is not a file of a usable size."""
    try:
        return await sandbox.read_file(f"{VERIFIER_LOGS}/{name}", max_bytes=BYTES_MAX)
    except SandboxFileError as error:
        reason = error.context.get("reason")
        if reason == "ENOENT":
            return None
        what = f"is larger than {BYTES_MAX >> 20} MiB" if reason == "too_large" else f"cannot be read ({reason})"
        raise RewardError("verifier_reward_invalid", f"{name} {what}", what) from error


async def _logs(told: Told, step: Step, sandbox: Sandbox, files: _RewardFiles) -> list[str]:
    """Keep the logs, and return what could not be kept. The reward does not depend on them."""
    try:
        return await bring_logs(sandbox, VERIFIER_LOGS, told.directory(step, "verifier"), told.masks, files.look)
    except SandboxGoneError:
        return [f"{VERIFIER_LOGS} was not kept: the sandbox was lost"]
    except (SandboxError, OSError) as error:
        return [f"{VERIFIER_LOGS} was not kept: {error}"]


async def forget(made: Made, user: str | None) -> None:
    """Remove tests, what they left and logs, before the agent of the next step, `user`, works.

    Raises SandboxError or TrialFault.
    """
    own = [path for path in LOGS if path != VERIFIER_LOGS]
    await clean(made.sandbox, TESTS, VERIFIER_LOGS, *own, opened=() if made.is_root(user) else own)
