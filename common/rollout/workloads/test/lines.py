"""Turns results of batches into lines of files, progress for the user, and reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rollout.model.errors import InvalidResultError, NotFoundError, ObjectCorruptError
from rollout.model.item import Outcome as ItemOutcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, dump_line
from rollout.workloads.output import SUMMARY, write_atomically
from rollout.workloads.port import Ledger, Running, StatusTable, Totals, unsuccessful
from rollout.workloads.test.batch_progress import BatchProgress
from rollout.workloads.test.cases import Batch, BatchResult, Case, CaseResult, Outcome, Status, Try
from rollout.workloads.test.downloads import download
from rollout.workloads.test.junit import junit_xml
from rollout.workloads.test.result_lines import BAD, RESULTS, Line, read_lines
from rollout.workloads.test.trace import chrome_trace

ERRORS = "errors.jsonl"
FILES = (RESULTS, ERRORS, SUMMARY)
TRACE = "trace.json"
_SLOWEST = 10


def results_of(entry: CommitEntry) -> BatchResult:
    """Return the result of an entry of the commit log with any outcome: each test of its batch once, but none that was
    never started. Raises InvalidResultError."""
    batch = Batch.parse(entry.payload)
    if entry.outcome is ItemOutcome.DONE:
        result = BatchResult.parse(entry.data)
        if sorted(one.id for one in result.cases) != sorted(batch.ids) or any(
            one.group != batch.group for one in result.cases
        ):
            raise InvalidResultError("a worker sent results of other tests than those of the batch")
        return result
    if entry.outcome is not ItemOutcome.FAILED:
        return BatchResult(cases=())
    why = unsuccessful(entry, "batch")
    lost = Try(
        outcome=Outcome.ERROR,
        started=entry.accepted_ms / 1000,
        worker=entry.worker,
        message=f"{why.code}: {why.message}",
    )
    return BatchResult(cases=tuple(CaseResult(id=one, group=batch.group, tries=(lost,)) for one in batch.ids))


class TestWriter:
    """Writes results. `config["output"]` has what is known before the tests run: `cases`, `collected`, `quarantine`."""

    __test__ = False

    files: tuple[str, ...] = (RESULTS, ERRORS)

    def __init__(self, config: JsonObject) -> None:
        output: JsonObject = config["output"]
        self._report: JsonObject = output["report"]
        self._cases: dict[str, JsonObject] = output["cases"]
        self._collected = [CaseResult.model_validate(one) for one in output["collected"]]
        self._quarantine: dict[str, str] = output["quarantine"]
        self._name: str = config["run"]["name"] or "tests"
        self._most_failures: int = config["run"].get("max_failures", 0)
        self._directory = Path()
        self.memory: JsonObject = {}

    # ---- lines

    def begin(self) -> Iterator[tuple[str, bytes]]:
        for result in self._collected:
            yield RESULTS, self._line(result).encode()

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        results = results_of(entry).cases
        if entry.outcome is ItemOutcome.FAILED:
            why = unsuccessful(entry, "batch")
            ids = [one.id for one in results]
            yield ERRORS, dump_line({"code": why.code, "message": why.message, "tests": ids, "attempts": entry.tries})
        lines = [self._line(result) for result in results]
        for line in lines:
            yield RESULTS, line.encode()
        self._count(lines)

    def _line(self, result: CaseResult) -> Line:
        of_file = {"file": result.id.partition("::")[0]}  # where a file could not be collected
        known = self._cases.get(f"{result.group}/{result.id}", of_file)
        case = Case.model_validate({"id": result.id, "group": result.group, **known})
        return Line(case, result, self._quarantine.get(result.id, "") if result.status in BAD else "")

    def _count(self, lines: Iterable[Line]) -> None:
        counts: dict[str, int] = self.memory.setdefault("counts", {})
        for line in lines:
            status = line.result.status.value
            counts[status] = counts.get(status, 0) + 1
            if line.quarantined:
                self.memory["quarantined"] = self.memory.get("quarantined", 0) + 1
            slow: list[list[float | str]] = self.memory.setdefault("slow", [])
            seconds = sum(one.seconds for one in line.result.tries)
            if seconds >= self._report["slow_secs"]:
                self.memory["slow"] = sorted([*slow, [round(seconds, 3), line.case.id]], reverse=True)[:_SLOWEST]

    @property
    def counts(self) -> dict[str, int]:
        """Number of tests with a result, by status, including those decided during collection."""
        counts: dict[str, int] = dict(self.memory.get("counts", {}))
        for result in self._collected:
            counts[result.status.value] = counts.get(result.status.value, 0) + 1
        return counts

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        counts, total = self.counts, len(self._cases) + len(self._collected)
        quarantined = self.memory.get("quarantined", 0) + sum(
            bool(self._line(result).quarantined) for result in self._collected
        )
        failing = sum(counts.get(status, 0) for status in BAD) - quarantined
        not_run = total - sum(counts.values())
        if self._most_failures and not_run and summary["state"] == "completed":
            summary["reason"] = f"{failing:,} failed, of at most {self._most_failures:,}: the rest was not run"
        return summary | {
            "tests": {
                "total": total,
                **{status.value: counts.get(status.value, 0) for status in Status},
                "not_run": not_run,
                "quarantined": quarantined,
                "cached": sum(bool(result.tries[-1].cached) for result in self._collected),
                "failing": failing,
            },
            "fail_on_flaky": self._report["fail_on_flaky"],
            "slow": [{"id": id, "seconds": seconds} for seconds, id in self.memory.get("slow", [])],
        }

    # ---- files of its own

    def open(self, directory: Path) -> None:
        self._directory = directory

    def take_up(self) -> None:
        return

    async def place(self, entry: CommitEntry, ledger: Ledger) -> str:
        if entry.outcome is not ItemOutcome.DONE:
            return ""
        result = BatchResult.parse(entry.data)
        if result.files:
            try:
                await download(bytes.fromhex(result.files), self._directory, ledger.fetch)
            except (NotFoundError, ObjectCorruptError) as error:
                return f"files of a batch are not there: {error.message}"
        return result.files_error

    def refresh(self, state: str = "") -> None:
        if not state or not (self._directory / RESULTS).exists():
            return
        lines = list(read_lines(self._directory / RESULTS))
        if self._report["junit"]:
            xml = junit_xml(((line.case, line.result) for line in lines), self._name)
            write_atomically(self._directory / self._report["junit_file"], xml)
        write_atomically(self._directory / TRACE, chrome_trace(line.result for line in lines))

    # ---- for people

    def board(self, running: Sequence[Running], n_running: int) -> StatusTable:
        counts = self.counts
        total, over = len(self._cases) + len(self._collected), sum(counts.values())
        doing = [(one, said) for one in running if (said := BatchProgress.parse(one.note)) is not None]
        over += sum(said.done for _, said in doing)
        rows = [(said.id, f"{said.seconds:.0f} s") for _, said in doing if said.id]
        return StatusTable(
            heads=(),
            rows=(),
            running=tuple(rows),
            n_running=n_running,
            line=counted_statuses(counts),
            fields={
                "tests": total,
                "tests_done": over,
                "outcomes": counts,
                "tests_running": [{"id": said.id, "seconds": said.seconds} for _, said in doing if said.id],
            },
            extent=("tests", min(over, total), total),
        )


_SHOWN = {
    Status.PASSED: "passed",
    Status.FAILED: "failed",
    Status.ERROR: "in error",
    Status.CRASHED: "crashed",
    Status.TIMEOUT: "timed out",
    Status.FLAKY: "flaky",
    Status.SKIPPED: "skipped",
    Status.XFAILED: "failed as expected",
    Status.XPASSED: "passed unexpectedly",
}


def counted_statuses(counts: JsonObject) -> str:
    """Return, for example, "412 passed, 2 failed, 1 flaky"."""
    return ", ".join(f"{counts[status]:,} {shown}" for status, shown in _SHOWN.items() if counts.get(status))
