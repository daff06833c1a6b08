"""pytest: tests are collected by pytest itself, in the interpreter of the project, by our runner."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar, cast

from pydantic import ValidationError

from rollout.model.errors import ConfigError
from rollout.workloads.test.cases import OUTPUT_MAX, Case, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.commands import run_here
from rollout.workloads.test.frameworks.port import Discovered, Framework, Group
from rollout.workloads.test.project import Project, find_python
from rollout.workloads.test.run_config import GroupConfig

RUNNER = Path(__file__).parent.parent / "pytest_runner.py"
"""The runner, started by path with the project's interpreter, which need not have this package."""
_FAULTS = {2: "was interrupted", 3: "failed with an internal error", 4: "refused the command line"}
_SAID_MAX = 4000
_REASONS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^ERROR: (?!usage: )(.+)",
        r"^\S.*?: error: (.+)",
        r"^E   (\S.+)",
        r"^Exit: (.+)",
        r"^INTERNALERROR> (\S+(?:Error|Exception): .+)",
    )
)


class Pytest(Framework):
    name: ClassVar[str] = "pytest"
    warm: ClassVar[bool] = True
    how_to_find: ClassVar[str] = "pytest looks for test_*.py and *_test.py, and [framework] paths says where"

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        framework = group.framework
        marks = ["-m", framework.markers] if framework.markers else []
        args = [*framework.extra_args, *marks, *group.settings.words]
        return GroupConfig(
            framework=self.name,
            python=find_python(project.root, framework),
            args=tuple(args),
            options={"run_args": shlex.split(framework.run_args or ""), "paths": _paths(group)},
        )

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        paths = group.selected or group.framework.paths or ()
        with tempfile.TemporaryDirectory(prefix="rollout-collect-") as scratch:
            out, log = Path(scratch, "cases.jsonl"), Path(scratch, "output")
            words = [*config.python, str(RUNNER), "collect", "--out", str(out), *config.args, *paths]
            code = run_here(words, project.root, group.env, log, log, lambda: tell("collecting tests"))
            said = indent(log.read_text("utf-8", "replace").strip()[-_SAID_MAX:], "    ", lambda line: True)
            found = _read(out, group.name)
            if found is None:
                why = _FAULTS.get(code, f"ended with {code}")
                reason = _reason(log.read_text("utf-8", "replace"))
                because = f": {reason}\n  before its tests were collected it printed" if reason else ""
                raise ConfigError(
                    f"group {group.name}: pytest {why}{because or ' before its tests were collected'}:\n{said}"
                )
            return found


def _reason(said: str) -> str:
    """Return the line of pytest's output that says why it ended, or "". It may stand above many warnings."""
    found = [line for pattern in _REASONS for line in pattern.findall(said)]
    return found[0].strip() if found else ""


def _paths(group: Group) -> list[str]:
    """Return the paths as given to `discover`, without tests: they tell pytest which directory ids are relative to."""
    return list(dict.fromkeys(one.partition("::")[0] for one in group.selected or group.framework.paths or ()))


def _read(out: Path, group: str) -> Discovered | None:
    """Read what was collected. Returns None if the collection did not finish."""
    cases: list[Case] = []
    results: list[CaseResult] = []
    notes: list[str] = []
    is_whole = False
    for line in _lines(out):
        if case := line.get("case"):
            cases.append(_case(case, group))
        elif error := line.get("collect_error"):
            results.append(_result(error, group, Outcome.ERROR))
        elif skip := line.get("collect_skip"):
            results.append(_result(skip, group, Outcome.SKIPPED))
        elif note := line.get("note"):
            notes.append(str(note))
        else:
            is_whole |= "collected" in line
    return Discovered(tuple(cases), tuple(results), tuple(notes)) if is_whole else None


def _lines(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the runner's file, skipping what conftest.py or a plugin wrote into it."""
    try:
        text = out.read_text("utf-8", "replace")
    except FileNotFoundError:
        return
    for line in text.split("\n"):
        try:
            value: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield cast("dict[str, Any]", value)


def _case(value: dict[str, Any], group: str) -> Case:
    try:
        return Case.model_validate({**value, "group": group, "framework": "pytest"}, strict=False)
    except ValidationError as error:
        raise ConfigError(
            f"group {group}: pytest collected a test that cannot be used, {str(value.get('id'))[:200]!r}: "
            f"{error.errors()[0]['msg']}"
        ) from error


def _result(value: dict[str, Any], group: str, outcome: Outcome) -> CaseResult:
    one = Try(
        outcome=outcome,
        phase="collect",
        started=time.time(),
        message=str(value.get("message", ""))[:OUTPUT_MAX],
        details=str(value.get("details", ""))[-OUTPUT_MAX:],
    )
    return CaseResult(id=str(value.get("id") or "(collection)"), group=group, tries=(one,))
