"""Dispatch: which worker gets which items. Constraints are checked once per spec queue, then as many items are taken as
all of them allow.

The index has the candidates of a run for a worker (`index.Turn`), `judge` says how many items of one it may be
assigned, and `assign` adds them to the frame.
"""

from __future__ import annotations

import heapq
from itertools import accumulate

from rollout.model.item import NO_LIMIT, Blob
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core import object_retention
from rollout_coordinator.core.attempts import open_batch
from rollout_coordinator.core.capacity import (
    ASIDE,
    UNLIMITED,
    Verdict,
    free_credit,
    has_enough,
    idle,
    may_hold,
    parents_full,
    room_for_roots,
    room_to_horizon,
    strict_room,
    takes,
)
from rollout_coordinator.core.chains import may_run, predecessor
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.fair_share import FairShare
from rollout_coordinator.core.index import Turn, note_served, settle
from rollout_coordinator.core.queues import arrived, count
from rollout_coordinator.core.state import (
    FRESH,
    NEVER,
    Assignment,
    AttemptBatch,
    History,
    Run,
    SpecQueue,
    State,
    Worker,
)
from rollout_coordinator.core.step import AssignGroup, AssignmentRow, SendAssign

PASSES = 64  # frames to one worker in one step, at most


class Frame:
    """A SendAssign and its assignment row, under construction."""

    __slots__ = ("assignment", "bytes_left", "groups", "items_left", "worker")

    def __init__(self, state: State, worker: Worker) -> None:
        self.worker = worker
        self.assignment = Assignment(state.next_batch)
        self.groups: dict[int, AssignGroup] = {}
        self.items_left = state.settings.assign_items_max
        self.bytes_left = state.settings.assign_bytes_max


