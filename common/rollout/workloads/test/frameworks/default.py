"""Any framework, by templates of two commands: one prints ids, one runs tests, with JUnit XML or an exit code."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.test.cases import OUTPUT_MAX, Batch, BatchResult, Case, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.commands import is_usable, listing, read_file, result_of
from rollout.workloads.test.frameworks.port import Command, Discovered, Ended, Framework, Group
from rollout.workloads.test.junit import read_junit
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig

_JUNIT = "junit.xml"
_SEPARATORS = " :/.>"
_TIMED_OUT = 124
"""The exit code of timeout(1)."""
_KILL_S = 5.0
_SHELL = ("/bin/sh", "-c")
_ONE_BY_ONE = """out=$1 limit=$2 n=0; shift 2
for part in "$@"; do
  n=$((n + 1)); date +%s.%N > "$out/$n.began"
  timeout -k 5 "$limit" /bin/sh -c "$part" > "$out/$n.out" 2> "$out/$n.err"; echo $? > "$out/$n.code"
  date +%s.%N > "$out/$n.ended"
done"""
"""Runs one test at a time, because without JUnit XML the exit code is the only result."""


class Default(Framework):
    name: ClassVar[str] = "default"

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        framework = group.framework
        writes = framework.result_file is not None or "{result_file}" in (framework.run_command or "")
        if writes and framework.test_id_format is None:
            raise ConfigError(
                'framework.test_id_format: is needed for JUnit XML: how an id is made of it, such as "{name}" or '
                '"{classname}::{name}"'
            )
        options: dict[str, Any] = framework.model_dump(mode="json", exclude_none=True)
        return GroupConfig(framework=self.name, options=options)

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        text = str(config.options["discover_command"]).replace("{filters}", group.settings.filters)
        listed = listing((*_SHELL, text), project, group, tell, config.options.get("working_dir"))
        if listed.code:
            raise listed.fault(f"ended with {listed.code}")
        ids = [line.strip() for line in listed.stdout.splitlines()]
        ids = [id for id in dict.fromkeys(ids) if id and not id.startswith("#")]
        if unusable := [id for id in ids if not is_usable(id)]:
            raise listed.fault(f"printed what is no id: {unusable[0][:200]!r}")
        chosen = [id for id in ids if not group.selected or id in group.selected]
        return Discovered(tuple(Case(id=id, group=group.name, framework=self.name) for id in chosen))

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        run, result_file = str(config.options["run_command"]), config.options.get("result_file")
        enter = f"cd {shlex.quote(config.options['working_dir'])} && " if config.options.get("working_dir") else ""
        junit = f"{result_dir}/{_JUNIT}"
        if "{result_file}" in run:
            return Command((*_SHELL, enter + _filled(run, batch.ids, junit)), batch.limit_s)
        if result_file is not None:
            kept, place = shlex.quote(result_file), shlex.quote(junit)
            text = f"rm -f {kept}\n( {_filled(run, batch.ids)}\n)\ncode=$?; cp {kept} {place}; exit $code"
            return Command((*_SHELL, f"{enter}{{ {text}\n}}"), batch.limit_s)
        if "{tests}" not in run:
            return Command((*_SHELL, enter + run), batch.limit_s)
        parts = [enter + _filled(run, [id]) for id in batch.ids]
        words = (*_SHELL, _ONE_BY_ONE, "sh", result_dir, f"{batch.limit_s}", *parts)
        return Command(words, batch.limit_s * len(parts) + _KILL_S * len(parts) if batch.limit_s else 0.0)

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        run = str(config.options["run_command"])
        found: dict[str, Sequence[Try]] = {}
        fault = ""
        if config.options.get("result_file") is not None or "{result_file}" in run:
            try:
                data = read_file(result_dir / _JUNIT)
                read = read_junit(data, _JUNIT, config.options["test_id_format"]) if data is not None else []
                found = _matched(read, batch.ids)
            except InputError as error:
                fault = error.message
        elif "{tests}" in run:
            for number, id in enumerate(batch.ids, 1):
                if made := _made(result_dir, number, batch.limit_s):
                    found[id] = [made]
        else:
            found = dict.fromkeys(batch.ids, (_of_code(ended),))
        return result_of(batch, found, ended, fault)


def _filled(run: str, ids: Sequence[str], result_file: str = "") -> str:
    before, *rest = run.split("{tests}")
    tests = shlex.join(ids)
    return tests.join(part.replace("{result_file}", shlex.quote(result_file)) for part in (before, *rest))


def _matched(read: Sequence[CaseResult], ids: Sequence[str]) -> dict[str, Sequence[Try]]:
    """Match results with ids as the public tool does: a result with an unknown id belongs to the only id that ends with
    it. The id of a test without a class has only the format's separator before its name."""
    found: dict[str, Sequence[Try]] = {one.id: one.tries for one in read if one.id in ids}
    for one in read:
        name = one.id.lstrip(_SEPARATORS)
        ends = [id for id in ids if name and id.endswith(name)]
        if len(ends) == 1:
            found.setdefault(ends[0], one.tries)
    return found


def _made(directory: Path, number: int, limit_s: float) -> Try | None:
    said = {kind: (read_file(directory / f"{number}.{kind}") or b"").decode("utf-8", "replace") for kind in _KINDS}
    try:
        began = float(said["began"])
        code = int(said["code"])
        seconds = max(float(said["ended"]) - began, 0.0)
    except ValueError:
        return None
    made = _of_code(Ended(None if code == _TIMED_OUT and seconds >= limit_s > 0 else code, said["out"], said["err"]))
    return made.model_copy(update={"started": began, "seconds": seconds})


_KINDS = ("began", "ended", "code", "out", "err")


def _of_code(ended: Ended) -> Try:
    if ended.code is None:
        outcome, message = Outcome.TIMEOUT, "the test command was ended at its time limit"
    else:
        outcome = Outcome.FAILED if ended.code else Outcome.PASSED
        message = f"the test command ended with {ended.code}" if ended.code else ""
    return Try(outcome=outcome, message=message, stdout=ended.stdout[-OUTPUT_MAX:], stderr=ended.stderr[-OUTPUT_MAX:])
