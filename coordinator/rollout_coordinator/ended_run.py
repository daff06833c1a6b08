"""An ended run as the core wants it back: for a client that submits, continues or deletes it after a restart."""

from __future__ import annotations

from rollout_coordinator.core.step import LaneRow, LogRow, RunRow, Snapshot
from rollout_coordinator.core.views import RunView


def snapshot_of(view: RunView) -> Snapshot:
    """The run and its root log, with nothing in flight: an ended run has no more."""
    run = RunRow(
        spec=view.spec,
        state=view.state,
        reason=view.reason,
        root_log=view.root_log,
        created_ms=view.created_ms,
        updated_ms=view.updated_ms,
        ended_ms=view.ended_ms,
        survivors=view.survivors,
        priority=view.priority,
    )
    root = LogRow(
        log=view.root_log,
        run_id=view.spec.run_id,
        parent_log=0,
        parent_seq=0,
        submitted=view.submitted,
        sealed=view.sealed,
        cursor=view.cursor,
        done=view.done,
        failed=view.failed,
        cancelled=view.cancelled,
        skipped=view.skipped,
        attempts=view.attempts,
        retried=view.retried,
        worker_lost=view.worker_lost,
        stale=view.stale,
        units_in=view.units_in,
        units_out=view.units_out,
    )
    lanes = [
        LaneRow(view.spec.run_id, lane.name, lane.done, lane.failed, lane.consecutive_failures, lane.pruned_at)
        for lane in view.lanes
    ]
    return Snapshot(runs=[run], logs=[root], lanes=lanes)
