"""Short ways to write the core's rows in tests of the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollout.model.item import DEFAULT_SPEC, AttemptEnd, Blob, Failure, Outcome
from rollout.model.run import Order, RunSpec, RunState
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.step import (
    AssignmentRow,
    AttemptRow,
    ItemRows,
    LoadPending,
    LogRow,
    ResultRows,
    RunRow,
    SpecRow,
    Writes,
)
from rollout_coordinator.ledger import Fence, LeaseRow, Ledger

RUN = "01J00000000000000000000001"
WORKER = "01J0000000000000000000000W"


class Writer:
    """Commits under the lease, counting batches as the driver does."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.fence = Fence(0, 0)

    async def lead(self) -> None:
        assert await self.ledger.insert_lease(LeaseRow("me", 0, 0, 0, False, "here:1"))

    async def commit(self, writes: Writes) -> None:
        await self.ledger.commit(self.fence, writes)
        self.fence = Fence(self.fence.epoch, self.fence.batch + 1)

    async def run(self, items: int = 0, run_id: str = RUN, log: int = 1, **options: Any) -> None:
        writes = Writes()
        writes.runs[run_id] = run_row(run_id, log=log, **options)
        writes.logs[log] = log_row(log, run_id, submitted=items)
        writes.specs.append(SpecRow(run_id, 0, spec=options.get("item_spec") or DEFAULT_SPEC))
        if items:
            writes.items.append(item_rows(log, items))
        await self.commit(writes)


def run_row(
    run_id: str = RUN,
    *,
    log: int = 1,
    state: RunState = RunState.RUNNING,
    order: Order = Order.SCHEDULE,
    created_ms: int = 1,
    spec: RunSpec | None = None,
    **_: Any,
) -> RunRow:
    return RunRow(spec or RunSpec(run_id, "infer", b"{}", order=order), state, "", log, created_ms, created_ms, 0)


def log_row(log: int = 1, run_id: str = RUN, *, submitted: int = 0, cursor: int = 0, parent: tuple[int, int] = (0, 0)):
    return LogRow(log, run_id, *parent, submitted, False, cursor, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def item_id(seq: int) -> bytes:
    return seq.to_bytes(32, "big")


def item_rows(log: int, n: int, first: int = 0, payloads: Sequence[Blob] | None = None) -> ItemRows:
    seqs = range(first, first + n)
    return ItemRows(log, first, [item_id(s) for s in seqs], list(payloads or [b"p%d" % s for s in seqs]), [0] * n)


def result_rows(
    seqs: Iterable[int],
    *,
    log: int = 1,
    attempt: int = 1,
    outcome: Outcome = Outcome.DONE,
    data: Sequence[Blob] | None = None,
    failures: dict[int, Failure] | None = None,
    position: list[int] | None = None,
) -> ResultRows:
    seq = list(seqs)
    n = len(seq)
    return ResultRows(
        log, seq, [attempt] * n, [outcome] * n, list(data or [b"r%d" % s for s in seq]), failures or {}, [7] * n,
        [3] * n, [4] * n, WORKER, 99, position,
    )  # fmt: skip


def assignment(batch: int, *groups: tuple[int, Sequence[int], int]) -> AssignmentRow:
    """Groups of (log, seqs, attempt)."""
    return AssignmentRow(
        batch, WORKER, 5, [Keys(log, list(seqs), [attempt] * len(seqs)) for log, seqs, attempt in groups]
    )


def attempt_row(seq: int, end: AttemptEnd, attempt: int = 1, log: int = 1, not_before_ms: int = 0) -> AttemptRow:
    return AttemptRow(log, seq, attempt, WORKER, end, "code", "message", 6, not_before_ms)


def load_pending(from_seq: int = 0, limit: int = 100, max_bytes: int = 1 << 20, log: int = 1) -> LoadPending:
    return LoadPending(1, log, from_seq, limit, max_bytes)
