"""What a worker sent as a result and its workload cannot read: the item counts as failed.

The coordinator stores results unread. Every reader of the commit log judges them here, by their bytes alone, so that
each command decides alike, today and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from rollout.model.errors import InvalidResultError
from rollout.model.item import Failure, Outcome
from rollout.workloads.commit import CommitEntry

Lines = Callable[[CommitEntry], Iterable[tuple[str, bytes]]]
"""As `Writer.lines`."""


def lines_of(lines: Lines, entry: CommitEntry) -> tuple[CommitEntry, list[tuple[str, bytes]]]:
    """All that `entry` becomes in the files, and `entry` as it counts."""
    try:
        return entry, list(lines(entry))
    except InvalidResultError as error:
        counted = as_failed(entry, error)
        return counted, list(lines(counted))


def as_failed(entry: CommitEntry, error: InvalidResultError) -> CommitEntry:
    """`entry` of which the result is invalid."""
    failure = Failure(error.code, error.message, retryable=False)
    return replace(entry, outcome=Outcome.FAILED, data=b"", failure=failure)
