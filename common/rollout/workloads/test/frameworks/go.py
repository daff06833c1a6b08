"""go test: tests are listed and run package by package; results are the events of `-json`.

Subtests are known only after they have run; they belong to their test.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.workloads.test.cases import OUTPUT_MAX, Batch, BatchResult, Case, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.commands import listing, read_file, result_of
from rollout.workloads.test.frameworks.port import Command, Discovered, Ended, Framework, Group
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig

_TEST = re.compile(r"(Test|Fuzz|Example)\w*")
_SCRIPT = """code=0 out=$1; shift
while [ $# -gt 0 ]; do
  CALL -run "$2" "$1" >> "$out" || code=$?
  shift 2
done
exit $code"""
_EVENTS = "events.jsonl"
_ENDS = {"pass": Outcome.PASSED, "fail": Outcome.FAILED, "skip": Outcome.SKIPPED}
_TIMED_OUT = "panic: test timed out after "


class Go(Framework):
    name: ClassVar[str] = "go"

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        framework = group.framework
        options: dict[str, Any] = {
            "command": shlex.split(framework.command or "go test"),
            "run_args": shlex.split(framework.run_args or ""),
            "paths": framework.paths or ["./..."],
        }
        return GroupConfig(framework=self.name, args=tuple(group.settings.words), options=options)

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        packages = [one for one in group.selected if "/" in one or one == "."] or config.options["paths"]
        words = [*config.options["command"], "-json", "-list", ".", *config.args, *packages]
        listed = listing(words, project, group, tell)
        packages = _read(listed.stdout, listed.stderr)
        if not packages and listed.code:
            raise listed.fault(f"ended with {listed.code} and no list of tests")
        ids = [
            f"{name} {test}"
            for name, package in packages.items()
            for test in package.said.split("\n")
            if _TEST.fullmatch(test)
        ]
        wanted = [one for one in group.selected if "/" not in one and one != "."]
        broken = [
            CaseResult(
                id=name, group=group.name, tries=(Try(outcome=Outcome.ERROR, phase="collect", message=package.built),)
            )
            for name, package in packages.items()
            if package.built
        ]
        cases = (
            Case(id=id, group=group.name, framework=self.name)
            for id in ids
            if not wanted or id in wanted or id.partition(" ")[2] in wanted
        )
        return Discovered(tuple(cases), tuple(broken))

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        pairs = sorted(id.partition(" ")[::2] for id in batch.ids)
        limit = f"{max(round(batch.limit_s), 1)}s" if batch.limit_s else "0"  # of the tests of a package together
        words = [*config.options["command"], "-json", "-count=1", f"-timeout={limit}"]
        words += [*config.args, *config.options.get("run_args", [])]
        selected = list[str]()
        for package, of_package in groupby(pairs, key=lambda pair: pair[0]):
            selected += [package, f"^({'|'.join(name for _, name in of_package)})$"]
        script = _SCRIPT.replace("CALL", shlex.join(words))
        words = ("/bin/sh", "-c", script, "sh", f"{result_dir}/{_EVENTS}", *selected)
        return Command(words, batch.limit_s * len(selected) / 2)

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        data = read_file(result_dir / _EVENTS) or b""
        packages = _read(data.decode("utf-8", "replace"), ended.stderr)
        found: dict[str, Sequence[Try]] = {}
        for id in batch.ids:
            name, _, test = id.partition(" ")
            package = packages.get(name)
            if package is None:
                continue
            if package.built:
                found[id] = [Try(outcome=Outcome.ERROR, phase="setup", message=package.built, details=package.said)]
            elif test in package.tests:
                found[id] = [package.tests[test].made()]
            elif not package.died:
                found[id] = [Try(outcome=Outcome.ERROR, message=f"the package {name} has no test {test} any more")]
        return result_of(batch, found, ended)


@dataclass(slots=True)
class _Test:
    outcome: Outcome | None = None
    seconds: float = 0.0
    started: float = 0.0
    seen: float = 0.0
    """Time of its last event."""
    said: list[str] = field(default_factory=list[str])

    def made(self) -> Try:
        said = "".join(self.said)
        outcome = self.outcome
        if _TIMED_OUT in said:
            outcome = Outcome.TIMEOUT
        elif outcome is None or (outcome is Outcome.FAILED and "\npanic: " in f"\n{said}"):
            outcome = Outcome.CRASHED
        return Try(
            outcome=outcome,
            seconds=self.seconds if self.seconds or not self.started else max(self.seen - self.started, 0.0),
            started=self.started,
            message="" if outcome is Outcome.PASSED else _first_line(said, outcome)[:OUTPUT_MAX],
            details="" if outcome in (Outcome.PASSED, Outcome.SKIPPED) else said[-OUTPUT_MAX:],
            stdout=said[-OUTPUT_MAX:],
        )


@dataclass(slots=True)
class _Package:
    tests: dict[str, _Test] = field(default_factory=dict[str, _Test])
    said: str = ""
    built: str = ""
    """Why it could not be built or set up; empty if it could."""

    @property
    def died(self) -> bool:
        """Whether its process ended before its tests did."""
        return any(one.made().outcome in (Outcome.CRASHED, Outcome.TIMEOUT) for one in self.tests.values())


def _first_line(said: str, outcome: Outcome) -> str:
    lines = [line.strip() for line in said.splitlines()]
    told = [line for line in lines if line and not line.startswith(("=== ", "--- "))]
    if outcome is Outcome.FAILED:
        return next((line for line in reversed(told) if "_test.go:" in line), told[0] if told else "failed")
    if outcome in (Outcome.CRASHED, Outcome.TIMEOUT):
        return next((line for line in told if line.startswith("panic: ")), "the process ended while the test ran")
    return told[-1] if told else ""


def _read(stdout: str, stderr: str) -> dict[str, _Package]:
    packages: dict[str, _Package] = {}
    builds: dict[str, list[str]] = {}
    for line in stdout.split("\n"):
        event = _event(line)
        if event is None:
            if broken := re.fullmatch(r"FAIL\t(\S+) \[(build|setup) failed\]", line):  # as before go 1.22
                packages.setdefault(broken[1], _Package()).built = f"{broken[2]} failed"
            continue
        name, action = str(event.get("Package") or ""), event.get("Action")
        if action == "build-output":
            builds.setdefault(str(event.get("ImportPath")), []).append(str(event.get("Output")))
        if not name:
            continue
        package = packages.setdefault(name, _Package())
        test = str(event.get("Test") or "").partition("/")[0]
        if test:
            _add(package.tests.setdefault(test, _Test()), event, whole="/" not in str(event["Test"]))
        elif action == "output":
            package.said += str(event.get("Output"))
            if failed := re.search(r"\[(build|setup) failed\]", str(event.get("Output"))):
                package.built = f"{failed[1]} failed"
        elif event.get("FailedBuild"):
            package.said += "".join(builds.get(str(event["FailedBuild"]), []))
    for name, package in packages.items():
        if package.built:
            why = [line for line in [*package.said.split("\n"), *stderr.split("\n")] if re.match(r"\S+\.go:\d+", line)]
            package.built = f"{package.built}: {why[0]}" if why else package.built
            package.said += stderr[-OUTPUT_MAX // 2 :] if name in stderr else ""
            package.said = package.said[-OUTPUT_MAX:]
    return packages


def _add(test: _Test, event: dict[str, Any], whole: bool) -> None:
    """Add an event. `whole` means that it belongs to the test itself, not to a subtest."""
    action, at = str(event.get("Action")), _unix_s(str(event.get("Time") or ""))
    test.seen = max(test.seen, at)
    if action == "output":
        test.said.append(str(event.get("Output")))
    elif whole and action == "run":
        test.started = at
    elif whole and action in _ENDS:
        test.outcome = _ENDS[action]
        test.seconds = max(float(event.get("Elapsed") or 0.0), 0.0)


def _unix_s(text: str) -> float:
    try:
        return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)).timestamp()
    except ValueError:
        return 0.0


def _event(line: str) -> dict[str, Any] | None:
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", event) if isinstance(event, dict) else None
