"""What a test framework is to this workload: it finds tests, and says how some of them are run.

A `warm` framework runs in a process of ours that stays between batches, and tells of each test as it ends. Another one
is a command for each batch, whose results are read when it has ended. `discover` runs on the client; `command` and
`results` on a worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rollout.workloads.test.cases import Batch, BatchResult, Case, CaseResult
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig

if TYPE_CHECKING:  # as in project.py
    from rollout.workloads.test.config import FrameworkSection, GroupSection


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that are found together. `selected`: paths or ids that a person named; empty: all. `env`: of the tests,
    beside the environment of this process."""

    name: str
    settings: GroupSection
    framework: FrameworkSection
    selected: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Discovered:
    """`results`: of what came to one already: a file that cannot be imported, or that skips itself. `notes`: for the
    person."""

    cases: tuple[Case, ...]
    results: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """`words` are not given to a shell; a template of a person's is `("/bin/sh", "-c", text)`. `limit_s`: then it is
    ended; 0: never."""

    words: tuple[str, ...]
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and the ends of what it printed. `code`: None: it was ended at its time limit."""

    code: int | None
    stdout: str = ""
    stderr: str = ""


class Framework(ABC):
    name: ClassVar[str]
    warm: ClassVar[bool] = False
    how_to_find: ClassVar[str] = "see [framework] and [groups] of the configuration"
    """Where no tests were found: what to look at."""

    @abstractmethod
    def group_config(self, project: Project, group: Group) -> GroupConfig:
        """What workers need to know of the group. ConfigError: what it needs is not on this machine."""

    @abstractmethod
    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        """The tests of the group, in the order in which the framework runs them. Blocking; `tell` is called now and
        then, and raises when the person has asked to stop. ConfigError, InputError: nothing can be discovered."""

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        """What runs the batch, in the directory of the project. `result_dir`: an empty directory, where the command
        runs, for what `results` reads. Of a framework that is not warm."""
        raise NotImplementedError

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        """What that command came to. Tests that it did not come to, because of one before, are left out: they are run
        by another command. `result_dir`: a copy of it, on this machine. Of a framework that is not warm."""
        raise NotImplementedError
