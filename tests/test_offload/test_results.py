"""From results of batches to files, counts and exit codes."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from rollout.model.errors import InputError, InvalidResultError
from rollout.model.item import Failure
from rollout.model.item import Outcome as ItemOutcome
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Running
from rollout.workloads.test.batch_progress import BatchProgress
from rollout.workloads.test.cases import Batch, BatchResult, CaseResult, Outcome, Try
from rollout.workloads.test.commands.make_room import KEPT, make_room
from rollout.workloads.test.config import QuarantineEntry
from rollout.workloads.test.lines import TestWriter, results_of
from rollout.workloads.test.quarantine import notes, quarantined
from rollout.workloads.test.report import failures_told
from rollout.workloads.test.result_lines import read_lines
from rollout.workloads.test.results_here import failed_ids, keep_aside, not_run, results_file, unfinished
from rollout.workloads.test.workload import Test

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FA{}"
PASSED, FAILED = (
    Try(outcome=Outcome.PASSED, seconds=1),
    Try(outcome=Outcome.FAILED, seconds=2, message="no", stdout="S"),
)
IDS = ("a.py::x", "a.py::y[ü b]", "b.py::z")


SKIPS = CaseResult(id="c.py", group="g", tries=(Try(outcome=Outcome.SKIPPED, phase="collect"),))


def config(
    fail_on_flaky: bool = False, quarantine: dict[str, str] | None = None, collected: CaseResult = SKIPS
) -> dict[str, Any]:
    return {
        "run": {"name": "suite"},
        "groups": {"g": {}},
        "output": {
            "report": {"junit": True, "junit_file": "j.xml", "fail_on_flaky": fail_on_flaky, "slow_secs": 2.5},
            "cases": {f"g/{one}": {"file": one[:4], "line": 7, "framework": "pytest"} for one in IDS},
            "collected": [collected.model_dump(mode="json")],
            "quarantine": quarantine or {},
        },
    }


def entry(position: int, *results: tuple[str, tuple[Try, ...]], **values: Any) -> CommitEntry:
    cases = tuple(CaseResult(id=one, group="g", tries=tries) for one, tries in results)
    batch = Batch(group="g", ids=tuple(one for one, _ in results))
    data = BatchResult(cases=cases).encode()
    fields = {"outcome": ItemOutcome.DONE, "data": data, "worker": "w", **values}
    return CommitEntry(position, position, 1, payload=batch.encode(), id=b"", **fields)


def collect(directory: Path, entries: list[CommitEntry], run: str = RUN.format(1), **options: Any) -> dict[str, Any]:
    with OutputDirectory.open(directory) as output:
        output.claim(run, config(**options), Test.result_files)
        collector = Collector(output, run, TestWriter(config(**options)), total=len(entries), unit="batches")
        collector.add(entries)
        summary = collector.finish("completed")
        collector.refresh("completed")
        collector.close()
        return summary


@pytest.mark.parametrize(
    ("last", "options", "code"),
    [
        ((PASSED,), {}, 0),
        ((FAILED,), {}, 1),
        ((FAILED, PASSED), {}, 0),
        ((FAILED, PASSED), {"fail_on_flaky": True}, 3),
        ((FAILED,), {"quarantine": {IDS[2]: "until 2030-01-01"}}, 0),
        ((Try(outcome=Outcome.CRASHED),), {}, 1),
        ((Try(outcome=Outcome.XPASSED),), {}, 0),
    ],
)
def test_the_exit_code_is_that_of_the_worst_test(
    tmp_path: Path, last: tuple[Try, ...], options: dict[str, Any], code: int
) -> None:
    entries = [entry(0, (IDS[0], (PASSED,)), (IDS[1], (PASSED,))), entry(1, (IDS[2], last))]
    summary = collect(tmp_path / "out", entries, **options)
    assert Test().exit_code(summary) == code
    assert summary["tests"]["total"] == 4 and summary["tests"]["skipped"] == 1 and summary["tests"]["not_run"] == 0


def test_files_that_pytest_would_take_for_something_else_are_found_in_their_directories(tmp_path: Path) -> None:
    names = ["test_[a].py", "-d/test_a.py", "b/test_a::b.py", "c/test.py"]
    line = '{"id": %s, "group": "", "outcome": "failed", "attempts": [{"outcome": "failed"}], "framework": "", "line": 0, "file": %s}\n'
    (tmp_path / "r.jsonl").write_text("".join(line % (json.dumps(f"{one}::t"), json.dumps(one)) for one in names))
    assert failed_ids(tmp_path / "r.jsonl").files == (".", "./-d/test_a.py", "b", "c/test.py")


def test_files_have_each_test_once_with_its_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = collect(tmp_path, [entry(0, (IDS[1], (FAILED, PASSED))), entry(1, (IDS[0], (FAILED, FAILED)))])
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(one["id"], one["outcome"], len(one["attempts"])) for one in lines] == [
        ("c.py", "skipped", 1), (IDS[1], "flaky", 2), (IDS[0], "failed", 2),
    ]  # fmt: skip
    assert lines[1]["line"] == 7 and lines[2]["attempts"][0]["stdout"] == "S" and lines[0]["file"] == "c.py"
    assert summary["slow"] == [{"id": IDS[0], "seconds": 4}, {"id": IDS[1], "seconds": 3}]
    assert summary["tests"]["not_run"] == 1 and Test().exit_code(summary) == 1
    xml = JUnitXml.fromfile(str(tmp_path / "j.xml"))
    assert (xml.tests, xml.failures) == (3, 1)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) >= 0
    failed = failed_ids(tmp_path / "results.jsonl")
    assert failed.ids == {IDS[0]} and failed.files == ("a.py",)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert failures_told(tmp_path)[1:] == [
        "::warning file=a.py,line=7,title=a.py%3A%3Ay[ü b] (flaky)::no",
        "::error file=a.py,line=7,title=a.py%3A%3Ax (failed)::no",
    ]


def test_a_batch_that_has_no_result_leaves_each_of_its_tests_in_error(tmp_path: Path) -> None:
    lost = entry(0, (IDS[0], (PASSED,)), outcome=ItemOutcome.FAILED, failure=Failure("worker_lost", "gone"))
    skipped = entry(1, (IDS[1], (PASSED,)), outcome=ItemOutcome.SKIPPED)
    summary = collect(tmp_path, [lost, skipped])
    assert (summary["tests"]["error"], summary["tests"]["not_run"]) == (1, 2)
    (line,) = [one for one in read_lines(tmp_path / "results.jsonl") if one.case.id == IDS[0]]
    assert line.result.tries[0].message == "worker_lost: gone"
    assert json.loads((tmp_path / "errors.jsonl").read_text())["tests"] == [IDS[0]]


def test_a_worker_cannot_report_on_other_tests_or_twice() -> None:
    good = entry(0, (IDS[0], (PASSED,)), (IDS[1], (PASSED,)))
    for results in ([IDS[0]], [IDS[0], IDS[0]], [IDS[0], IDS[2]], [*IDS]):
        cases = tuple(CaseResult(id=one, group="g", tries=(PASSED,)) for one in results)
        good.data = BatchResult(cases=cases).encode()
        with pytest.raises(InvalidResultError):
            results_of(good)
    good.data = b'{"cases": [{"id": "a", "tries": []}]}'
    with pytest.raises(InvalidResultError):
        results_of(good)


def test_the_bar_counts_tests_and_those_that_run_are_shown() -> None:
    writer = TestWriter(config())
    list(writer.lines(entry(0, (IDS[0], (FAILED,)))))
    assert BatchProgress.parse("starting") is None
    board = writer.board([Running(1, 4.0, str(BatchProgress(1, 2, IDS[1], 3.2)), 1), Running(2, 1.0, "starting", 1)], 2)
    assert board.extent == ("tests", 3, 4) and board.running == ((IDS[1], "3 s"),)
    assert board.line == "1 failed, 1 skipped"


def test_the_quarantine_ends_after_its_day() -> None:
    ids = [*IDS, "a.py::p[1]"]
    assert not quarantined(ids, [QuarantineEntry(id="a.py::p[?]", until=date(2026, 5, 1))], date(2026, 4, 1))
    entries = [
        QuarantineEntry(id="a.py::*[*]", until=date(2026, 5, 1)),
        QuarantineEntry(id=IDS[2], until=date(2026, 4, 1)),
    ]
    assert set(quarantined(ids, entries, date(2026, 4, 1))) == {IDS[1], "a.py::p[1]", IDS[2]}
    assert set(quarantined(ids, entries, date(2026, 4, 2))) == {IDS[1], "a.py::p[1]"}
    assert len(notes(ids, entries, date(2026, 4, 2), all_tests=True)) == 1
    entries.append(QuarantineEntry(id="gone.py", until=date(2026, 5, 1)))
    assert len(notes(ids, entries, date(2026, 4, 1), all_tests=True)) == 1
    assert not notes(ids, entries, date(2026, 4, 1), all_tests=False)


def test_a_file_that_cannot_be_collected_may_be_in_quarantine(tmp_path: Path) -> None:
    error = CaseResult(id="c.py", group="g", tries=(Try(outcome=Outcome.ERROR, phase="collect"),))
    summary = collect(tmp_path, [], quarantine={"c.py": "until"}, collected=error)
    assert (summary["tests"]["quarantined"], summary["tests"]["failing"]) == (1, 0)


def test_a_run_that_is_over_makes_room_and_its_results_are_found_by_its_id(tmp_path: Path) -> None:
    runs = [RUN.format(number) for number in "0123456789ABC"]
    for run in runs:
        make_room(tmp_path)
        collect(tmp_path, [entry(0, (IDS[0], (PASSED,)))], run)
    assert len(list(tmp_path.glob("results.*.jsonl"))) == KEPT
    assert results_file(tmp_path, None).name == results_file(tmp_path, runs[-1]).name == "results.jsonl"
    assert results_file(tmp_path, runs[-2].lower()).name == f"results.{runs[-2]}.jsonl"
    for unknown in (runs[0], "", "01"):
        with pytest.raises(InputError):
            results_file(tmp_path, unknown)


def test_failed_tests_that_were_to_run_again_are_still_those_when_that_run_was_killed(tmp_path: Path) -> None:
    for kept, ids in (({"only": ["a"], "selected": ["f"]}, {"a"}), ({"only": [], "selected": []}, None)):
        with OutputDirectory.open(tmp_path / str(ids)) as output:
            output.claim(RUN.format(1), {}, (), kept)
        begun = unfinished(tmp_path / str(ids))
        assert (begun and begun.ids) == ids


def test_tests_of_the_last_run_that_have_no_result_and_the_files_of_one_that_is_followed(tmp_path: Path) -> None:
    collect(tmp_path, [entry(0, (IDS[0], (FAILED,)))])
    left = failed_ids(tmp_path / "results.jsonl").and_also(not_run(tmp_path))
    assert left.ids == set(IDS) and left.files == ("a.py", "b.py")
    kept = keep_aside(tmp_path, Test.result_files)
    assert results_file(tmp_path, RUN.format(1)) == tmp_path / "results.jsonl"
    assert (
        kept.name == f"results.{RUN.format(1)}.jsonl" and kept.read_bytes() == (tmp_path / "results.jsonl").read_bytes()
    )


def test_a_file_that_is_no_results_is_told_with_its_line(tmp_path: Path) -> None:
    collect(tmp_path, [entry(0, (IDS[0], (PASSED,)))])
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"results\.jsonl:3: "):
        list(read_lines(tmp_path / "results.jsonl"))
