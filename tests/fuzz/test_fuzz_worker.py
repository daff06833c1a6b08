"""A worker between a hostile coordinator and hostile child processes: typed faults, and only the liar is cut off."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fuzz_budget import budget
from hostile_messages import RUN_ID, damage, feeds, messages, wire
from hypothesis import example, given
from hypothesis import strategies as st
from rollout.model.errors import AttemptError, ProtocolError
from rollout.model.item import Outcome
from rollout.model.worker import Inventory
from rollout.processes.framing import FRAME_MAX
from rollout.processes.pipe import Pipe
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_coordinator.work_codec import hello_event, up_event
from rollout_worker import session_events as ev
from rollout_worker.attempts import Finished, Plan, group_to_wire
from rollout_worker.executors.port import Run
from rollout_worker.processes.child import ChildProcess
from rollout_worker.processes.kinds import Kind
from rollout_worker.session import Session, SessionSettings

FRAME_LIMIT = 1 << 20
LOG = 1


def plan_run(run: Run) -> Plan:
    if run.workload == "unknown":
        raise AttemptError("no such executor", code="executor_missing")
    return Plan(run, "engine" if run.workload == "infer" else "slot", run.workload + run.name)


class Daemon:
    """What `driver.py` and `work_stream.py` do around a session, without processes and a network."""

    def __init__(self, slots: int = 2) -> None:
        self.session = Session(SessionSettings(RUN_ID, Inventory(), slots=slots), plan_run)
        self.now = 100.0
        self.streams = 0
        self.children: dict[int, ChildProcess] = {}
        self.killed: set[int] = set()
        self.sent: list[work_pb2.WorkUp] = []
        self.faults = 0
        self.up()

    @property
    def stream(self) -> str:
        return f"S{self.streams}"

    def up(self) -> None:
        self.streams += 1
        self.event(ev.StreamUp(self.stream))
        self.event(ev.Frame(work_pb2.WorkDown(session=self.stream, welcome=work_pb2.Welcome(objects_addr="o:1"))))

    def event(self, event: ev.Event) -> None:
        try:
            actions = self.session.handle(event, self.now)
        except ProtocolError:
            if not isinstance(event, ev.Frame):
                raise
            self.faults += 1
            self.event(ev.StreamDown())
            self.up()
            return
        for action in actions:
            self._do(action)

    def _do(self, action: ev.Action) -> None:
        if isinstance(action, ev.Send):
            self._check(action.frame)
        elif isinstance(action, ev.StartChild):
            child = ChildProcess(
                action,
                Path("/nowhere"),
                Path("/nowhere"),
                cast(Any, SimpleNamespace()),
                cast(Any, SimpleNamespace(event=self.event, shipper=None)),
            )
            child.kill = child.stop = lambda n=action.child: self.killed.add(n)  # type: ignore[method-assign]
            child._ask = lambda question: None  # type: ignore[method-assign]
            self.children[action.child] = child
        elif isinstance(action, ev.StopChild):
            self.killed.add(action.child)

    def _check(self, frame: work_pb2.WorkUp) -> None:
        """The coordinator would take it: no child can make its worker break the protocol."""
        frame.session = self.stream
        assert frame.ByteSize() <= FRAME_LIMIT
        read = work_pb2.WorkUp.FromString(frame.SerializeToString())
        if read.HasField("hello"):
            hello_event(read, "")
        else:
            up_event(read)
        for group in read.results.groups:
            assert all(o in set(Outcome) for o in group.outcome)
        self.sent.append(read)

    def reap(self) -> None:
        """The killed are gone."""
        while self.killed:
            number = self.killed.pop()
            self.children.pop(number, None)
            self.event(ev.ChildEnded(number, "signal SIGKILL"))

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.event(ev.Acknowledged(self.now))
        self.event(ev.Tick())
        self.event(ev.Flush())

    def assign(self, first: int, count: int, run_id: str, workload: str = "script") -> None:
        seqs = range(first, first + count)
        group = work_pb2.AssignGroup(
            log=LOG,
            run=work_pb2.RunContext(run_id=run_id, workload=workload, config=b"{}", name=run_id),
            seq=seqs,
            attempt=[1] * count,
            ids=bytes(32) * count,
            length=[0] * count,
        )
        self.event(ev.Frame(work_pb2.WorkDown(session=self.stream, assign=work_pb2.Assign(groups=[group]))))


KINDS = {
    Kind.RESULTS: work_pb2.ResultGroup,
    Kind.RETURNED: common_pb2.AttemptKeys,
    Kind.SPAWN: work_pb2.Spawn,
    Kind.WAITING: work_pb2.Waiting,
    Kind.PROGRESS: work_pb2.Progress,
    Kind.RELAY: work_pb2.WorkUp,
}
HELD = {"log": (LOG,), "seq": (0, 1, 2, 3), "attempt": (1,), "run_id": (RUN_ID,)}
ITEM = {
    "ItemBatch.ids": (lambda rows: bytes(32) * rows,),
    "ItemBatch.length": (0,),
    "ItemBatch.data": (b"",),
    "ItemBatch.refs": (),
    "ItemBatch.spec_index": (),
    "ItemSpec.resources": (),
    "first_seq": (0, 0, 1),
    "ResultGroup.outcome": (1, 2),
    "ResultGroup.length": (0,),
    "ResultGroup.data": (b"",),
    "ResultGroup.refs": (),
    "ResultGroup.errors": (),
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(1 << 80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
DEEP = b"[" * 100_000
HINDRANCE = st.fixed_dictionaries(
    {
        "log": st.just(LOG) | json_values, "seq": st.integers(0, 3) | json_values, "attempt": st.just(1) | json_values,
        "code": st.text(max_size=8), "message": st.text(max_size=8) | json_values, "retryable": st.booleans(),
        "returned": st.booleans() | json_values,
    }
)  # fmt: skip


@st.composite
def said_by_child(draw: st.DrawFn) -> tuple[int, bytes]:
    told = (Kind.READY, Kind.FAILED, Kind.HINDERED, Kind.REQUEST, Kind.ASSIGN)
    kind = draw(st.sampled_from([*KINDS, *KINDS, *told, 0, 255]))
    if kind in KINDS:
        return int(kind), draw(wire(KINDS[Kind(kind)], HELD | ITEM))
    fields = {
        Kind.READY: st.fixed_dictionaries({"width": json_values}),
        Kind.FAILED: st.fixed_dictionaries({"code": json_values, "message": json_values, "retryable": json_values}),
        Kind.HINDERED: HINDRANCE,
    }.get(cast(Any, kind), json_values)
    body = st.one_of(st.one_of(fields, json_values).map(lambda v: json.dumps(v).encode()), st.just(DEEP))
    return int(kind), damage(draw(feeds(8)), draw(body))


def said(kind: Kind, message: Any) -> tuple[int, bytes]:
    return int(kind), message.SerializeToString()


def results(count: int, **columns: Any) -> work_pb2.ResultGroup:
    return work_pb2.ResultGroup(log=1, seq=range(count), attempt=[1] * count, length=[0] * count, **columns)


def hostile_child(said: list[tuple[int, bytes]]) -> None:
    """Child 1 says that; child 2, of another run, works on and its results get through."""
    daemon = Daemon()
    daemon.assign(0, 4, RUN_ID)
    other = "01ARZ3NDEKTSV4RRFFQ69G5FAW"
    group = work_pb2.AssignGroup(
        log=2,
        run=work_pb2.RunContext(run_id=other, workload="infer", config=b"{}", name="other"),
        seq=range(3),
        attempt=[1] * 3,
        ids=bytes(32) * 3,
        length=[0] * 3,
    )
    daemon.event(ev.Frame(work_pb2.WorkDown(session=daemon.stream, assign=work_pb2.Assign(groups=[group]))))
    good = next(c.id for c in daemon.session.place.children.values() if c.plan.kind == "engine")
    daemon.event(ev.ChildReady(good, 4))
    bad = next(c.id for c in daemon.session.place.children.values() if c.plan.kind == "slot")
    if not said or said[0][0] not in (Kind.READY, Kind.FAILED):
        daemon.event(ev.ChildReady(bad, 4))
    child = daemon.children[bad]
    for kind, body in said:
        child._frame(kind, body)
        daemon.tick()
        if bad in daemon.killed:
            break
    daemon.tick()
    daemon.reap()
    daemon.up()  # a new stream says it all again
    daemon.tick()
    daemon.event(ev.ChildResults(good, group_to_wire(2, [Finished(2, n, 1, other, b"ok") for n in range(3)])))
    daemon.tick()
    results = [g for frame in daemon.sent for g in frame.results.groups if g.log == 2]
    assert sorted(seq for group in results for seq in group.seq) == [0, 1, 2]
    assert all(o == Outcome.DONE for group in results for o in group.outcome)
    assert good in daemon.session.place.children and daemon.faults == 0


@budget(60)
@given(st.lists(said_by_child(), min_size=1, max_size=5))
@example([(Kind.READY, b'{"width": Infinity}')])
@example([(Kind.READY, b'{"width": 99999999999}')])
@example([(Kind.READY, DEEP)])
@example([(Kind.FAILED, b'{"code": 3, "message": [], "retryable": {}}')])
@example([said(Kind.RESULTS, results(1, outcome=[99]))])
@example([said(Kind.RESULTS, results(2, outcome=[1]))])
@example([said(Kind.RESULTS, results(2, units_in=[1]))])
@example([said(Kind.RESULTS, results(1, units_out=[(1 << 64) - 1]))])
@example([said(Kind.SPAWN, work_pb2.Spawn(log=1, seq=0, attempt=1, items=common_pb2.ItemBatch(ids=b"short")))])
@example([said(Kind.PROGRESS, work_pb2.Progress())])
@example(
    [
        said(Kind.WAITING, work_pb2.Waiting(log=1, seq=0, attempt=1)),
        said(Kind.RETURNED, common_pb2.AttemptKeys(log=1, seq=[0], attempt=[1])),
    ]
)
def test_a_child_can_say_what_it_wants(said: list[tuple[int, bytes]]) -> None:
    hostile_child(said)


def test_large_texts_of_a_child_do_not_end_the_stream() -> None:
    key = common_pb2.AttemptKeys(log=1, seq=[0], attempt=[1])
    note = work_pb2.Progress(keys=[key], note="x" * (3 << 20))
    items = common_pb2.ItemBatch(ids=bytes(32), length=[3 << 20], data=bytes(3 << 20))
    spawn = work_pb2.Spawn(log=1, seq=0, attempt=1, items=items)
    hostile_child([(Kind.PROGRESS, note.SerializeToString())])
    hostile_child([(Kind.SPAWN, spawn.SerializeToString())])


log_lines = st.one_of(
    st.text(max_size=200),
    json_values.map(json.dumps),
    st.dictionaries(st.sampled_from(["event", "level", "self", "method_name", "child", "name"]), json_values).map(json.dumps),
    st.just('{"a":' * 1500),
)  # fmt: skip


@budget(60)
@given(log_lines)
@example('{"event": "x", "self": 1}')
@example('{"event": "x", "method_name": 1}')
@example('{"event": "x", "level": "info", "event_dict": 1, "exc_info": "yes", "stack_info": 1}')
@example('{"event": "x", "level": []}')
def test_what_a_child_prints_is_only_text(line: str) -> None:
    plan = Plan(Run(RUN_ID, "script", {}), "slot", "script")
    child = ChildProcess(
        ev.StartChild(1, plan),
        Path("/nowhere"),
        Path("/nowhere"),
        cast(Any, None),
        cast(Any, SimpleNamespace(shipper=None)),
    )
    child._output.feed("stdout", line.encode() + b"\n", 0.0)


# ---- framing


@budget(60)
@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=50)), max_size=6), st.data())
def test_the_pipe_reassembles_whatever_the_cuts(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    got: list[tuple[int, bytes]] = []
    pipe = Pipe(lambda kind, body: got.append((kind, body)), lambda: None)
    stream = b"".join(len(body).to_bytes(4, "little") + bytes([kind]) + body for kind, body in frames)
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        pipe.data_received(stream[:cut])
        stream = stream[cut:]
    assert got == frames


class Wire:
    """A transport that only remembers that it was ended."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.ended = False

    def abort(self) -> None:
        self.ended = True
        self.pipe.connection_lost(None)

    close = abort

    def writelines(self, parts: list[bytes]) -> None:
        pass


