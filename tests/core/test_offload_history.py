"""What is remembered of tests from run to run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rollout.model.errors import ConfigError
from rollout.workloads.test.cases import Case, CaseResult, Outcome, Status, Try
from rollout.workloads.test.history import History


def result(id: str, *tries: tuple[Outcome, float], group: str = "") -> CaseResult:
    return CaseResult(id=id, group=group, tries=tuple(Try(outcome=outcome, seconds=s) for outcome, s in tries))


PASSED, FAILED = Outcome.PASSED, Outcome.FAILED


def test_durations_are_weighted_by_failures_then_of_the_group_then_the_default(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", default_s=7.0)
    assert history.expected()(Case(id="a")) == 7.0 and not history.path.exists()
    history.record("r1", 1.0, [result("a", (PASSED, 1.0)), result("b [ü]\n", (FAILED, 8.0), (PASSED, 2.0))])
    for n in range(4):
        history.record(f"r{n + 2}", 1.0, [result("a", (PASSED, n + 2.0))])
    expected = history.expected()
    assert expected(Case(id="a")) == 4.0  # P75 of 1 to 5
    assert expected(Case(id="b [ü]\n")) == 5.0
    assert expected(Case(id="new")) == 4.5
    assert expected(Case(id="a", group="other")) == 7.0


def test_the_newest_samples_are_kept_and_a_run_counts_once(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", reservoir=3)
    for n in range(5):
        assert history.record(f"r{n}", 1.0, [result("a", (FAILED, 9.0), (PASSED, float(n)))])
    assert not history.record("r4", 1.0, [result("a", (PASSED, 100.0))])
    (test,) = history.tests()
    assert (test.tries, test.failures, test.passed_s, test.failed_s) == (10, 5, (2.0, 3.0, 4.0), (9.0,) * 3)
    assert test.statuses == ((3, Status.FLAKY), (4, Status.FLAKY), (5, Status.FLAKY)) and test.flaky == 3
    assert list(history.runs()) == ["r0", "r1", "r2", "r3", "r4"]


def test_commands_at_once_lose_nothing(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")

    def write(name: str) -> None:
        for n in range(10):
            history.record(f"{name}{n}", 1.0, [result("a", (PASSED, 1.0))])

    script = (
        "import sys; from pathlib import Path; from rollout.workloads.test.history import *\n"
        "from rollout.workloads.test.cases import *\n"
        "for n in range(10):\n"
        "  History(Path(sys.argv[1])).record(f'p{n}', 1, [CaseResult(id='a', tries=(Try(outcome='passed'),))])"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(history.path)]) as other:
        threads = [threading.Thread(target=write, args=(name,)) for name in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert other.returncode == 0
    assert [test.tries for test in history.tests()] == [30]


def test_a_file_that_is_no_history_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.write_text("no database, but text that is long enough to be looked at" * 10)
    with pytest.raises(ConfigError, match=r"history\.db: "):
        History(path).expected()
    assert path.read_text().startswith("no database")
