"""Remarks of trials' records for the user, for example about an image that was not built."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.workloads.commit import CommitEntry
from rollout.workloads.job.outcome import record_of
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject


class Remarks:
    """Yields each text once per run."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def of(self, entry: CommitEntry) -> Iterator[tuple[str, str, JsonObject]]:
        """Yield remarks as `Workload.remarks` does."""
        if not entry.data:
            return
        spec = TrialSpec.decode(entry.payload)
        record = record_of(entry, spec)
        for text in record.remarks if record is not None else ():
            if text not in self._told:
                self._told.add(text)
                yield "remark", f"note: {spec.label}: {text}", {"trial": spec.label, "text": text}
