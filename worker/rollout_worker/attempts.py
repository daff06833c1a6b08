"""Attempts that a worker holds: their states, and their columns on the wire. Pure, like the session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, repeat
from operator import attrgetter
from typing import NamedTuple, cast

from rollout.model.errors import AttemptError, ProtocolError
from rollout.model.item import Blob, Failure, ItemSpec, Key, Outcome
from rollout.wire.codec import (
    failure_to_wire,
    pack_blobs,
    ref_from_wire,
    run_config,
    spec_columns_from_wire,
    spec_table,
    split_ids,
    unpack_blobs,
)
from rollout.wire.v1 import common_pb2, work_pb2

from rollout_worker.executors.port import Run, remember

OUT_OF_MEMORY = "out_of_memory"
"""Error code of an attempt that used more memory than its item asks for; it counts as a failure, not as a loss."""
FRAME_BYTES = 900 << 10  # below the wire limit of 1 MiB, with room for what is not counted
ROW_BYTES = 64
FRAME_ITEMS = 4096


class State(StrEnum):
    FETCHING = "fetching"  # its payload is an object on its way here
    QUEUED = "queued"  # may be revoked
    RUNNING = "running"  # given to a child process
    WAITING = "waiting"  # for its children; takes no slot
    STOPPING = "stopping"  # its child was told to cancel it
    STORING = "storing"  # finished; its result becomes an object


UNSTARTED = frozenset({State.FETCHING, State.QUEUED})

# (state, cause) -> state; None means that the session forgets the attempt. What is not listed is a fault.
TABLE: dict[tuple[State, str], State | None] = {
    (State.FETCHING, "fetched"): State.QUEUED,
    (State.FETCHING, "give_up"): None,
    (State.FETCHING, "finish"): None,  # the object cannot be had
    (State.QUEUED, "give_up"): None,
    (State.QUEUED, "finish"): None,  # its engine cannot be started here
    (State.QUEUED, "deliver"): State.RUNNING,
    (State.RUNNING, "wait"): State.WAITING,
    (State.RUNNING, "stop"): State.STOPPING,
    (State.RUNNING, "store"): State.STORING,
    (State.RUNNING, "finish"): None,
    (State.RUNNING, "requeue"): State.QUEUED,  # behind the one that took its child down
    (State.WAITING, "wait"): State.WAITING,
    (State.WAITING, "resume"): State.RUNNING,
    (State.WAITING, "stop"): State.STOPPING,
    (State.WAITING, "store"): State.STORING,
    (State.WAITING, "finish"): None,
    (State.STOPPING, "stop"): State.STOPPING,
    (State.STOPPING, "wait"): State.STOPPING,
    (State.STOPPING, "resume"): State.STOPPING,
    (State.STOPPING, "store"): State.STORING,
    (State.STOPPING, "finish"): None,
    (State.STOPPING, "give_up"): None,
    (State.STORING, "stop"): State.STORING,
    (State.STORING, "finish"): None,
    (State.STORING, "give_up"): None,
}


class AttemptKey(NamedTuple):
    log: int
    seq: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where attempts of a run and an executor execute; those with equal `key` share child processes."""

    run: Run
    kind: str  # engine | shared | slot
    key: str
    environment: tuple[tuple[str, str], ...] = ()
    devices: int = 0  # accelerators that each of its processes has to itself
    replicas: int = 1  # processes at once, of an engine; 0: as many as there are devices for
    shares: bool = False  # or has by turns with a process of its run, where there is one with so many
    memory_mib: int = 0  # what each of its processes may use; 0: no limit
    refusal: Failure | None = None  # why no process for them can ever be started here


@dataclass(slots=True, eq=False)
class Held:
    """Assigned attempt without a result."""

    log: int
    seq: int
    attempt: int
    id: bytes
    payload: Blob
    spec: ItemSpec
    plan: Plan
    parent: Key | None = None
    key: AttemptKey = field(init=False)
    predecessor: Blob | None = None
    isolate: bool = False
    failures: int = 0  # attempts at it that failed before
    losses: int = 0  # and that died with their worker or process
    handoff: bytes = b""  # what one of them that left in the middle had done
    state: State = State.QUEUED
    child: int = 0
    assigned: int = 0  # grows by one: the order in which they came
    started: float | None = None
    kill_at: float | None = None
    stop_reason: str = ""

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.log, self.seq, self.attempt)

    @property
    def remote(self) -> bool:
        """Whether its input must be fetched first."""
        return not isinstance(self.payload, bytes) or isinstance(self.predecessor, tuple)

    @property
    def begun(self) -> bool:
        """Whether it has begun, rather than waiting here or in its process behind others."""
        given = self.state in (State.RUNNING, State.STOPPING)
        return self.started is not None if given else self.state not in UNSTARTED

    def move(self, cause: str) -> None:
        """Move to the next state; the caller forgets the attempt if the table says None. A KeyError is a fault of the
        session."""
        after = TABLE[self.state, cause]
        if after is not None:
            self.state = after


