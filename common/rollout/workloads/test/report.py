"""Reports for the user: a line for each failure, and at the end all failures again with their output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rollout.workloads.test.cases import GOOD, CaseResult, Status, Try
from rollout.workloads.test.result_lines import RESULTS, Line, read_lines

_TOLD = 50
"""Number of failures that are repeated in full."""
_TEXT_MAX = 20_000
_WORD = {
    Status.FAILED: "FAIL",
    Status.ERROR: "ERROR",
    Status.CRASHED: "CRASH",
    Status.TIMEOUT: "TIMEOUT",
    Status.FLAKY: "FLAKY",
}


def remark(result: CaseResult) -> str:
    """Return a remark on a test that did not simply pass, else ""."""
    word = _WORD.get(result.status)
    if word is None:
        return ""
    seconds = sum(one.seconds for one in result.tries)
    of = f" (try {len(result.tries)})" if len(result.tries) > 1 else ""
    return f"{word:>8} [{seconds:8.3f} s] {result.id}{of}"


def failures_told(directory: Path) -> list[str]:
    """Return a text for each failed test of the run whose files are there, with annotations on GitHub."""
    told: list[str] = []
    more = 0
    annotations: list[str] = []
    for line in read_lines(directory / RESULTS):
        if line.result.status not in _WORD:
            continue
        if annotation := _annotation(line):
            annotations.append(annotation)
        if line.result.status is Status.FLAKY:
            continue
        if len(told) < _TOLD:
            told.append(failure_text(line))
        else:
            more += 1
    if more:
        told.append(f"and {more:,} more failures: `rollout test logs --failures` shows all of them")
    return [*told, *annotations]


def failure_text(line: Line) -> str:
    """Return the last failed try, below a banner."""
    result = line.result
    waived = f", in quarantine {line.quarantined}" if line.quarantined else ""
    return "\n".join([f"=== {result.id} [{result.status.value.upper()}{waived}] ===", *_parts(_shown(result))])


def _shown(result: CaseResult) -> Try:
    bad = [one for one in result.tries if one.outcome not in GOOD]
    return bad[-1] if bad else result.tries[-1]


def _parts(one: Try) -> Iterator[str]:
    where = f"{one.phase}: " if one.phase in ("setup", "teardown") else ""
    if one.details:
        yield _cut(one.details.rstrip("\n"))
    elif one.message:
        yield f"{where}{one.message}"
    for name, text in (("stdout", one.stdout), ("stderr", one.stderr)):
        if text.strip():
            yield f"--- {name} ---"
            yield _cut(text.rstrip("\n"))


def _cut(text: str) -> str:
    if len(text) <= _TEXT_MAX:
        return text
    half = _TEXT_MAX // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _annotation(line: Line) -> str:
    """Return a workflow command of GitHub Actions, or "" elsewhere."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return ""
    result, case = line.result, line.case
    level = "error" if line.fails else "warning"
    at = [f"file={_property(case.file)}"] if case.file else []
    at += [f"line={case.line}"] if case.line else []
    at.append(f"title={_property(f'{result.id} ({result.status.value})')}")
    return f"::{level} {','.join(at)}::{_data(_shown(result).message or result.status.value)}"


def _data(text: str) -> str:
    """Escape text for the runner of GitHub Actions."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
