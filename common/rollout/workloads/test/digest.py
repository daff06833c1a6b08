"""Tests of a run as their batches end: failures, flaky and slow tests, and which process ran what when."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence

from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Archive, Link, Part, Sheet, Span, Text, Timeline
from rollout.workloads.json_form import JsonObject
from rollout.workloads.test.cases import BatchResult, CaseResult, Status
from rollout.workloads.test.lines import results_of

_FAILURES, _SLOWEST, _SPANS = 200, 20, 2_000
_BAD = frozenset({Status.FAILED, Status.ERROR, Status.CRASHED, Status.TIMEOUT})


class TestsDigest:
    """Collects the `Digest` of tests."""

    __test__ = False

    def __init__(self) -> None:
        self._counts: Counter[Status] = Counter()
        self._bad: deque[tuple[CaseResult, int]] = deque(maxlen=_FAILURES)
        self._flaky: deque[tuple[CaseResult, int]] = deque(maxlen=_FAILURES)
        self._slowest: list[tuple[float, int, str]] = []
        self._spans: list[tuple[float, float, str, str, bool]] = []
        self._cached = 0
        self._left_out = 0

    def add(self, entry: CommitEntry) -> None:
        for case in results_of(entry).cases:
            self._counts[case.status] += 1
            if case.status in _BAD:
                self._bad.append((case, entry.seq))
            elif case.status is Status.FLAKY:
                self._flaky.append((case, entry.seq))
            own = [one for one in case.tries if not one.cached]
            self._cached += not own
            if own:
                heapq.heappush(self._slowest, (max(one.seconds for one in own), entry.seq, case.id))
                if len(self._slowest) > _SLOWEST:
                    heapq.heappop(self._slowest)
            for one in own:
                if len(self._spans) < _SPANS:
                    lane = f"{one.worker} {one.process}".strip()
                    good = case.status not in _BAD
                    self._spans.append((one.started, one.started + one.seconds, case.id, lane, good))
                else:
                    self._left_out += 1

    def parts(self, figures: JsonObject) -> Sequence[Part]:
        if not self._counts:
            return ()
        counts = [(status.value, f"{count:,}") for status, count in self._counts.most_common()]
        counts += [("taken from an earlier run", f"{self._cached:,}")] if self._cached else []
        parts: list[Part] = [Sheet("Tests", ("outcome", "tests"), counts)]
        for title, found in (("Failed tests", self._bad), ("Flaky tests", self._flaky)):
            if found:
                rows = [(Link(case.id, seq), case.status.value, _message(case)) for case, seq in found]
                parts.append(Sheet(title, ("test", "outcome", "message"), rows))
        slow = [(Link(name, seq), f"{seconds:,.2f} s") for seconds, seq, name in sorted(self._slowest, reverse=True)]
        if slow:
            parts.append(Sheet("Slowest tests", ("test", "time"), slow))
        if self._spans:
            first = min(begin for begin, *_ in self._spans)
            spans = [Span(text, begin - first, end - first, lane, good) for begin, end, text, lane, good in self._spans]
            note = f"{self._left_out:,} more tries are not drawn." if self._left_out else ""
            parts.append(Timeline("Processes over time", sorted(spans, key=lambda one: (one.lane, one.begin_s)), note))
        return parts


def batch_parts(result: BatchResult) -> Sequence[Part]:
    """Return a batch's tests, the messages and output of those that failed, and the files that they left."""
    rows = [
        (case.id, case.status.value, f"{len(case.tries)}", f"{sum(one.seconds for one in case.tries):,.3f} s")
        for case in result.cases
    ]
    parts: list[Part] = [Sheet("Tests of this batch", ("test", "outcome", "tries", "time"), rows)]
    for case in result.cases:
        if case.status in _BAD or case.status is Status.FLAKY:
            for number, one in enumerate(case.tries, start=1):
                said = "\n".join(text for text in (one.details or one.message, one.stdout, one.stderr) if text.strip())
                parts.append(Text(f"{case.id}, try {number}: {one.outcome.value}", said))
    if result.files:
        parts.append(Archive("Files that its tests left", result.files))
    return parts


def _message(case: CaseResult) -> str:
    return next((one.message for one in reversed(case.tries) if one.message), "")[:300]