@dataclass(slots=True, eq=False)
class Finished:
    """End of an attempt, kept until the coordinator has acknowledged it."""

    log: int
    seq: int
    attempt: int
    run_id: str
    data: Blob = b""
    outcome: int = 1
    failure: Failure | None = None
    duration_ms: int = 0
    units_in: int = 0
    units_out: int = 0
    keeps: tuple[bytes, ...] = ()
    sent: float | None = None


# ---- keys


def keys_to_wire(keys: Iterable[tuple[int, int, int]]) -> list[common_pb2.AttemptKeys]:
    """Return one AttemptKeys per log, in the order of first appearance."""
    by_log: dict[int, tuple[list[int], list[int]]] = {}
    for log, seq, attempt in keys:
        columns = by_log.get(log)
        if columns is None:
            columns = by_log[log] = ([], [])
        columns[0].append(seq)
        columns[1].append(attempt)
    return [common_pb2.AttemptKeys(log=log, seq=seq, attempt=attempt) for log, (seq, attempt) in by_log.items()]


def replica_key(wire: common_pb2.ReplicaKey) -> AttemptKey:
    return AttemptKey(wire.log, wire.seq, wire.attempt)


def keys_from_wire(wire: Iterable[common_pb2.AttemptKeys]) -> list[AttemptKey]:
    found: list[AttemptKey] = []
    for keys in wire:
        if len(keys.seq) != len(keys.attempt):
            raise ProtocolError(f"AttemptKeys: {len(keys.seq)} seqs but {len(keys.attempt)} attempts")
        found.extend(map(AttemptKey, repeat(keys.log), keys.seq, keys.attempt))
    return found


# ---- assignments


def run_from_wire(context: work_pb2.RunContext) -> Run:
    """Parse a run. Raises AttemptError if its configuration cannot be read, which is the run's fault."""
    try:
        config = run_config(context.config)
    except ProtocolError as error:
        raise AttemptError(f"run {context.run_id}: {error.message}", code="bad_run_config", retry=False) from error
    return Run(context.run_id, context.workload, config, context.name)


def held_from_wire(group: work_pb2.AssignGroup, plan_of: Callable[[ItemSpec], Plan]) -> list[Held]:
    """Parse the attempts of a group. Raises ProtocolError if its columns disagree."""
    ids = split_ids(group.ids)
    count = len(ids)
    seqs, attempts = group.seq, group.attempt
    payloads = unpack_blobs(group.length, group.data, group.refs)
    if not (len(seqs) == len(attempts) == len(payloads) == count):
        raise ProtocolError(
            f"AssignGroup: {len(seqs)} seqs, {len(attempts)} attempts, {count} ids, {len(payloads)} payloads"
        )
    specs, index = spec_columns_from_wire(group.specs, group.spec_index, count)
    of_spec = list(map(plan_of, specs))
    spec_column = [specs[0]] * count if index is None else [specs[i] for i in index]
    plans = [of_spec[0]] * count if index is None else [of_spec[i] for i in index]
    parent = Key(group.parent_log, group.parent_seq) if group.parent_log else None
    held = list(map(Held, repeat(group.log), seqs, attempts, ids, payloads, spec_column, plans, repeat(parent)))
    for entry in group.predecessors:
        blob = ref_from_wire(entry.ref) if entry.HasField("ref") else entry.data
        _entry(held, entry.index, "predecessors").predecessor = blob
    for at in group.isolate:
        _entry(held, at, "isolate").isolate = True
    for at, failures in group.failures.items():
        _entry(held, at, "failures").failures = failures
    for at, losses in group.losses.items():
        _entry(held, at, "losses").losses = losses
    for at, data in group.handoff.items():
        _entry(held, at, "handoff").handoff = data
    return held


