"""The interface of a test framework: it finds tests, and says how to run some of them.

A `warm` framework runs in a process of ours that stays between batches, and reports each test as it ends. Any other one
is a command per batch, whose results are read after it has ended. `discover` runs on the client, `command` and
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
    """Tests that are found together. `selected` are paths or ids named by the user; empty means all. `env` is the
    tests' environment, added to that of this process."""

    name: str
    settings: GroupSection
    framework: FrameworkSection
    selected: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Discovered:
    """`results` are those that exist already: of a file that cannot be imported, or that skips itself. `notes` are for
    the user."""

    cases: tuple[Case, ...]
    results: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command. `words` are passed without a shell; a user's template is `("/bin/sh", "-c", text)`. `limit_s` is its
    time limit, 0 for none."""

    words: tuple[str, ...]
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, with the end of its output. `code` is None if it exceeded its time limit."""

    code: int | None
    stdout: str = ""
    stderr: str = ""


class Framework(ABC):
    name: ClassVar[str]
    warm: ClassVar[bool] = False
    how_to_find: ClassVar[str] = "see [framework] and [groups] of the configuration"
    """Hint for the case that no tests are found."""

    @abstractmethod
    def group_config(self, project: Project, group: Group) -> GroupConfig:
        """Return what workers need to know of the group. Raises ConfigError if this machine lacks what it needs."""

    @abstractmethod
    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        """Return the group's tests in the order in which the framework runs them. Blocking; `tell` is called regularly
        and raises if the user interrupts. Raises ConfigError or InputError if nothing can be discovered."""

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        """Return the command that runs the batch in the project's directory; only for frameworks that are not warm. The
        command writes what `results` reads to `result_dir`, an empty directory where it runs."""
        raise NotImplementedError

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        """Return the command's results; only for frameworks that are not warm. Tests that it did not reach because of
        an earlier one are left out, and another command runs them. `result_dir` is a copy on this machine."""
        raise NotImplementedError
