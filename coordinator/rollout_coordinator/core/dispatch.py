"""Who gets what. Constraints are looked at once per spec queue; then as many items are taken as all of them allow.

A queue that cannot go on whatever the worker is parked at what blocks it (its lane, its chain, its `not_before`, the
commit horizon) and comes back when that moves, so that a pass costs what it hands out.
"""

from __future__ import annotations

import heapq
from itertools import accumulate

from rollout.model.item import Blob, ItemState
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core.attempts import open_grant
from rollout_coordinator.core.chains import may_go, predecessor
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.prefer import limit_of_order, prefer, served, within
from rollout_coordinator.core.room import UNLIMITED, fits, has_enough, only_children, room, strict_room
from rollout_coordinator.core.state import FRESH, ROOT_RANK, Batch, Grant, History, Run, Shape, SpecQueue, State, Worker
from rollout_coordinator.core.step import AssignGroup, AssignmentRow, SendAssign
from rollout_coordinator.core.tables import ITEM
from rollout_coordinator.core.turn import Turn
from rollout_coordinator.core.window import count, enlist, landed, unpark

PASSES = 64  # frames to one worker in one step, at most


class Frame:
    """One SendAssign and its assignment row, under construction."""

    __slots__ = ("batch", "bytes_left", "groups", "items_left", "worker")

    def __init__(self, c: State, worker: Worker) -> None:
        self.worker = worker
        self.batch = Batch(c.next_batch)
        self.groups: dict[int, AssignGroup] = {}
        self.items_left = c.settings.assign_items_max
        self.bytes_left = c.settings.assign_bytes_max


