"""Child items: submitted by a running attempt into a log of its parent's own, read back in ordinal order.

(log of its parent, ordinal) identifies a child, so a retried parent finds the children it made. A parent that waits
gives up its slot and caps until there is something for it to read, unless it works meanwhile.
"""

from __future__ import annotations

from rollout.model.errors import ConflictError, InputError, RolloutError
from rollout.model.item import Failure, Key

from rollout_coordinator.core import attempts, object_retention, runs
from rollout_coordinator.core.capacity import OF_PROCESSES, strict_room
from rollout_coordinator.core.commit import close_in_flight
from rollout_coordinator.core.events import ResultsLoaded, WorkerSpawn, WorkerWaiting
from rollout_coordinator.core.logs import open_log
from rollout_coordinator.core.state import AttemptBatch, Log, Reader, State, touch
from rollout_coordinator.core.step import LoadResults, SendChildren, SendResume
from rollout_coordinator.core.submit import add_items
from rollout_coordinator.core.workers import worker_of_session

PAGE = 256  # children in one message


def holder(state: State, session: str, parent: Key, attempt: int) -> AttemptBatch | None:
    """Return the parent's present attempt if the sender holds it."""
    worker = worker_of_session(state, session)
    log = state.logs.get(parent.log)
    batch = log.flight.get(parent.seq) if log is not None else None
    if worker is None or batch is None:
        return None
    if batch.worker is not worker or batch.attempt != attempt:
        return None
    return batch if not runs.ended(batch.log.run) else None


def spawn(state: State, event: WorkerSpawn) -> None:
    batch = holder(state, event.session, event.parent, event.attempt)
    if batch is None:
        return
    parent, attempt = event.parent, event.attempt
    child = batch.log.children.get(parent.seq)
    if child is None:
        child = open_log(state, batch.log.run, parent)
    if child.checking:  # the end of the log is not known before the ledger has answered
        child.held.append(event)
        return
    log = child

    def refusal() -> RolloutError | None:
        sealed = f"the children of row {parent.seq + 1} were sealed at {log.submitted}"
        return ConflictError(sealed) if log.sealed else None

    def done(error: RolloutError | None) -> None:
        now = holder(state, event.session, parent, attempt)
        if error is not None and now is not None:
            # Ordinals, ids, executors and objects are the user's own: his item pays, not the worker that runs it.
            why = error.message
            if isinstance(error, ConflictError):
                why = f"{why}; a parent must spawn the same children each time"
            failure = Failure("spawn_conflict", why, False)
            attempts.cancel(state, now.worker, [(now, [parent.seq])], "spawn_conflict")
            close_in_flight(state, now, parent.seq, failure)
        elif error is None and now is not None:
            object_retention.hold(state, now.log, parent.seq, now.worker.id, event.keeps, event.lets_go)
        if error is None and event.seal and not log.sealed:
            log.sealed = True
            state.effects.children[log.id] = log
            touch(state, log)

    if event.missing:
        done(InputError(event.missing))
        return
    add_items(state, log, event.first_ordinal, event.ids, event.payloads, event.specs, event.spec_index, done, refusal)


def waiting(state: State, event: WorkerWaiting) -> None:
    batch = holder(state, event.session, event.parent, event.attempt)
    if batch is None:
        return
    seq = event.parent.seq
    child = batch.log.children.get(seq)
    if child is None:
        child = open_log(state, batch.log.run, event.parent)
    attempts.start(state, batch, [seq])
    if not event.holds:
        attempts.wait(state, batch, seq)
    reader = child.reader
    if reader is None or reader.session != event.session or reader.attempt != event.attempt:
        reader = child.reader = Reader(event.session, event.attempt, event.from_child)
    reader.resume = reader.next > event.from_child or reader.complete_sent
    state.effects.children[child.id] = child


def serve_readers(state: State) -> None:
    """Send what was committed since, and resume parents whose caps are free; those wait here for them."""
    state.reading.update(state.effects.children)
    for child in list(state.reading.values()):
        reader, parent = child.reader, child.parent
        if reader is None or parent is None:
            del state.reading[child.id]
            continue
        batch = state.logs[parent.log].flight.get(parent.seq)
        if batch is None or batch.attempt != reader.attempt or batch.worker.session != reader.session:
            child.reader = None
            del state.reading[child.id]
            continue
        if child.cursor > reader.next and not reader.loading:
            read(state, child, reader)
        elif complete(child, reader.next) and not reader.complete_sent and not reader.loading:
            reader.complete_sent = reader.resume = True
            nothing = ResultsLoaded(0, child.id, reader.next, [], [], [], [], {}, [])
            state.step.sends.append(SendChildren(reader.session, parent, reader.next, nothing, True))
        if reader.resume and parent.seq in batch.waiting:
            if not free(batch):
                continue
            reader.resume = False
            attempts.stop_waiting(batch, parent.seq)
            state.step.sends.append(SendResume(reader.session, parent, reader.attempt))
        del state.reading[child.id]


def complete(child: Log, upto: int) -> bool:
    return child.sealed and upto >= child.submitted


def free(batch: AttemptBatch) -> bool:
    """Return whether the caps of run, lane and resources have room for one more. The worker manages slots, and the
    parent has kept what its process has: whoever was promised that waits for the parent."""
    run, lane = batch.log.run, batch.info.lane
    if run.spec.max_in_flight and run.in_flight >= run.spec.max_in_flight:
        return False
    if lane.cap and lane.in_flight >= lane.cap:
        return False
    return not batch.info.requirements.strict or strict_room(batch.worker, batch.info.requirements, OF_PROCESSES) > 0


def read(state: State, child: Log, reader: Reader) -> None:
    first, n = reader.next, min(PAGE, child.cursor - reader.next)
    reader.loading = True

    def found(event: ResultsLoaded) -> None:
        reader.loading = False
        if child.reader is not reader or child.parent is None:
            return
        state.effects.children[child.id] = child
        reader.next = first + n
        last = complete(child, reader.next)
        reader.complete_sent = last
        reader.resume = True
        state.step.sends.append(SendChildren(reader.session, child.parent, first, event, last))

    state.ask(child, lambda load: LoadResults(load, child.id, first, n, True), found)