def _entry(held: list[Held], at: int, field: str) -> Held:
    if at >= len(held):
        raise ProtocolError(f"AssignGroup: {field} names entry {at}, there are {len(held)}")
    return held[at]


def held_to_wire(held: Sequence[Held], known_runs: dict[str, None]) -> list[work_pb2.AssignGroup]:
    """Return groups for a child process in the order of `held`, in which it begins them, as the session assumes.

    A slice refers to an object in the cache. Adds to `known_runs` the runs whose context they carry.
    """
    groups: list[work_pb2.AssignGroup] = []
    for log, together in groupby(held, key=attrgetter("log")):
        members = list(together)
        first = members[0]
        run = first.plan.run
        context = work_pb2.RunContext(run_id=run.run_id)
        if run.run_id not in known_runs:
            remember(known_runs, run.run_id, None)
            context.workload, context.name = run.workload, run.name
            context.config = json.dumps(run.config, separators=(",", ":")).encode()
        lengths, data, refs = pack_blobs([h.payload for h in members])
        specs, index = spec_table([h.spec for h in members])
        group = work_pb2.AssignGroup(
            log=log,
            run=context,
            seq=[h.seq for h in members],
            attempt=[h.attempt for h in members],
            ids=b"".join([h.id for h in members]),
            length=lengths,
            data=data,
            refs=refs,
            specs=specs,
            spec_index=index,
            isolate=[i for i, h in enumerate(members) if h.isolate],
            failures={i: h.failures for i, h in enumerate(members) if h.failures},
            handoff={i: h.handoff for i, h in enumerate(members) if h.handoff},
            losses={i: h.losses for i, h in enumerate(members) if h.losses},
        )
        if first.parent is not None:
            group.parent_log, group.parent_seq = first.parent
        for i, h in enumerate(members):
            if h.predecessor is not None:
                assert isinstance(h.predecessor, bytes)
                group.predecessors.add(index=i, data=h.predecessor)
        groups.append(group)
    return groups


# ---- results


def result_frames(results: Iterable[Finished]) -> list[work_pb2.WorkUp]:
    """Return Results frames of at most 1 MiB each."""
    frames: list[work_pb2.WorkUp] = []
    chunk: list[Finished] = []
    size = 0
    for one in results:
        extra = ROW_BYTES + (len(one.data) if isinstance(one.data, bytes) else 64)
        if one.failure is not None:
            extra += len(one.failure.message) * 3
        if chunk and (size + extra > FRAME_BYTES or len(chunk) >= FRAME_ITEMS):
            frames.append(_result_frame(chunk))
            chunk, size = [], 0
        chunk.append(one)
        size += extra
    if chunk:
        frames.append(_result_frame(chunk))
    return frames


def _result_frame(results: list[Finished]) -> work_pb2.WorkUp:
    by_log: dict[int, list[Finished]] = {}
    for one in results:
        by_log.setdefault(one.log, []).append(one)
    return work_pb2.WorkUp(
        results=work_pb2.Results(groups=[group_to_wire(log, members) for log, members in by_log.items()])
    )


def group_to_wire(log: int, results: Sequence[Finished]) -> work_pb2.ResultGroup:
    lengths, data, refs = pack_blobs([r.data for r in results])
    group = work_pb2.ResultGroup(
        log=log,
        seq=[r.seq for r in results],
        attempt=[r.attempt for r in results],
        length=lengths,
        data=data,
        refs=refs,
        duration_ms=[r.duration_ms for r in results],
    )
    if any(r.outcome != 1 or r.failure is not None for r in results):
        group.outcome.extend([cast(common_pb2.Outcome, r.outcome) for r in results])
        group.errors.extend([failure_to_wire(i, r.failure) for i, r in enumerate(results) if r.failure is not None])
    if any(r.units_in for r in results):
        group.units_in.extend([r.units_in for r in results])
    if any(r.units_out for r in results):
        group.units_out.extend([r.units_out for r in results])
    group.kept.extend([work_pb2.Kept(index=i, object_ids=r.keeps) for i, r in enumerate(results) if r.keeps])
    return group


def failed(held: Held, failure: Failure, duration_ms: int = 0) -> Finished:
    run_id = held.plan.run.run_id
    return Finished(
        held.log, held.seq, held.attempt, run_id, b"", int(Outcome.FAILED), failure, duration_ms
    )  # fmt: skip
