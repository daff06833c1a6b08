"""A ledger of plain dicts that applies Writes the way the tables would, and complains where a table would."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from rollout.model.item import Outcome, limits_of
from rollout.model.run import ENDED, Order
from rollout.model.worker import WorkerState
from rollout_coordinator.core.events import IdsLoaded, Loaded, PendingItem, ResultsLoaded, RunLoaded
from rollout_coordinator.core.step import (
    HELD,
    LoadIds,
    LoadItems,
    LoadPending,
    LoadResults,
    LoadRun,
    OpenAttempt,
    Snapshot,
    Writes,
)


class FakeLedger:
    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self.logs: dict[int, Any] = {}
        self.lanes: dict[tuple[str, str], Any] = {}
        self.specs: dict[tuple[str, int], Any] = {}
        self.items: dict[int, list[tuple[bytes, Any, int]]] = {}
        self.results: dict[int, dict[int, tuple[int, Outcome, Any, Any]]] = {}
        self.assignments: dict[int, Any] = {}
        self.attempts: dict[tuple[int, int, int], Any] = {}
        self.workers: dict[str, Any] = {}
        self.kept: dict[tuple[int, int], tuple[bytes, ...]] = {}
        self.held: dict[tuple[int, int], set[bytes]] = {}
        self.next_batch = 1
        self.next_log = 1

    def commit(self, w: Writes) -> None:
        for run_id in w.deleted_runs:
            dead = {n for n, row in self.logs.items() if row.run_id == run_id}
            for log in dead:
                del self.logs[log]
                self.items.pop(log, None)
                self.results.pop(log, None)
            self.runs.pop(run_id, None)
            self.lanes = {key: row for key, row in self.lanes.items() if key[0] != run_id}
            self.specs = {key: row for key, row in self.specs.items() if key[0] != run_id}
        self.runs.update(copy.deepcopy(w.runs))
        self.logs.update(w.logs)
        self.next_log = max([self.next_log, *(n + 1 for n in w.logs)])
        self.lanes.update(w.lanes)
        for s in w.specs:
            known = self.specs.get((s.run_id, s.index), s)
            assert replace(known.spec, **limits_of(s.spec)._asdict()) == s.spec, "limits alone may change"
            self.specs[s.run_id, s.index] = s
        for rows in w.items:
            items = self.items.setdefault(rows.log, [])
            assert len(items) == rows.first_seq, "rows are contiguous"
            items.extend(zip(rows.ids, rows.payloads, rows.spec, strict=True))
        for row in w.assignments:
            assert row.batch >= self.next_batch
            self.next_batch = row.batch + 1
            for keys in row.keys:
                for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                    assert not self.open_of(keys.log, seq), f"{keys.log}/{seq} is already in flight"
                    assert seq not in self.results.get(keys.log, {}), "has a result already"
                    assert attempt > self.highest(keys.log, seq)
            self.assignments[row.batch] = copy.deepcopy(row)
            self.index(row)
        for a in w.attempts:
            assert (a.log, a.seq, a.attempt) not in self.attempts
            self.attempts[a.log, a.seq, a.attempt] = a
            self.top[a.log, a.seq] = max(self.top.get((a.log, a.seq), 0), a.attempt)
            if a.left.keeps:
                self.kept[a.log, a.seq] = (*self.kept.get((a.log, a.seq), ()), *a.left.keeps)
        for r in w.results:
            table = self.results.setdefault(r.log, {})
            for i, seq in enumerate(r.seq):
                assert seq not in table, f"second result for {r.log}/{seq}"
                assert seq < len(self.items[r.log])
                table[seq] = (r.attempt[i], r.outcome[i], r.data[i], r.failures.get(i))
            for i, objects in r.keeps.items():
                self.kept[r.log, r.seq[i]] = (*self.kept.get((r.log, r.seq[i]), ()), *objects)
        for log, seq in w.released:
            del self.kept[log, seq]
        for one in w.held:
            self.held[one.log, one.seq] = {*self.held.get((one.log, one.seq), ()), one.object_id}
        for log, seq, one in w.released_held:
            self.held[log, seq].remove(one)
        for log, seq, attempt in w.released_attempts:
            if attempt == HELD:
                del self.held[log, seq]
                continue
            gone = self.attempts[log, seq, attempt].left.keeps
            self.kept[log, seq] = tuple(one for one in self.kept[log, seq] if one not in gone)
        for log, seq, _ in w.prune:
            attempt, _, data, failure = self.results[log][seq]
            self.results[log][seq] = (attempt, Outcome.SKIPPED, data, failure)
        for batch in w.retired:
            row = self.assignments.pop(batch)
            for keys in row.keys:
                for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                    if keys.log in self.logs:
                        assert not self.is_open(keys.log, seq, attempt), "a batch with an open attempt was retired"
        self.workers.update(w.workers)
        for n in w.logs:
            self.check_log(n)

    @property
    def top(self) -> dict[tuple[int, int], int]:
        return self.__dict__.setdefault("_top", {})

    @property
    def last(self) -> dict[tuple[int, int], tuple[int, int]]:
        return self.__dict__.setdefault("_last", {})

    def index(self, row: Any) -> None:
        for keys in row.keys:
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                self.last[keys.log, seq] = (row.batch, attempt)

    def is_open(self, log: int, seq: int, attempt: int) -> bool:
        return seq not in self.results.get(log, {}) and (log, seq, attempt) not in self.attempts

    def open_of(self, log: int, seq: int) -> bool:
        batch, attempt = self.last.get((log, seq), (0, 0))
        return batch in self.assignments and self.is_open(log, seq, attempt)

    def highest(self, log: int, seq: int) -> int:
        return max(self.top.get((log, seq), 0), 0)

    def check_log(self, n: int) -> None:
        row = self.logs[n]
        table = self.results.get(n, {})
        assert row.submitted == len(self.items.get(n, []))
        counts = [sum(1 for v in table.values() if v[1] == o) for o in (1, 2, 3, 4)] if len(table) < 500 else None
        if counts is not None:
            assert counts == [row.done, row.failed, row.cancelled, row.skipped], (n, counts, row)
        run = self.runs[row.run_id]
        if run.spec.order is Order.SCHEDULE or row.parent_log:
            assert all(seq in table for seq in range(max(0, row.cursor - 300), row.cursor)), "cursor over a hole"
        else:
            assert row.cursor <= len(table)

    # ---- reads

    def history(self, log: int, seq: int) -> tuple[tuple[int, int, int, int, int], tuple[str, str]]:
        rows = [a for k, a in self.attempts.items() if k[0] == log and k[1] == seq]
        failed = sorted((a.attempt, a.worker, a.code) for a in rows if a.end in ("failed", "timeout"))
        numbers = (
            max([a.attempt for a in rows], default=0),
            len(failed),
            sum(a.end == "worker_lost" for a in rows),
            max([a.not_before_ms for a in rows], default=0),
            max([a.not_before_ms - a.at_ms for a in rows if a.not_before_ms], default=0),
        )
        return numbers, failed[-1][1:] if failed else ("", "")

    def item(self, log: int, seq: int) -> PendingItem:
        item, payload, spec = self.items[log][seq]
        if (log, seq) not in self.top:
            return PendingItem(seq, item, spec, payload)
        numbers, last = self.history(log, seq)
        return PendingItem(seq, item, spec, payload, *numbers, *last)

    def answer(self, load: Any) -> Any:
        if isinstance(load, LoadRun):
            return RunLoaded(load.load_id, load.run_id, self.run_snapshot(load.run_id))
        items, table = self.items.get(load.log, []), self.results.get(load.log, {})
        if isinstance(load, LoadPending):
            seqs = [s for s in range(load.from_seq, len(items)) if s not in table]
            page = seqs[: load.limit]
            end = len(page) == len(seqs)
            return Loaded(
                load.load_id,
                load.log,
                [self.item(load.log, s) for s in page],
                page[-1] + 1 if page else len(items),
                end,
            )
        if isinstance(load, LoadItems):
            return Loaded(load.load_id, load.log, [self.item(load.log, s) for s in load.seqs], 0, False)
        if isinstance(load, LoadIds):
            ids = [i[0] for i in items[load.first_seq : load.first_seq + load.count]]
            return IdsLoaded(load.load_id, load.log, load.first_seq, ids)
        assert isinstance(load, LoadResults)
        seqs = [s for s in range(load.first_seq, load.first_seq + load.limit) if s in table]
        return ResultsLoaded(
            load.load_id, load.log, load.first_seq, seqs, [table[s][1] for s in seqs], [items[s][2] for s in seqs],
            [table[s][2] for s in seqs] if load.with_data else [b""] * len(seqs),
            {i: table[s][3] for i, s in enumerate(seqs) if table[s][3]}, [table[s][0] for s in seqs],
        )  # fmt: skip

    def snapshot(self) -> Snapshot:
        """What a new leader replays: ended runs stay on disk."""
        live = {run_id for run_id, row in self.runs.items() if row.state not in ENDED or row.survivors}
        snap = self._snapshot_of(live)
        snap.workers = [w for w in self.workers.values() if w.state in (WorkerState.READY, WorkerState.DRAINING)]
        logs = {row.log for row in snap.logs}
        for row in self.assignments.values():
            for keys in row.keys:
                for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                    if keys.log in logs and self.is_open(keys.log, seq, attempt):
                        (_, failures, losses, _, _), last = self.history(keys.log, seq)
                        spec = self.items[keys.log][seq][2]
                        snap.open_attempts.append(
                            OpenAttempt(keys.log, seq, attempt, row.worker, row.batch, spec, failures, losses, *last)
                        )
        return snap

    def run_snapshot(self, run_id: str) -> Snapshot | None:
        """One run in any state; no workers, no open attempts."""
        return self._snapshot_of({run_id}) if run_id in self.runs else None

    def _snapshot_of(self, runs: set[str]) -> Snapshot:
        logs = {n: row for n, row in self.logs.items() if row.run_id in runs}
        return Snapshot(
            runs=[copy.deepcopy(r) for i, r in self.runs.items() if i in runs],
            logs=[copy.copy(r) for r in logs.values()],
            lanes=[r for (i, _), r in self.lanes.items() if i in runs],
            specs=[s for (i, _), s in self.specs.items() if i in runs],
            accepted={
                n: self._accepted(n, row.cursor)
                for n, row in logs.items()
                if self.runs[row.run_id].spec.order is Order.SCHEDULE or row.parent_log
            },
            won=[won for n, row in logs.items() if not row.parent_log for won in self._won(n, row)],
            next_log=self.next_log,
            next_batch=self.next_batch,
        )

    def _won(self, log: int, row: Any) -> list[tuple[int, int, int]]:
        """Of each spec that is in a group, the first item that is done and committed."""
        schedule = self.runs[row.run_id].spec.order is Order.SCHEDULE
        first: dict[int, int] = {}
        for seq, result in sorted(self.results.get(log, {}).items()):
            spec = self.items[log][seq][2]
            if (
                result[1] is Outcome.DONE
                and self.specs[row.run_id, spec].spec.group
                and (not schedule or seq < row.cursor)
            ):
                first.setdefault(spec, seq)
        return [(log, spec, seq) for spec, seq in first.items()]

    def _accepted(self, log: int, cursor: int) -> list[tuple[int, int]]:
        """Ranges of results at the cursor and behind it."""
        ranges: list[tuple[int, int]] = []
        for seq in sorted(s for s in self.results.get(log, {}) if s >= cursor):
            if ranges and ranges[-1][1] == seq - 1:
                ranges[-1] = (ranges[-1][0], seq)
            else:
                ranges.append((seq, seq))
        return ranges
