"""Decides which of a run's snapshots are kept: the newest, those with a label, none that is too old.

The coordinator applies it whenever the run makes a newer one (policy `keep_objects`), and so does `rollout snapshot
prune`. The newest is always kept, because the run continues from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.model.run import Policy
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.config import SnapshotsSection


def retention(snapshots: JsonObject, *, samples: bool = False) -> tuple[Policy, ...]:
    """Return the policies for this section of a run's configuration. Objects of the first item are the data, which are
    kept. With `samples`, the last object of each segment has its samples and is kept too."""
    section = SnapshotsSection.model_validate(snapshots)
    options = [("last", str(section.keep_last))] if section.keep_last else []
    if section.max_age_s is not None:
        options.append(("max_age_s", str(section.max_age_s)))
    # The label is the last snapshot's, after which nothing is let go: while the run lasts nothing has one.
    spared = [("spare", "1")] if samples else []
    return (Policy("keep_objects", (*options, ("from", "1"), *spared)),) if options else ()


def outdated(
    snapshots: Sequence[tuple[int, str]], now_ms: int, *, keep_last: int, keep_labeled: bool, max_age_s: int | None
) -> list[int]:
    """Return the indexes of outdated snapshots. `snapshots` are (creation time, label), oldest first; `keep_last` 0
    keeps all."""
    gone: list[int] = []
    for index, (made_ms, label) in enumerate(snapshots[:-1]):
        beyond = bool(keep_last) and index < len(snapshots) - keep_last
        old = max_age_s is not None and now_ms - made_ms > max_age_s * 1000
        if (beyond or old) and not (label and keep_labeled):
            gone.append(index)
    return gone