@budget(60)
@given(st.lists(st.binary(max_size=40), max_size=8))
@example([b"\xff\xff\xff\xff\x01"])
@example([(FRAME_MAX + 1).to_bytes(4, "little") + b"\x01", b"more", b"and more"])
def test_lies_about_the_length_end_the_pipe_once(pieces: list[bytes]) -> None:
    lost: list[int] = []
    pipe = Pipe(lambda kind, body: None, lambda: lost.append(1))
    wire = Wire(pipe)
    pipe.connection_made(cast(Any, wire))
    for piece in pieces:
        pipe.data_received(piece)
    assert len(lost) == int(wire.ended)
    assert len(pipe._buffer) <= sum(map(len, pieces))


# ---- a hostile coordinator

DOWN = {
    "WorkDown.session": ("S2", "S1", "S3"),
    "log": (1, 2),
    "seq": (0, 1, 2),
    "attempt": (1, 2),
    "run_id": (RUN_ID,),
    "RunContext.workload": ("script", "infer", "unknown"),
    "RunContext.config": (b"{}", b'{"a": 1}', b"not json", b"[1]"),
    "AssignGroup.ids": (lambda rows: bytes(32) * rows,),
    "AssignGroup.length": (0,),
    "AssignGroup.data": (b"",),
    "AssignGroup.refs": (),
    "AssignGroup.spec_index": (),
    "AssignGroup.isolate": (),
    "AssignGroup.predecessors": (),
    "ItemSpec.resources": (),
}

