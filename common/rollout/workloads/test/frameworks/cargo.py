"""cargo: tests are listed and run by cargo-nextest, each in a process of its own; results are its JUnit XML."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.test.cases import Batch, BatchResult, Case, Try
from rollout.workloads.test.frameworks.commands import listing, read_file, result_of
from rollout.workloads.test.frameworks.port import Command, Discovered, Ended, Framework, Group
from rollout.workloads.test.junit import read_junit
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig

_JUNIT = "junit.xml"
_SCRIPT = """printf '%s' "$2" > "$1/nextest.toml" && printf '[profile.rollout.junit]\\npath = "%s/junit.xml"\\n' "$1" \
>> "$1/nextest.toml" || exit 125
config="$1/nextest.toml"; shift 2
exec "$@" --tool-config-file "rollout:$config" --profile rollout"""
"""Uses a profile that inherits the project's default: nextest accepts the path of its JUnit file only from a file."""
_PLAIN = re.compile(r"[\w:]", re.ASCII)
_FORMAT = "{classname} {name}"


class Cargo(Framework):
    name: ClassVar[str] = "cargo"

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        framework = group.framework
        if framework.test_id_format not in (None, _FORMAT):
            raise ConfigError(f'framework.test_id_format: must be "{_FORMAT}" for nextest, or be left out')
        args = [
            *(["-p", framework.package] if framework.package else []),
            *(["--features", ",".join(framework.features)] if framework.features else []),
            *(["--bin", framework.bin] if framework.bin else []),
            *(["--run-ignored", "all"] if framework.include_ignored else []),
        ]
        return GroupConfig(
            framework=self.name, args=tuple(args), options={"run_args": shlex.split(framework.run_args or "")}
        )

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        words = ["cargo", "nextest", "list", "--message-format", "json", "--color", "never", *config.args]
        listed = listing([*words, *group.settings.words], project, group, tell)
        if listed.code:
            is_missing = "no such command" in listed.stderr
            hint = ": cargo-nextest is not installed (cargo install cargo-nextest)" if is_missing else ""
            raise listed.fault(f"ended with {listed.code}{hint}")
        try:
            ids = list(_ids(json.loads(listed.stdout)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise listed.fault("its list of tests is not the JSON of cargo-nextest") from None
        chosen = [id for id in ids if _is_selected(id, group.selected)]
        return Discovered(tuple(Case(id=id, group=group.name, framework=self.name) for id in chosen))

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        # Of one test: a slow one is ended, so that the others of the batch go on.
        slow = f'slow-timeout = {{ period = "{max(round(batch.limit_s), 1)}s", terminate-after = 1 }}\n'
        profile = f"[profile.default]\n{slow}" if batch.limit_s else ""  # below what the project's own default says
        words = ["cargo", "nextest", "run", "--no-fail-fast", "--color", "never", "-j", "1", *config.args]
        words += [*config.options.get("run_args", []), "-E", filter_of(batch.ids)]
        return Command(("/bin/sh", "-c", _SCRIPT, "sh", result_dir, profile, *words), batch.limit_s * len(batch.ids))

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        data, fault = read_file(result_dir / _JUNIT), ""
        found: dict[str, Sequence[Try]] = {}
        if data is not None:
            try:
                read = read_junit(data, _JUNIT, _FORMAT)
            except InputError as error:
                fault = error.message
            else:
                found = {one.id: one.tries for one in read}
        return result_of(batch, found, ended, fault)


def _ids(listed: dict[str, Any]) -> Iterator[str]:
    suites: dict[str, dict[str, Any]] = listed["rust-suites"]
    for binary, suite in suites.items():
        for name, test in cast("dict[str, dict[str, Any]]", suite["testcases"]).items():
            if test.get("filter-match", {}).get("status", "matches") == "matches":
                yield f"{binary} {name}"


def _is_selected(id: str, selected: Sequence[str]) -> bool:
    return not selected or any(id == one or one in id.split(" ", 1) for one in selected)


def filter_of(ids: Sequence[str]) -> str:
    """Return an expression of nextest's filterset language that selects exactly these tests."""
    pairs = sorted(id.partition(" ")[::2] for id in ids)
    parts = list[str]()
    for binary, of_binary in groupby(pairs, key=lambda pair: pair[0]):
        names = " | ".join(f"test(={_escaped(name)})" for _, name in of_binary)
        parts.append(f"(binary_id(={_escaped(binary)}) & ({names}))")
    return " | ".join(parts)


def _escaped(text: str) -> str:
    return "".join(one if _PLAIN.match(one) else f"\\u{{{ord(one):x}}}" for one in text)
