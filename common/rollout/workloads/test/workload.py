"""The workload `test`: an item is a batch of a project's tests."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollout.config.cores import available
from rollout.config.load import located
from rollout.model.counts import counted
from rollout.model.errors import ConfigError
from rollout.model.item import NewItem
from rollout.model.run import Order, RunSpec
from rollout.workloads.code import Code, read_code, stamp
from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Part
from rollout.workloads.job.providers_here import refused
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.port import NO_OVERRIDES, Checked, Fetch, InputReader, Tree, Workload
from rollout.workloads.spool import Tell, quiet
from rollout.workloads.test.cases import Batch, BatchResult, CaseResult, Outcome, Try
from rollout.workloads.test.config import FrameworkSection, TestConfig
from rollout.workloads.test.digest import TestsDigest, batch_parts
from rollout.workloads.test.discovery import Found, discover, framework_of
from rollout.workloads.test.frameworks.port import Group
from rollout.workloads.test.history import History
from rollout.workloads.test.lines import FILES, TRACE, TestWriter, counted_statuses, results_of
from rollout.workloads.test.plan import digest_of, item_of, run_spec
from rollout.workloads.test.project import ELSEWHERE, Project, dot_files, find_project, passed_over
from rollout.workloads.test.quarantine import notes, quarantined
from rollout.workloads.test.report import failures_told, remark
from rollout.workloads.test.result_lines import RESULTS, read_lines
from rollout.workloads.test.results_here import keep_aside
from rollout.workloads.test.run_config import REPO_ROOT, Copy, GroupConfig, RunConfig
from rollout.workloads.test.schedule import Rules, end_sessions, schedule
from rollout.workloads.test.starting import guess
from rollout.workloads.test.unchanged import Depends, keys_of

_ELSEWHERE = 10
"""Batches at once on other machines, if nothing says how many."""
_FINER = 8
"""Batches are smaller by this factor if failures end the run, because running batches are finished."""
HISTORY = "history.db"
_SAME_FILE = "all of them write one framework.result_file ({result_file} in run_command gives each its own)"
_ON_THIS_HOST = ("bubblewrap", "docker", "podman")
"""Providers that need a service or program of the host."""


@dataclass(kw_only=True)
class TestChecked(Checked):
    __test__ = False

    project: Project
    found: Found
    batches: list[Batch]


class Test(Workload[TestConfig, TestChecked]):
    """`selected` and `only` are those of `discover`. `record` records the run in the history, whatever the
    configuration says. `unchanged` skips tests that passed and whose dependencies have not changed. `notes` are for the
    user."""

    __test__ = False

    name = "test"
    settings = TestConfig
    sections = frozenset(TestConfig.model_fields)
    unit = "batches"
    result_files = FILES

    def __init__(
        self,
        selected: Sequence[str] = (),
        *,
        only: frozenset[str] = frozenset(),
        record: bool = False,
        unchanged: Depends | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._selected = tuple(selected)
        self._only = only
        self._record = record
        self._unchanged: Depends | None = unchanged
        self._notes = tuple(notes)
        self._project: Project | None = None
        self._is_here = False
        self._workers = 0

    # ---- the settings

    def load(self, path: Path | None, overrides: Mapping[str, Any] = NO_OVERRIDES) -> TestConfig:
        project = find_project(Path.cwd(), path)
        settings = super().load(project.file, overrides)
        directory = settings.offload.working_dir or settings.provider.working_dir
        root = project.root / directory if directory and settings.provider.type != "default" else project.root
        self._project = Project(root.resolve(), project.file)
        if "framework" not in settings.model_fields_set:
            settings = settings.model_copy(update={"framework": FrameworkSection(type=guess(root))})
        with located(project.file, TestConfig):
            if not root.is_dir():
                raise ConfigError(f"offload.working_dir: there is no directory {root}")
            if self._project.root.is_relative_to(self.directory(settings).resolve()):
                raise ConfigError("report.output_dir: this directory holds the project: name one for results alone")
        return settings

    @property
    def project(self) -> Project:
        return self._project or find_project(Path.cwd())

    def here(self, path: Path | None, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Path:
        """Return the output directory of the project."""
        return self.directory(self.load(path, overrides))

    def validated(self, settings: TestConfig) -> JsonObject:
        """Return the effect of the configuration, as far as it is known without the tests. Raises ConfigError."""
        project, section = self.project, settings.framework
        framework = framework_of(settings)
        groups = {
            name: framework.group_config(project, Group(name, group, section))
            for name, group in settings.groups.items()
        }
        in_place = self._is_here and settings.provider.type == "local"
        python = next(iter(groups.values())).python if in_place else ()
        return {
            "file": str(project.file) if project.file else None,
            "root": str(project.root),
            "framework": section.type,
            "provider": settings.provider.type,
            "python": shlex.join(python) or None,
            "groups": list(settings.groups),
            "output_dir": str(self.directory(settings)),
            "notes": [*settings.unsupported(), *_of_interpreter(project.root, python)],
        }

    def directory(self, settings: TestConfig) -> Path:
        return self.project.root / Path(settings.report.output_dir).expanduser()

    def works_here(self) -> None:
        self._is_here = True

    def use_workers(self, count: int) -> None:
        """Set the number of local workers, each of which runs one batch at a time."""
        self._workers = count

    def at_once(self, settings: TestConfig) -> int:
        """Return the number of batches at once."""
        if self._one_by_one(settings):
            return 1
        here = self._is_here and settings.provider.type not in ("modal", "kubernetes", "default")
        return self._workers or settings.offload.max_parallel or (available() if here else _ELSEWHERE)

    def _one_by_one(self, settings: TestConfig) -> bool:
        """Return whether batches must not overlap because each would write the same file in the project's directory."""
        framework = settings.framework
        fixed = framework.result_file is not None and "{result_file}" not in (framework.run_command or "")
        return fixed and self._is_here and settings.provider.type == "local"

    @property
    def executors(self) -> tuple[str, ...]:
        return (self.name,)

    # ---- input to items

    def check(self, settings: TestConfig, reading: InputReader) -> TestChecked:
        project, provider = self.project, settings.provider.type
        if self._is_here and provider in _ON_THIS_HOST and (why := refused(provider, {})):
            raise ConfigError(f"provider.type: {why}")
        if self._one_by_one(settings) and self._workers > 1:
            raise ConfigError(f"--workers: only one batch at a time can run, since {_SAME_FILE}")
        reading.tell("collecting tests")
        found = discover(project, settings, self._selected, reading.tell, self._only)
        copies = _copies(settings, project.root, reading.exclude)
        keys, known = self._known(found, settings, reading, copies)
        if known:
            rest = tuple(case for case in found.cases if (case.group, case.id) not in known)
            found = replace(found, cases=rest, results=(*found.results, *known.values()))
        in_place = self._is_here and provider == "local"
        hidden = dot_files(project.root)
        code = None if in_place else read_code(project.root, [reading.exclude], hidden=hidden)
        expected = self._history(settings).expected()
        rules = {
            name: Rules(
                individual=group.schedule_individual,
                split_scopes=group.split_scopes,
                retries=group.retry_count,
                limit_s=settings.offload.test_timeout_secs,
            )
            for name, group in settings.groups.items()
        }
        slots = self.at_once(settings) * (_FINER if settings.offload.max_failures else 1)
        batches = end_sessions(schedule(found.cases, expected, slots, rules), found.cases)
        run = RunConfig(
            root=str(project.root),
            tree=code.manifest if code else "",
            env=settings.provider.env,
            provider=settings.provider.model_dump(mode="json", exclude_unset=True),
            sandbox=_sandbox(settings),
            download=tuple(settings.report.download_globs),
            download_failure_only=settings.report.download_globs_failure_only,
            copies={
                str(number): Copy(tree=code.manifest, there=there)
                for number, (there, code) in enumerate(copies.items())
            },
            groups=found.groups if in_place else _elsewhere(found.groups, settings.framework),
            hedge=settings.offload.impatiently_requeue_batches and not self._is_here,
        ).model_dump(mode="json")
        plan = {
            "sources": code.manifest if code else stamp(project.root, [reading.exclude], hidden=hidden),
            "tests": digest_of(found.cases),
            "groups": {name: group.model_dump(mode="json") for name, group in settings.groups.items()},
            "run": run,
        }
        checked = TestChecked(
            config={
                **run,
                "run": {
                    "name": settings.run.name,
                    "priority": settings.run.priority,
                    "order": Order.ARRIVAL.value,
                    "max_in_flight": 0 if self._is_here else settings.offload.max_parallel or 0,
                    "max_failures": settings.offload.max_failures,
                },
                "input": {"digest": blake3(canonical(plan)).hexdigest()},
                "output": {
                    **_output(settings, found),
                    "history": self._history_section(settings),
                    "keys": [[*key, value.hex()] for key, value in keys.items()],
                },
            },
            total=len(batches),
            slots=1 if self._workers else max(1, min(self.at_once(settings), len(batches) or 1)),
            trees=(
                *((Tree("tree", project.root, always=True, files=code.files),) if code else ()),
                *(
                    Tree(f"copies.{number}.tree", one.directory, always=True, files=one.files)
                    for number, one in enumerate(copies.values())
                ),
            ),
            keep={
                "plan": plan,
                "only": sorted(self._only),
                "selected": list(self._selected),
                "batches": [batch.model_dump(mode="json") for batch in batches],
            },
            notes=(
                *self._notes,
                *settings.unsupported(),
                *([f"batches run one at a time, since {_SAME_FILE}"] if self._one_by_one(settings) else []),
                *_of_interpreter(project.root, next(iter(found.groups.values())).python if in_place else ()),
                *found.notes,
                *notes(_ids(found), settings.quarantine, date.today(), all_tests=not self._selected and not self._only),
                _planned(found, len(batches)),
            ),
            project=project,
            found=found,
            batches=batches,
        )
        if reading.resumed and reading.kept:
            self._compare(checked, reading.kept)
        return checked

    def _known(
        self, found: Found, settings: TestConfig, reading: InputReader, copies: Mapping[str, Code]
    ) -> tuple[dict[tuple[str, str], bytes], dict[tuple[str, str], CaseResult]]:
        """Return keys of all tests, and results of those that passed with the same key, by group and id."""
        if self._unchanged is None:
            return {}, {}
        reading.tell("looking for what was changed")
        place = {
            "provider": settings.provider.model_dump(mode="json"),
            "sandbox": _sandbox(settings),
            "copies": {there: one.manifest for there, one in copies.items()},
        }
        keys = keys_of(found.cases, self._unchanged, self.project.root, [reading.exclude], found.groups, place)
        passed = self._history(settings).passed()
        known = {
            key: CaseResult(id=key[1], group=key[0], tries=(Try(outcome=Outcome.PASSED, cached=passed[value]),))
            for key, value in keys.items()
            if value in passed
        }
        return keys, known

    def _compare(self, checked: TestChecked, kept: JsonObject) -> None:
        """Compare with a killed run, which continues if nothing has changed."""
        before, now = kept["plan"], checked.keep["plan"]
        said = {"sources": "the project was changed", "tests": "other tests are asked for"}
        changed = [key for key in now if before.get(key) != now[key]]
        batches = [Batch.model_validate(one) for one in kept["batches"]]
        if changed:
            checked.follows = said.get(changed[0], "it is configured otherwise")
            checked.total = len(batches)  # of the run that ends
            return
        checked.batches, checked.total = batches, len(batches)
        checked.keep = kept

    def plan_followup(self, checked: TestChecked, config: JsonObject, directory: Path, tell: Tell = quiet) -> str:
        checked.total = len(checked.batches)
        what = f"{counted(len(checked.found.cases), 'test')} of it" if self._only else "all tests"
        return f"its results are kept in {keep_aside(directory, FILES)}, and {what} run now"

    def plan(self, checked: TestChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        of_run = canonical([config["root"], config["input"]["digest"]])
        for seq in range(start, len(checked.batches)):
            yield item_of(checked.batches[seq], seq, of_run)

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        return run_spec(run_id, config, self.free)

    # ---- commit log to files

    def writer(self, config: JsonObject) -> TestWriter:
        return TestWriter(config)

    async def finished(
        self, fetch: Fetch, config: JsonObject, directory: Path, summary: JsonObject, tell: Callable[[str], None]
    ) -> list[str]:
        if summary["state"] != "completed":
            return []
        await asyncio.to_thread(self._record_run, config, directory, summary)
        for text in await asyncio.to_thread(failures_told, directory):
            tell(text)
        report: JsonObject = config["output"]["report"]
        return [str(directory / name) for name in ([report["junit_file"]] if report["junit"] else []) + [TRACE]]

    def _record_run(self, config: JsonObject, directory: Path, summary: JsonObject) -> None:
        history: JsonObject = config["output"]["history"]
        keys = {(group, id): bytes.fromhex(key) for group, id, key in config["output"]["keys"]}
        if history["always"] or self._record or keys:
            results = [line.result for line in read_lines(directory / RESULTS)]
            at = min((one.started for result in results for one in result.tries if one.started), default=0.0)
            History(Path(history["path"]), reservoir=history["reservoir"]).record(summary["run_id"], at, results, keys)

    def history_here(self, path: Path | None) -> History:
        """Return the history of the project, at the configured path."""
        return self._history(self.load(path))

    def _history(self, settings: TestConfig) -> History:
        section = settings.history
        path = self._history_path(settings)
        return History(path, reservoir=section.reservoir_size, default_s=section.default_duration_secs)

    def _history_path(self, settings: TestConfig) -> Path:
        path = settings.history.path
        if path is None or path.endswith(".jsonl"):  # the public tool's
            return self.directory(settings) / HISTORY
        return self.project.root / path

    def _history_section(self, settings: TestConfig) -> JsonObject:
        section = settings.history
        return {
            "path": str(self._history_path(settings)),
            "always": section.record_history == "always",
            "reservoir": section.reservoir_size,
        }

    # ---- for people

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        return Batch.parse(payload).model_dump(mode="json"), ""

    def digest(self, config: JsonObject) -> TestsDigest:
        return TestsDigest()

    def item_parts(self, config: JsonObject, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        return batch_parts(BatchResult.parse(result)) if result is not None else ()

    def item_output(self, data: bytes) -> Any:
        return json.loads(data)

    def remarks(self, entry: CommitEntry) -> Iterator[tuple[str, str, JsonObject]]:
        for result in results_of(entry).cases:
            fields = {
                "id": result.id,
                "group": result.group,
                "outcome": result.status.value,
                "seconds": round(sum(one.seconds for one in result.tries), 6),
            }
            yield "test", remark(result), fields

    def outcome(self, summary: JsonObject) -> str:
        tests: JsonObject = summary["tests"]
        ran = tests["total"] - tests["not_run"]
        slow = [f"\nslow: {one['seconds']:.1f} s {one['id']}" for one in summary["slow"]]
        cached = f" ({tests['cached']:,} of them in earlier runs)" if tests["cached"] else ""
        waived = f", {tests['quarantined']:,} of them in quarantine" if tests["quarantined"] else ""
        not_run = f", {tests['not_run']:,} not run" if tests["not_run"] else ""
        seconds = summary["durations"]["wall_s"]
        counts = f"{counted_statuses(tests) or 'no outcome'}{cached}{waived}{not_run}"
        return f"{counted(ran, 'test')} in {seconds:.1f} s: {counts}{''.join(slow)}"

    def exit_code(self, summary: JsonObject) -> int:
        tests = summary["tests"]
        if tests["failing"] or tests["not_run"]:
            return 1
        return 3 if tests["flaky"] and summary["fail_on_flaky"] else 0

    def describe(self, settings: TestConfig, checked: TestChecked) -> list[str]:
        found, root = checked.found, checked.project.root
        groups = [
            f"group {name}: {counted(sum(case.group == name for case in found.cases), 'test')}"
            for name in settings.groups
        ]
        return [
            f"project {root}, {settings.framework.type}, provider {settings.provider.type}",
            *groups,
            f"{counted(len(found.cases), 'test')} in {counted(len(checked.batches), 'batch')}, "
            f"{self.at_once(settings)} at once",
            f"writes {', '.join((*FILES, settings.report.junit_file, TRACE))} to {self.directory(settings)}",
        ]

    def dry_run(self, settings: TestConfig, checked: TestChecked) -> JsonObject:
        errors = sum(not result.good for result in checked.found.results)
        return {
            "tests": len(checked.found.cases),
            "batches": len(checked.batches),
            "collection_errors": errors,
            "at_once": self.at_once(settings),
        }


def _output(settings: TestConfig, found: Found) -> JsonObject:
    """Return what the output files are written from, which workers do not need."""
    report = settings.report.model_dump(mode="json")
    return {
        "report": report,
        "cases": {
            f"{one.group}/{one.id}": one.model_dump(include={"file", "line", "framework"}) for one in found.cases
        },
        "collected": [result.model_dump(mode="json") for result in found.results],
        "quarantine": quarantined(_ids(found), settings.quarantine, date.today()),
    }


def _copies(settings: TestConfig, root: Path, exclude: Path) -> dict[str, Code]:
    """Return [provider] copy_dirs by their paths in a sandbox, without the project itself. Raises ConfigError."""
    place = settings.offload.sandbox_repo_root or REPO_ROOT
    found: dict[str, Code] = {}
    for here, there in settings.provider.copies:
        directory = (root / Path(here).expanduser()).resolve()
        if not directory.is_dir():
            raise ConfigError(f"provider.copy_dirs: there is no directory {directory}")
        if (directory, there) != (root, place):
            found[there] = read_code(directory, [exclude])
    return found


def _of_interpreter(root: Path, python: Sequence[str]) -> list[str]:
    """Return a note if the project's virtual environment was skipped for `python` because it has no pytest."""
    other = passed_over(root, python) if python else ""
    return [f"{other} cannot import pytest: tests run with {shlex.join(python)}"] if other else []


def _ids(found: Found) -> list[str]:
    return [*(case.id for case in found.cases), *(result.id for result in found.results)]


def _planned(found: Found, batches: int) -> str:
    """Describe the plan: the number of tests in the summary, and how they will run."""
    run = f"in {counted(batches, 'batch')}"
    if not found.results:
        return f"{counted(len(found.cases), 'test')} {run}"
    cached = sum(bool(result.tries[-1].cached) for result in found.results)
    bad = sum(not result.good for result in found.results)
    parts = {
        run: len(found.cases),
        "passed before and depend on nothing that was changed": cached,
        "cannot be collected": bad,
        "skipped when they were collected": len(found.results) - cached - bad,
    }
    total = counted(len(found.cases) + len(found.results), "test")
    return f"{total}: {', '.join(f'{count:,} {what}' for what, count in parts.items() if count)}"


def _elsewhere(groups: Mapping[str, GroupConfig], framework: FrameworkSection) -> dict[str, GroupConfig]:
    """Replace the interpreter for copies of the project, which do not include the virtual environment."""
    if framework.kind != "pytest" or framework.python or framework.command:
        return dict(groups)
    return {name: group.model_copy(update={"python": ELSEWHERE}) for name, group in groups.items()}


def _sandbox(settings: TestConfig) -> JsonObject:
    offload = settings.offload
    return {
        "repo_root": offload.sandbox_repo_root,
        "project_root": offload.sandbox_project_root,
        "init_cmd": offload.sandbox_init_cmd,
    }
