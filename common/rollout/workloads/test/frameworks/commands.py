"""Shared parts of frameworks that run one command per batch."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from rollout.model.errors import ConfigError, InputError
from rollout.processes.command import ended, start, wait
from rollout.workloads.test.cases import ID_MAX, OUTPUT_MAX, Batch, BatchResult, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.port import Ended, Group
from rollout.workloads.test.project import Project

_POLL_S = 0.1
_END_S = 1.0
_SAID_MAX = 4000


def run_here(
    words: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    tell: Callable[[], None],
) -> int:
    """Run a command on this machine and return its exit code; it is ended if `tell` raises. Raises ConfigError if it
    cannot start."""
    with stdout.open("ab") as out, stderr.open("ab") as err:
        try:
            process = start(words, cwd=cwd, env={**os.environ, **env}, stdout=out, stderr=err)
        except OSError as error:
            raise ConfigError(f"{words[0]} cannot be run: {error.strerror or error}") from error
    with ended(process, _END_S):
        return wait(process, tell, _POLL_S)


@dataclass(frozen=True, slots=True)
class Listed:
    """The output of a command that lists tests."""

    group: Group
    words: Sequence[str]
    code: int
    stdout: str
    stderr: str

    def fault(self, why: str) -> InputError:
        said = indent((self.stderr.strip() or self.stdout.strip())[-_SAID_MAX:], "    ", lambda line: True)
        command = shlex.join(self.words)
        return InputError(f"group {self.group.name}: {command}: {why}" + (f":\n{said}" if said.strip() else ""))


def listing(
    words: Sequence[str], project: Project, group: Group, tell: Callable[[str], None], directory: str | None = None
) -> Listed:
    """Run a command that lists tests, in the directory of the project or in one below it."""
    with tempfile.TemporaryDirectory(prefix="rollout-collect-") as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        code = run_here(
            words, project.root / (directory or ""), group.env, out, err, lambda: tell("collecting tests")
        )  # fmt: skip
        return Listed(group, words, code, out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace"))


def is_usable(id: str) -> bool:
    return 0 < len(id) <= ID_MAX and id.isprintable() and id == id.strip()


def result_of(batch: Batch, found: Mapping[str, Sequence[Try]], ended: Ended, fault: str = "") -> BatchResult:
    """Return the results of those tests of the batch that ran. If none ran and the command ended by itself, all tests
    have an error. `fault` is that of the results file."""
    tries = {id: tuple(found[id]) for id in batch.ids if found.get(id)}
    if not tries and ended.code is not None:
        why = Try(
            outcome=Outcome.ERROR,
            message=fault or f"the test command ended with {ended.code} and no result",
            stdout=ended.stdout[-OUTPUT_MAX:],
            stderr=ended.stderr[-OUTPUT_MAX:],
        )
        tries = dict.fromkeys(batch.ids, (why,))
    return BatchResult(cases=tuple(CaseResult(id=id, group=batch.group, tries=made) for id, made in tries.items()))


def read_file(path: Path, most: int = 256 << 20) -> bytes | None:
    """Read a file that a test command wrote. Returns None if it is missing or unreadable."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > most:
            return None
        return path.read_bytes()
    except OSError:
        return None
