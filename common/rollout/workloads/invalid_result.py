"""Results of workers that their workload cannot read: the item counts as failed.

The coordinator stores results unread. Every reader of the commit log judges them here, by their bytes alone, so that
all commands agree, also after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from rollout.model.errors import InvalidResultError
from rollout.model.item import Failure, Outcome
from rollout.workloads.commit import CommitEntry

Lines = Callable[[CommitEntry], Iterable[tuple[str, bytes]]]
"""The signature of `Writer.lines`."""


def lines_of(lines: Lines, entry: CommitEntry) -> tuple[CommitEntry, list[tuple[str, bytes]]]:
    """Return `entry` as it counts, and all its lines in the files."""
    try:
        return entry, list(lines(entry))
    except InvalidResultError as error:
        counted = as_failed(entry, error)
        return counted, list(lines(counted))


def as_failed(entry: CommitEntry, error: InvalidResultError) -> CommitEntry:
    """Return `entry` as failed, because its result is invalid."""
    failure = Failure(error.code, error.message, retryable=False)
    return replace(entry, outcome=Outcome.FAILED, data=b"", failure=failure)