def dispatch(c: State) -> None:
    """Hand out what can be handed out."""
    c.dirty = False
    for queue in c.chain_waits:  # set aside for a worker that did not come in time
        enlist(queue)
    c.chain_waits.clear()
    if not c.hungry and not c.resting:
        return
    runs = [r for r in c.runs.values() if r.state is RunState.RUNNING and any(s.heap for s in r.shapes.values())]
    if c.resting and (not runs or any(s.heap and s not in c.rested_for for r in runs for s in r.shapes.values())):
        c.hungry.update(c.resting)
        c.resting.clear()
        c.rested_for = frozenset()  # it holds runs that may be over
    workers = [w for w in c.hungry.values() if w.session and w.state is WorkerState.READY and not w.fenced]
    if not runs or not workers:
        return
    workers.sort(key=load)
    all_of_it = sum(map(load, workers)) + sum(run.window for run in runs)
    level = -(-all_of_it // len(workers))
    turn = Turn(runs)
    aside = feed_all(c, workers, turn, level, soft=True)
    if len(workers) > 1:
        aside = feed_all(c, workers, turn, UNLIMITED, soft=True) or aside
    if aside:
        feed_all(c, workers, turn, UNLIMITED, soft=False)


def load(worker: Worker) -> int:
    return worker.in_flight - worker.waiting


def feed_all(c: State, workers: list[Worker], turn: Turn, level: int, soft: bool) -> bool:
    """Those first that have least, until they have as much as all have when it is handed out. A worker that has much is
    given more at once: beside the rows that it runs now, one more is not worth a message."""
    aside = False
    for worker in workers:
        left = max(1, level - load(worker), load(worker) // 2)
        for _ in range(PASSES):
            if not turn.wanted_by(worker):
                break
            if turn.is_full(worker):
                rest(c, worker, turn)
                break
            frame = Frame(c, worker)
            frame.items_left = most = min(frame.items_left, left)
            aside = feed(c, frame, turn, soft) or aside
            if not frame.groups:
                break
            send(c, frame)
            left -= most - frame.items_left
            if left <= 0:
                break
    return aside


def rest(c: State, worker: Worker, turn: Turn) -> None:
    """It is full, and not asked again before it says or ends something; or, if only of what there is now, before items
    of another shape are pending."""
    c.hungry.pop(worker.id, None)
    if not has_enough(worker):
        c.resting[worker.id] = worker
        c.rested_for = turn.shapes


def feed(c: State, frame: Frame, turn: Turn, soft: bool) -> bool:
    """Fill one frame, smallest share first. True if something was set aside that a less choosy pass could take."""
    worker, aside = frame.worker, False
    heap, shares = turn.heap, turn.shares(worker)
    while heap and frame.items_left > 0 and frame.bytes_left > 0:
        run = heap[0][-1]
        n = min(room(worker, run, turn.held), frame.items_left)
        share = shares.of(run) if n > 0 and shares is not None else None
        if share is not None:
            n = min(n, share - worker.holds.get(run.id, 0))
        if run.spec.max_in_flight:
            n = min(n, run.spec.max_in_flight - run.in_flight)
        if n > 0 and len(heap) > 1:
            n = max(1, n // 4)
        taken = 0
        if n > 0:
            taken, left = take_from_run(c, frame, run, n, soft)
            aside = aside or left
        if taken:
            turn.took()
            if turn.is_full(worker):
                break
        else:
            turn.skip()
            if not heap and shares is not None and worker.in_flight - worker.waiting < worker.credit.items // 2:
                shares = None  # what the others cannot use now is no reason to idle
                turn.again()
    turn.again()
    return aside


def take_from_run(c: State, frame: Frame, run: Run, n: int, soft: bool) -> tuple[int, bool]:
    worker, taken = frame.worker, 0
    aside: list[SpecQueue] = []
    first_aside = ROOT_RANK  # the least of their heads
    roots: list[SpecQueue] = []  # not for this worker, and no reason to hold back what comes after them
    no_roots = only_children(c, worker, run)
    shapes = [s for s in run.shapes.values() if s.heap and fits(worker, s)]
    while n > 0 and frame.bytes_left > 0:
        best: Shape | None = None
        for shape in shapes:
            if not shape.heap or (shape.strict and strict_room(worker, shape) <= 0):
                continue
            if best is None or shape.heap[0] < best.heap[0]:
                best = shape
        if best is None:
            break
        if no_roots and best.heap[0][1] == ROOT_RANK:
            roots.append(heapq.heappop(best.heap)[-1])
            continue
        limit = limit_of_order(c, best, first_aside) if best.prefs is not None else ROOT_RANK
        queue = prefer(best, worker, limit) if best.prefs is not None and soft else None
        if queue is not None:  # it stays in the heap
            most = within(queue, limit)
            if best.strict:
                most = min(most, strict_room(worker, best))
            got = take(c, frame, queue, min(n, most))
            n -= got
            taken += got
            if not got:
                break
            continue
        if not best.heap:
            continue
        if best.heap[0][2] > limit:
            break  # what was set aside must go first
        queue = heapq.heappop(best.heap)[-1]
        queue.queued = False
        if not queue.size or queue.log.closed:
            continue
        most = allowed(c, queue, worker, soft)
        if most < 0:  # not to this worker, now
            queue.queued = True
            aside.append(queue)
            first_aside = min(first_aside, queue.head())
            continue
        if most == 0:  # parked
            continue
        if best.prefs is not None:
            most = min(most, within(queue, limit))
        if best.strict:
            most = min(most, strict_room(worker, best))
        got = take(c, frame, queue, min(n, most))
        enlist(queue)
        n -= got
        taken += got
        if not got:
            break
    left = bool(aside)
    unpark(aside)
    unpark(roots)
    return taken, left


def allowed(c: State, queue: SpecQueue, worker: Worker, soft: bool) -> int:
    """Items of the queue that may go to the worker; 0: the queue was parked; -1: set it aside."""
    info, log = queue.info, queue.log
    spec, lane, most = info.spec, info.lane, UNLIMITED
    if spec.not_before_ms > c.now.wall_ms:
        queue.queued = True
        c.next_grant += 1
        heapq.heappush(c.timers, (spec.not_before_ms, c.next_grant, log.id, queue))
        c.wake_by(c.now.mono + (spec.not_before_ms - c.now.wall_ms) / 1000)
        return 0
    if lane.cap:
        most = lane.cap - lane.in_flight
        if most <= 0:
            queue.queued = True
            lane.parked.append(queue)
            return 0
    if log.run.tracked and log.parent is None:
        beyond = log.cursor + c.settings.commit_horizon - queue.head()
        if beyond <= 0:
            queue.queued = True
            log.parked.append(queue)
            return 0
        most = min(most, beyond)
    if queue.chain is not None:
        verdict = may_go(c, queue, worker)
        if verdict == "park":
            queue.queued = True
            queue.chain.parked.append(queue)
            return 0
        if verdict == "aside":
            return -1
        return 1
    if soft and wanted_elsewhere(c, queue, worker):
        return -1
    return most


def wanted_elsewhere(c: State, queue: SpecQueue, worker: Worker) -> bool:
    """Another worker that takes work now is the better place: it asked for the item, or last ran its affinity key."""
    want = ""
    if queue.retry and queue.retry[0][0] == queue.head():
        want = queue.retry[0][3].to
    if not want and queue.info.spec.affinity:
        want = queue.log.run.warm.get(queue.info.spec.affinity, "")
    if not want or want == worker.id:
        return False
    other = c.hungry.get(want)
    return (
        other is not None
        and bool(other.session)
        and other.state is WorkerState.READY
        and room(other, queue.log.run) > 0
    )


def take(c: State, frame: Frame, queue: SpecQueue, n: int) -> int:
    """Move up to `n` items, of one history, from the head of the queue into the frame."""
    chunk = queue.chunks[0] if queue.chunks else None
    if queue.retry and (chunk is None or queue.retry[0][0] < chunk.seqs[chunk.pos]):
        seq, item, payload, history = queue.retry[0]
        if not fits_bytes(frame, len(payload)):
            return 0
        heapq.heappop(queue.retry)
        landed(c, history)
        give(c, frame, queue, [seq], [item], [payload], history, len(payload))
        return 1
    assert chunk is not None
    first, last = chunk.pos, min(chunk.pos + n, len(chunk.seqs))
    payloads = chunk.payloads[first:last]
    size = sum(map(len, payloads))
    budget = min(frame.bytes_left, frame.worker.credit.bytes - frame.worker.bytes)
    if size > budget:
        fitting = 0
        for fitting, total in enumerate(accumulate(map(len, payloads))):  # noqa: B007
            if total > budget:
                break
        if not fitting and not fits_bytes(frame, len(payloads[0])):
            return 0
        last = first + max(1, fitting)
        payloads = chunk.payloads[first:last]
        size = sum(map(len, payloads))
    seqs, ids = chunk.seqs[first:last], chunk.ids[first:last]
    chunk.pos = last
    if last == len(chunk.seqs):
        queue.chunks.popleft()
    give(c, frame, queue, seqs, ids, payloads, FRESH, size)
    return last - first


def fits_bytes(frame: Frame, size: int) -> bool:
    """An item larger than the budgets goes alone, to a worker that holds nothing."""
    worker = frame.worker
    if size <= frame.bytes_left and worker.bytes + size <= worker.credit.bytes:
        return True
    return not frame.groups and not worker.bytes


def give(
    c: State, frame: Frame, queue: SpecQueue, seqs: list[int], ids: list[bytes], payloads: list[Blob],
    history: History, size: int,
) -> None:  # fmt: skip
    ITEM.move(ItemState.PENDING, "assign")
    log, info, n, attempt = queue.log, queue.info, len(seqs), history.attempts + 1
    before = predecessor(queue) if queue.chain is not None else None
    c.next_grant += 1
    grant = Grant(
        c.next_grant, log, info, frame.worker, frame.batch, attempt, history.failures, history.losses, seqs, c.now.mono
    )
    open_grant(c, grant, size)
    queue.size -= n
    count(log, -n, -size)
    c.window_dirty[log.id] = log
    frame.items_left -= n
    frame.bytes_left -= size
    group = frame.groups.get(log.id)
    if group is None:
        group = frame.groups[log.id] = AssignGroup(log.id, log.run.id, log.parent, [], [], [], [], [], [], [])
    at = len(group.seq)
    group.seq += seqs
    group.attempt += [attempt] * n
    group.ids += ids
    group.payloads += payloads
    group.specs += [info.spec] * n
    if history.losses >= c.settings.isolate_after_losses:
        group.isolate.append(at)
    if queue.chain is not None:
        if before is not None:
            group.predecessors.append((at, *before))
            if queue.chain.flying:
                grant.pred = (before[0], before[1])
        queue.chain.flying[seqs[0]] = grant
    if info.spec.affinity:
        served(queue, frame.worker)
    c.totals["assigned"] += n


def send(c: State, frame: Frame) -> None:
    groups = list(frame.groups.values())
    c.next_batch += 1
    keys = [Keys(g.log, g.seq, g.attempt) for g in groups]
    c.step.writes.assignments.append(AssignmentRow(frame.batch.id, frame.worker.id, c.now.wall_ms, keys))
    c.step.sends.append(SendAssign(frame.worker.session, groups))