local = st.sampled_from(["ready", "results", "end", "tick", "drop", "wait", "kill", "nothing"])


@budget(120)
@given(st.lists(st.tuples(messages(work_pb2.WorkDown, DOWN, depth=3), local), min_size=1, max_size=6))
def test_a_coordinator_can_say_what_it_wants(steps: list[tuple[work_pb2.WorkDown, str]]) -> None:
    """Frames in any order with any field, while children come and go: ProtocolError at most, and the worker goes on."""
    daemon = Daemon()
    daemon.assign(0, 3, RUN_ID)
    for frame, then in steps:
        frame.session = daemon.stream if frame.session in ("S1", "S2", "S3") else frame.session
        daemon.event(ev.Frame(frame))
        children = list(daemon.session.place.children.values())
        for child in children:
            if then == "ready":
                daemon.event(ev.ChildReady(child.id, 2))
            elif then == "results":
                done = [Finished(h.log, h.seq, h.attempt, RUN_ID, b"r") for h in list(child.in_hand.values())[:2]]
                for one in done:
                    daemon.event(ev.ChildResults(child.id, group_to_wire(one.log, [one])))
            elif then == "end":
                daemon.event(ev.ChildEnded(child.id, "exit code 1"))
            elif then == "wait":
                for held in list(child.heads()):  # what comes of one may be given to the child at once
                    waiting = work_pb2.Waiting(log=held.log, seq=held.seq, attempt=held.attempt)
                    daemon.event(ev.ChildWaits(child.id, waiting))
        if then == "drop":
            daemon.event(ev.StreamDown())
            daemon.up()
        daemon.tick(5.0 if then == "kill" else 0.5)
        daemon.reap()
    # An honest coordinator again: what it assigns runs and its result gets through.
    daemon.event(ev.StreamDown())
    daemon.up()
    for key in list(daemon.session.held) + list(daemon.session.unacknowledged):
        keys = [common_pb2.AttemptKeys(log=key.log, seq=[key.seq], attempt=[key.attempt])]
        daemon.event(ev.Frame(work_pb2.WorkDown(session=daemon.stream, cancel=work_pb2.Cancel(keys=keys))))
        daemon.event(ev.Frame(work_pb2.WorkDown(session=daemon.stream, accepted=work_pb2.Accepted(accepted=keys))))
    for _ in range(20):
        for child in list(daemon.session.place.children):
            daemon.event(ev.ChildEnded(child, "exit code 0"))
        daemon.tick(10.0)
        daemon.killed.clear()
    daemon.assign(1_000_000, 1, "01ARZ3NDEKTSV4RRFFQ69G5FAX")
    daemon.tick(61.0)
    for child in list(daemon.session.place.children.values()):
        daemon.event(ev.ChildReady(child.id, 1))
        if (LOG, 1_000_000) in child.in_hand:
            daemon.event(ev.ChildResults(child.id, group_to_wire(LOG, [Finished(LOG, 1_000_000, 1, "", b"ok")])))
    daemon.tick()
    assert any(1_000_000 in group.seq for frame in daemon.sent for group in frame.results.groups)