def dispatch(state: State) -> None:
    """Assign what can be assigned."""
    state.defer_until = NEVER
    if not state.ready and not state.parked:
        return
    running = (r for r in state.runs.values() if r.state is RunState.RUNNING)
    runs = [r for r in running if r.index.ready]
    if state.parked and (not runs or any(s not in state.rested_for for r in runs for s in r.index.ready)):
        state.ready.update(state.parked)
        state.parked.clear()
        state.rested_for = frozenset()  # it holds runs that may be over
    workers = [w for w in state.ready.values() if w.session and w.state is WorkerState.READY and not w.fenced]
    if not runs or not workers:
        return
    workers.sort(key=load)
    all_of_it = sum(map(load, workers)) + sum(run.window for run in runs)
    level = -(-all_of_it // len(workers))
    fair = FairShare(runs)
    aside = feed_all(state, workers, fair, level, soft=True)
    if len(workers) > 1:
        aside = feed_all(state, workers, fair, UNLIMITED, soft=True) or aside
    if aside:
        feed_all(state, workers, fair, UNLIMITED, soft=False)
    more = [r.root for r in runs if len(r.requirements) > 1 and r.root.window_end < r.root.submitted]
    if more and any(map(idle, workers)):  # there may be something for them beyond the window
        state.effects.window.update({log.id: log for log in more})


def remember_workers(state: State) -> None:
    """Update which workers may be assigned more, and which nothing, after the events of this step."""
    effects = state.effects
    for incarnation in effects.left:
        state.ready.pop(incarnation, None)
        state.parked.pop(incarnation, None)
    state.ready.update(effects.freed)


def load(worker: Worker) -> int:
    return worker.in_flight - worker.waiting


def feed_all(state: State, workers: list[Worker], fair: FairShare, level: int, soft: bool) -> bool:
    """Feed the workers that hold least, until they hold what all would if it were divided. A worker that holds much is
    given more at once: beside the rows that it runs, a single one is not worth a message."""
    aside = False
    for worker in workers:
        left = max(1, level - load(worker), load(worker) // 2)
        for _ in range(PASSES):
            if not fair.wanted_by(worker):
                break
            if fair.is_full(worker):
                rest(state, worker, fair)
                break
            frame = Frame(state, worker)
            frame.items_left = most = min(frame.items_left, left)
            aside = feed(state, frame, fair, soft) or aside
            if not frame.groups:
                break
            send(state, frame)
            left -= most - frame.items_left
            if left <= 0:
                break
    return aside


def rest(state: State, worker: Worker, fair: FairShare) -> None:
    """Set a full worker aside until it says or ends something; or, if only for present items, until items with other
    requirements are pending."""
    state.ready.pop(worker.id, None)
    if not has_enough(worker):
        state.parked[worker.id] = worker
        state.rested_for = fair.requirements


def feed(state: State, frame: Frame, fair: FairShare, soft: bool) -> bool:
    """Fill one frame, smallest share first. Returns True if something was set aside that a less strict pass could
    take."""
    worker, aside = frame.worker, False
    heap, shares = fair.heap, fair.shares(worker)
    while heap and frame.items_left > 0 and frame.bytes_left > 0:
        run = heap[0][-1]
        n = min(free_credit(worker, run, fair.held), frame.items_left)
        share = shares.of(run) if n > 0 and shares is not None else None
        if share is not None:
            n = min(n, share - worker.holds.get(run.id, 0))
        if run.spec.max_in_flight:
            n = min(n, run.spec.max_in_flight - run.in_flight)
        if n > 0 and not may_hold(state, run, worker):
            n = 0
        if n > 0 and len(heap) > 1:
            n = max(1, n // 4)
        taken = 0
        if n > 0:
            taken, left = take_from_run(state, frame, run, n, soft)
            aside = aside or left
        if taken:
            fair.took()
            if fair.is_full(worker):
                break
        else:
            fair.skip()
            if not heap and shares is not None and worker.in_flight - worker.waiting < worker.credit.items // 2:
                shares = None  # what the others cannot use now is no reason to idle
                fair.again()
    fair.again()
    return aside


def take_from_run(state: State, frame: Frame, run: Run, n: int, soft: bool) -> tuple[int, bool]:
    """Add up to `n` items of the run to the frame. Returns the number, and whether a less strict pass could take
    more."""
    worker, taken = frame.worker, 0
    no_roots = parents_full(state, worker, run)
    turn = Turn(state, run, worker, soft)
    while taken < n and frame.bytes_left > 0:
        roots = 0 if no_roots else room_for_roots(run)
        candidate = turn.candidate(roots=roots > 0)
        if candidate is None:
            break
        queue, in_order = candidate
        verdict = judge(state, queue, worker, soft)
        if not verdict.most:
            turn.pass_over(state, queue, verdict.gate)
            continue
        most = min(n - taken, in_order, verdict.most)
        got = assign(state, frame, queue, most if queue.log.parent is not None else min(most, roots))
        if not got:
            break  # its next item is too large for what is left of the frame
        settle(queue)
        taken += got
    turn.end()
    return taken, turn.left_some


def judge(state: State, queue: SpecQueue, worker: Worker, soft: bool) -> Verdict:
    """Return how many of its items may go to the worker, and what they wait for otherwise."""
    info, log = queue.info, queue.log
    lane, requirements, most = info.lane, info.requirements, UNLIMITED
    if info.spec.not_before_ms > state.now.wall_ms:
        return Verdict(0, info.spec.not_before_ms)
    if lane.cap:
        most = lane.cap - lane.in_flight
        if most <= 0:
            return Verdict(0, lane)
    if log.run.tracked:
        most = min(most, room_to_horizon(state, queue))
        if most <= 0:
            return Verdict(0, log)
    if queue.chain is not None:
        verdict = may_run(state, queue, worker)
        return ASIDE if verdict.most and better_elsewhere(state, queue, worker) else verdict
    if better_elsewhere(state, queue, worker) or (soft and wanted_elsewhere(state, queue, worker)):
        return ASIDE
    return Verdict(min(most, strict_room(worker, requirements)) if requirements.strict else most)


def better_elsewhere(state: State, queue: SpecQueue, worker: Worker) -> bool:
    """Return whether the head failed last on this worker, and another has room for it or may soon."""
    if queue.avoid_worker != worker.id or not queue.size:
        return False
    if queue.log.run.spec.one_worker:
        return False
    until = queue.retry[0][3].not_before + state.settings.another_worker_grace
    if state.now.mono >= until or not any(
        other is not worker
        and other.session
        and other.state is WorkerState.READY
        and not other.fenced
        and takes(other, queue.info.requirements)
        for other in state.workers.values()
    ):
        return False
    state.defer_until = min(state.defer_until, until)
    state.wake_by(until)
    return True


def wanted_elsewhere(state: State, queue: SpecQueue, worker: Worker) -> bool:
    """Return whether another available worker is the better place: it asked for the item, or last ran its affinity
    key."""
    want = ""
    if queue.retry and queue.retry[0][0] == queue.head():
        want = queue.retry[0][3].to
    if not want and queue.info.spec.affinity:
        want = queue.log.run.warm.get(queue.info.spec.affinity, "")
    if not want or want == worker.id:
        return False
    other = state.ready.get(want)
    return (
        other is not None
        and bool(other.session)
        and other.state is WorkerState.READY
        and free_credit(other, queue.log.run) > 0
    )


def assign(state: State, frame: Frame, queue: SpecQueue, n: int) -> int:
    """Move up to `n` items, of one history, from the head of the queue to the frame. Returns how many its bytes
    allow."""
    chunk = queue.chunks[0] if queue.chunks else None
    if queue.retry and (chunk is None or queue.retry[0][0] < chunk.seqs[chunk.pos]):
        seq, item, payload, history = queue.retry[0]
        if not fits_bytes(frame, len(payload)):
            return 0
        heapq.heappop(queue.retry)
        arrived(state, history)
        give(state, frame, queue, [seq], [item], [payload], history, len(payload))
        if queue.avoid_worker and not queue.size:
            queue.log.queues[queue.info.index].pop(queue.avoid_worker, None)
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
    give(state, frame, queue, seqs, ids, payloads, FRESH, size)
    return last - first


def fits_bytes(frame: Frame, size: int) -> bool:
    """Return whether the item fits the frame; one larger than the budgets goes alone, to a worker that holds
    nothing."""
    worker = frame.worker
    if size <= frame.bytes_left and worker.bytes + size <= worker.credit.bytes:
        return True
    return not frame.groups and not worker.bytes


def give(
    state: State, frame: Frame, queue: SpecQueue, seqs: list[int], ids: list[bytes], payloads: list[Blob],
    history: History, size: int,
) -> None:  # fmt: skip
    log, info, n = queue.log, queue.info, len(seqs)
    before = predecessor(queue) if queue.chain is not None else None
    number, now = next(state.numbers), state.now.mono
    batch = AttemptBatch(number, log, info, frame.worker, frame.assignment, history, seqs, now)
    open_batch(state, batch, size)
    count(queue, -n, -size)
    state.effects.window[log.id] = log
    frame.items_left -= n
    frame.bytes_left -= size
    group = frame.groups.get(log.id)
    if group is None:
        group = frame.groups[log.id] = AssignGroup(log.id, log.run.id, log.parent, [], [], [], [], [], [], [])
    at = len(group.seq)
    group.seq += seqs
    group.attempt += [batch.attempt] * n
    group.ids += ids
    group.payloads += payloads
    group.specs += [info.spec] * n
    if history.losses >= state.settings.isolate_after_losses and info.spec.max_worker_lost < NO_LIMIT:
        group.isolate.append(at)
    if history.attempts and log.progress.handed_over:
        group.handoff.update(
            (at + i, data) for i, seq in enumerate(seqs) if (data := object_retention.handoff(log, seq))
        )
    if history.failures:
        group.failures.update(dict.fromkeys(range(at, at + n), history.failures))
    if history.losses:
        group.losses.update(dict.fromkeys(range(at, at + n), history.losses))
    if queue.chain is not None:
        if before is not None:
            group.predecessors.append((at, *before))
            if queue.chain.flying:
                batch.predecessor = (before[0], before[1])
        queue.chain.flying[seqs[0]] = batch
    if info.spec.affinity:
        note_served(state, queue, frame.worker)
    state.totals["assigned"] += n


def send(state: State, frame: Frame) -> None:
    groups = list(frame.groups.values())
    state.next_batch += 1
    keys = [Keys(g.log, g.seq, g.attempt) for g in groups]
    state.step.writes.assignments.append(AssignmentRow(frame.assignment.id, frame.worker.id, state.now.wall_ms, keys))
    state.step.sends.append(SendAssign(frame.worker.session, groups))
