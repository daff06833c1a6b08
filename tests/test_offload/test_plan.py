"""What is collected becomes a run; and what a command does that finds an earlier one unfinished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rollout.model.errors import InputError
from rollout.workloads.port import InputReader
from rollout.workloads.test import discovery
from rollout.workloads.test.cases import Batch, Case, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.port import Discovered, Framework, Group
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig
from rollout.workloads.test.workload import Test, TestChecked
from test_offload.suites import write

FILES = {
    "offload.toml": "[groups.a]\nfilters = 'one'\nretry_count = 2\n[groups.b]\nfilters = 'two'\n",
    "test_a.py": "tests",
}


class Fake(Framework):
    name = "pytest"

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        return GroupConfig(options={})

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        """A test for each word of the filters; and a file that cannot be collected, by any group."""
        error = CaseResult(id="test_b.py", group=group.name, tries=(Try(outcome=Outcome.ERROR),))
        cases = [Case(id=f"test_a.py::{word}", group=group.name, file="test_a.py") for word in group.settings.words]
        return Discovered(tuple(cases), (error,))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(discovery, "FRAMEWORKS", {"pytest": Fake()})
    monkeypatch.chdir(write(tmp_path, FILES))
    return tmp_path


def check(kept: TestChecked | None = None, only: frozenset[str] = frozenset()) -> TestChecked:
    workload = Test(only=only)
    workload.works_here()
    settings = workload.load(None)
    keep = kept.keep if kept is not None else {}
    return workload.check(settings, InputReader(workload.directory(settings), resumed=kept is not None, kept=keep))


def test_each_group_has_its_tests_and_its_rules(project: Path) -> None:
    checked = check()
    found = {(case.group, case.id) for case in checked.found.cases}
    assert found == {("a", "test_a.py::one"), ("b", "test_a.py::two")}
    assert [(one.group, one.id) for one in checked.found.results] == [("a", "test_b.py")]
    batches = [Batch.parse(bytes(item.payload)) for item in Test().plan(checked, checked.config, 0)]  # type: ignore[arg-type]
    assert {batch.group: batch.retries for batch in batches} == {"a": 2, "b": 0}
    assert len({item.id for item in Test().plan(checked, checked.config, 0)}) == len(batches) == checked.total


def test_an_unfinished_run_goes_on_with_its_batches_unless_something_changed(project: Path) -> None:
    first = check()
    first.keep["batches"].reverse()  # durations that were learned since would give other ones
    again = check(first)
    assert not again.follows and [one.group for one in again.batches] == [one["group"] for one in first.keep["batches"]]
    only = check(first, frozenset({"test_a.py::one"}))
    assert only.follows and only.total == first.total and len(only.batches) == 1
    (project / "test_a.py").write_text("changed")
    assert check(first).follows


def test_no_tests(project: Path) -> None:
    with pytest.raises(InputError, match="no tests"):
        check(only=frozenset({"test_c.py"}))
