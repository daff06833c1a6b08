"""vitest and jest, which have similar JSON reports. Tests are found by a run with a name pattern that matches none.

Both select tests by a pattern of full names: titles joined by spaces. A test of the same name in another file of a
batch runs too, and its result is dropped. An id is the file and the titles, joined by " > ".
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, cast

from rollout.model.errors import ConfigError
from rollout.workloads.test.cases import GOOD, OUTPUT_MAX, Batch, BatchResult, Case, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.commands import is_usable, listing, read_file, result_of
from rollout.workloads.test.frameworks.port import Command, Discovered, Ended, Framework, Group
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig

_NONE = "^(?!)"
_REPORT = "report.json"
_SEPARATOR = " > "
_STATUS = {"passed": Outcome.PASSED, "failed": Outcome.FAILED}
"""Other statuses (pending, skipped, todo, disabled) are those of tests that did not run."""


class JavaScript(Framework):
    default_command: ClassVar[str]

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        framework = group.framework
        if framework.test_id_format not in (None, "{classname} > {name}", "{file} > {name}"):
            raise ConfigError(
                f'framework.test_id_format: must be "{{classname}} > {{name}}" for {self.name}, or be left out'
            )
        words = shlex.split(framework.command or self.default_command)
        options: dict[str, Any] = {"command": words, "run_args": shlex.split(framework.run_args or "")}
        return GroupConfig(framework=self.name, args=tuple(group.settings.words), options=options)

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        files = sorted({one.partition(_SEPARATOR)[0] for one in group.selected}) or group.framework.paths or []
        with tempfile.TemporaryDirectory(prefix="rollout-collect-") as scratch:
            report = str(Path(scratch, _REPORT))
            words = [*config.options["command"], *self.words(report, _NONE), *config.args, *files]
            listed = listing(words, project, group, tell)
            data = read_file(Path(report))
        found = list(_read(data, str(project.root.resolve())))
        if not found and listed.code:
            raise listed.fault(f"ended with {listed.code} and no report")
        tests = {one.id: one for file in found for one in file.tests if is_usable(one.id)}
        chosen = [one for one in tests.values() if _is_selected(one.id, group.selected)]
        broken = [
            CaseResult(id=file.path, group=group.name, tries=(file.error(Outcome.ERROR, "collect"),))
            for file in found
            if not file.tests and file.failed and is_usable(file.path)
        ]
        cases = (
            Case(id=one.id, group=group.name, framework=self.name, file=one.file, line=one.line, scope=one.file)
            for one in chosen
        )
        return Discovered(tuple(cases), tuple(broken))

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        files = sorted({id.partition(_SEPARATOR)[0] for id in batch.ids})
        words = self.words(f"{result_dir}/{_REPORT}", pattern_of(batch.ids))
        run_args = config.options.get("run_args", [])
        call = (*config.options["command"], *words, *config.args, *run_args, *self.exactly(files))
        return Command(call, batch.limit_s)

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        files = {file.path: file for file in _read(read_file(result_dir / _REPORT), "")}
        found: dict[str, Sequence[Try]] = {}
        for id in batch.ids:
            path = id.partition(_SEPARATOR)[0]
            # Absolute in the report, and the project may have been elsewhere.
            file = next((file for name, file in files.items() if name == path or name.endswith(f"/{path}")), None)
            if file is not None and (made := file.result(id.removeprefix(path))) is not None:
                found[id] = [made]
        return result_of(batch, found, ended)

    @abstractmethod
    def words(self, report: str, pattern: str) -> list[str]:
        """Return the arguments of a run in one process."""

    def exactly(self, files: Sequence[str]) -> list[str]:
        """Return the arguments that select the files of a run."""
        return list(files)


class Vitest(JavaScript):
    name: ClassVar[str] = "vitest"
    default_command: ClassVar[str] = "npx vitest"

    def words(self, report: str, pattern: str) -> list[str]:
        one_process = [] if pattern == _NONE else ["--no-file-parallelism"]
        return ["run", "--reporter=json", f"--outputFile={report}", "-t", pattern, "--passWithNoTests", *one_process]


class Jest(JavaScript):
    name: ClassVar[str] = "jest"
    default_command: ClassVar[str] = "npx jest"

    def words(self, report: str, pattern: str) -> list[str]:
        one_process = [] if pattern == _NONE else ["--runInBand"]
        return ["--json", f"--outputFile={report}", "-t", pattern, "--passWithNoTests", *one_process]

    def exactly(self, files: Sequence[str]) -> list[str]:
        return ["--runTestsByPath", *files]


@dataclass(frozen=True, slots=True)
class _Test:
    file: str
    titles: str
    """The titles as in an id, each preceded by the separator."""
    line: int
    made: Try

    @property
    def id(self) -> str:
        return self.file + self.titles


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    failed: bool
    message: str
    tests: tuple[_Test, ...]

    def error(self, outcome: Outcome, phase: str) -> Try:
        message = next((line.strip() for line in self.message.splitlines() if line.strip()), "the file failed")
        return Try(outcome=outcome, phase=phase, message=message, details=self.message)

    def result(self, titles: str) -> Try | None:
        """Return the worst result of the tests with that name; a file may have several."""
        made = [one.made for one in self.tests if one.titles == titles]
        found = next((one for one in made if one.outcome not in GOOD), made[0] if made else None)
        failed_itself = self.failed and all(one.made.outcome in GOOD for one in self.tests)
        if failed_itself and (found is None or found.outcome is Outcome.SKIPPED):
            return self.error(Outcome.ERROR, "setup")  # it cannot be imported, or a hook failed
        return found


def _read(data: bytes | None, root: str) -> Iterator[_File]:
    """Yield the files of a report, or nothing if it is not one. Paths become relative to `root`, that of the
    project."""
    try:
        report: Any = json.loads(data or b"")
        for file in report["testResults"]:
            path = str(file["name"])
            if root and PurePosixPath(path).is_relative_to(root):
                path = str(PurePosixPath(path).relative_to(root))
            tests = tuple(_test(path, one) for one in file["assertionResults"])
            yield _File(path, file["status"] == "failed", str(file.get("message") or "")[:OUTPUT_MAX], tests)
    except (ValueError, KeyError, TypeError, AttributeError):
        return


def _test(path: str, one: dict[str, Any]) -> _Test:
    titles = [str(title) for title in one["ancestorTitles"]]
    titles = [*(titles[1:] if titles[:1] == [""] else titles), str(one["title"])]  # vitest 1 begins with an empty one
    said = [str(message) for message in cast("list[Any]", one.get("failureMessages") or [])]
    outcome = _STATUS.get(one["status"], Outcome.SKIPPED)
    location = cast("dict[str, Any]", one.get("location") or {})
    made = Try(
        outcome=outcome,
        seconds=max(float(one.get("duration") or 0) / 1000, 0.0),
        started=max(float(one.get("startAt") or one.get("startTime") or 0) / 1000, 0.0),
        message=(said[0].partition("\n")[0] if said and outcome is Outcome.FAILED else "")[:OUTPUT_MAX],
        details=("\n".join(said) if outcome is Outcome.FAILED else "")[:OUTPUT_MAX],
    )
    return _Test(path, "".join(_SEPARATOR + title for title in titles), int(location.get("line") or 0), made)


def _is_selected(id: str, selected: Sequence[str]) -> bool:
    return not selected or any(id == one or _SEPARATOR not in one for one in selected)


def pattern_of(ids: Sequence[str]) -> str:
    """Return a regular expression that matches the full names of exactly these tests in their files."""
    names = dict.fromkeys(id.partition(_SEPARATOR)[2] for id in ids)
    # A separator stands for a space, or for itself within a title.
    parts = ["(?: > | )".join(_escaped(part) for part in name.split(_SEPARATOR)) for name in names]
    return f"^ ?(?:{'|'.join(parts)})$"


def _escaped(text: str) -> str:
    return re.sub(r"[\\^$.*+?()\[\]{}|/]", lambda found: "\\" + found[0], text)
