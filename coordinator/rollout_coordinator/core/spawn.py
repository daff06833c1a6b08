"""Child items: submitted by a running attempt into a log of its parent's own, read back in ordinal order.

A child's place is (log of its parent, ordinal), so a parent that is tried again finds the children it made. A parent
that waits gives up its slot and caps until there is something for it to read.
"""

from __future__ import annotations

from rollout.model.errors import ConflictError, InputError, RolloutError
from rollout.model.item import AttemptEnd, Failure, Key

from rollout_coordinator.core import results, runs, workers
from rollout_coordinator.core.attempts import begun, cancel, end_attempt, hold_caps, open_seqs
from rollout_coordinator.core.events import ResultsLoaded, WorkerSpawn, WorkerWaiting
from rollout_coordinator.core.room import strict_room
from rollout_coordinator.core.state import Grant, LoadNote, Log, Reader, State, touch
from rollout_coordinator.core.step import LoadResults, SendChildren, SendResume
from rollout_coordinator.core.submit import add_items
from rollout_coordinator.core.window import unpark

PAGE = 256  # children in one message


def holder(c: State, session: str, parent: Key, attempt: int) -> Grant | None:
    """The parent's present attempt, if the speaker holds it."""
    worker = workers.speaking(c, session)
    log = c.logs.get(parent.log)
    grant = log.flight.get(parent.seq) if log is not None else None
    if worker is None or grant is None or grant.worker is not worker or grant.attempt != attempt:
        return None
    return grant if not runs.ended(grant.log.run) else None


def spawn(c: State, event: WorkerSpawn) -> None:
    grant = holder(c, event.session, event.parent, event.attempt)
    if grant is None:
        return
    parent, attempt = event.parent, event.attempt
    child = grant.log.children.get(parent.seq)
    if child is None:
        child = runs.make_log(c, grant.log.run, parent)
    if child.checking:  # the end of the log is not known before the ledger has answered
        child.held.append(event)
        return
    log = child

    def refusal() -> RolloutError | None:
        sealed = f"the children of item {parent.seq} were sealed at {log.submitted}"
        return ConflictError(sealed) if log.sealed else None

    def done(error: RolloutError | None) -> None:
        now = holder(c, event.session, parent, attempt)
        if error is not None and now is not None:
            # Ordinals, ids and objects are the user's own: his item pays, not the worker that runs it.
            why = f"{error.message}; a parent must spawn the same children each time, without a gap"
            failure = Failure("spawn_conflict", why, False)
            cancel(now.worker, [(now, [parent.seq])], "spawn_conflict", c.step.sends)
            results.close_failed(c, now, parent.seq, failure)
        elif error is None and event.seal and not log.sealed:
            log.sealed = True
            c.reading[log.id] = log
            touch(c, log)

    if event.missing:
        done(InputError(event.missing))
        return
    add_items(c, log, event.first_ordinal, event.ids, event.payloads, event.specs, event.spec_index, done, refusal)


def waiting(c: State, event: WorkerWaiting) -> None:
    grant = holder(c, event.session, event.parent, event.attempt)
    if grant is None:
        return
    seq, worker, run = event.parent.seq, grant.worker, grant.log.run
    child = grant.log.children.get(seq)
    if child is None:
        child = runs.make_log(c, run, event.parent)
    begun(c, grant, seq)
    if seq not in grant.waiting:
        grant.waiting.add(seq)
        worker.waiting += 1
        run.waiting += 1
        hold_caps(run, grant, -1)
        c.hungry[worker.id] = worker
        if grant.info.lane.parked:
            unpark(grant.info.lane.parked)
        c.dirty = True
    reader = child.reader
    if reader is None or reader.session != event.session or reader.attempt != event.attempt:
        reader = child.reader = Reader(event.session, event.attempt, event.from_child)
    reader.resume = reader.next > event.from_child or reader.told_complete
    c.reading[child.id] = child


def stop_waiting(c: State, grant: Grant, seq: int) -> None:
    if seq in grant.waiting:
        grant.waiting.discard(seq)
        grant.worker.waiting -= 1
        grant.log.run.waiting -= 1
        hold_caps(grant.log.run, grant, 1)


def serve_readers(c: State) -> None:
    """Send what was committed since, and let parents run on when their caps are free: those wait here for them."""
    for child in list(c.reading.values()):
        reader, parent = child.reader, child.parent
        assert parent is not None
        grant = c.logs[parent.log].flight.get(parent.seq)
        if reader is None or grant is None or grant.attempt != reader.attempt or grant.worker.session != reader.session:
            child.reader = None
            del c.reading[child.id]
            continue
        if child.cursor > reader.next and not reader.loading:
            read(c, child, reader)
        elif complete(child, reader.next) and not reader.told_complete and not reader.loading:
            reader.told_complete = reader.resume = True
            nothing = ResultsLoaded(0, child.id, reader.next, [], [], [], [], {}, [])
            c.step.sends.append(SendChildren(reader.session, parent, reader.next, nothing, True))
        if reader.resume and parent.seq in grant.waiting:
            if not free(grant):
                continue
            reader.resume = False
            stop_waiting(c, grant, parent.seq)
            c.step.sends.append(SendResume(reader.session, parent, reader.attempt))
        del c.reading[child.id]


def complete(child: Log, upto: int) -> bool:
    return child.sealed and upto >= child.submitted


def free(grant: Grant) -> bool:
    """The caps of run, lane and resources have room for one more. Slots are the worker's to hand out."""
    run, lane = grant.log.run, grant.info.lane
    if run.spec.max_in_flight and run.in_flight >= run.spec.max_in_flight:
        return False
    if lane.cap and lane.in_flight >= lane.cap:
        return False
    return not grant.info.shape.strict or strict_room(grant.worker, grant.info.shape) > 0


def read(c: State, child: Log, reader: Reader) -> None:
    load, c.next_load = c.next_load, c.next_load + 1
    first, n = reader.next, min(PAGE, child.cursor - reader.next)
    reader.loading = True

    def found(event: ResultsLoaded) -> None:
        reader.loading = False
        if child.reader is not reader or child.parent is None:
            return
        c.reading[child.id] = child
        reader.next = first + n
        last = complete(child, reader.next)
        reader.told_complete = last
        reader.resume = True
        c.step.sends.append(SendChildren(reader.session, child.parent, first, event, last))

    c.loads[load] = LoadNote("results", child.id, found)
    c.step.loads.append(LoadResults(load, child.id, first, n, True))


def close_children(c: State, child: Log) -> None:
    """The parent has its result: what its children still do is of no use."""
    for grant in list(dict.fromkeys(child.flight.values())):
        seqs = open_seqs(grant)
        cancel(grant.worker, [(grant, seqs)], "parent ended", c.step.sends)
        for seq in seqs:
            if child.flight.get(seq) is grant:
                end_attempt(c, grant, seq, AttemptEnd.DROPPED, "parent_ended", "its parent has a result")
    for grandchild in child.children.values():
        close_children(c, grandchild)
    runs.shut(c, child)
    runs.fold(c, child)
    c.over.append(child)
