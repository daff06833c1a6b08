"""The coordinator's core between hostile workers and clients, frame by frame as the services read them.

An innocent run of an innocent worker goes on beside them: it must end exactly once, with its own results, and every
transaction on the way must be one that both databases take.
"""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from fuzz_budget import budget
from hostile_messages import Feed, build
from hypothesis import given
from hypothesis import strategies as st
from rollout.model.errors import InputError, ProtocolError
from rollout.model.ids import is_ulid
from rollout.model.item import ItemSpec
from rollout.model.run import RunState
from rollout.wire.codec import item_batch_from_wire, run_config, run_spec_from_wire
from rollout.wire.v1 import common_pb2, runs_pb2, work_pb2
from rollout_coordinator.core import step as core_step
from rollout_coordinator.core.events import RunCommand, RunDelete, SubmitItems, SubmitOpen, SubmitSeal, WorkerBeat
from rollout_coordinator.ledger.writes import bulks
from rollout_coordinator.runs_codec import check_items, status_to_wire, worker_to_wire
from rollout_coordinator.runs_service import VERBS
from rollout_coordinator.sessions import AssignWithRuns
from rollout_coordinator.work_codec import down_frames, hello_event, up_event

INNOCENT = "01ARZ3NDEKTSV4RRFFQ69G5FA0"
OWN = ("01ARZ3NDEKTSV4RRFFQ69G5FA1", "01ARZ3NDEKTSV4RRFFQ69G5FA2")
LABEL = (("who", "innocent"),)
ROWS = 12
INT_MAX = (1 << 63) - 1
BTREE_KEY_MAX = 2600  # PostgreSQL refuses a larger index entry
FRAME_MAX = 1 << 20

KEYS = {
    "log": (2, 1, 3, 4),
    "parent_log": (1, 2),
    "seq": (0, 1, 2, 5),
    "attempt": (1, 2),
    "revoke_id": (1, 2),
    "from_child": (0, 1),
    "run_id": OWN,
}
ITEMS = {
    "ItemBatch.first_seq": (0, 1, 2),
    "ItemBatch.ids": (lambda rows: bytes(32) * rows, lambda rows: b"\x01" * 32 * rows),
    "ItemBatch.length": (0,),
    "ItemBatch.data": (b"",),
    "ItemBatch.refs": (),
    "ItemBatch.spec_index": (),
    "resources": (),
    "timeout_ms": (0, 1000),
    "not_before_ms": (0, 1_000_100),
    "chain": ("", "c"),
    "group": ("", "g"),
    "lane": ("", "a", "a\x00", "a\ufffd"),
}
UP = KEYS | ITEMS | {
    "WorkUp.session": ("S",),
    "WorkUp.epoch": (0,),
    "Inventory.capacity": (4.0,),
    "CapacityEntry.key": ("slots", "gpus"),
    "CapacityEntry.value": (4.0, 1.0),
    "Inventory.executors": ("script",),
    "Credit.items": (8, 1),
    "Credit.bytes": (1 << 20,),
    "ResultGroup.length": (0,),
    "ResultGroup.data": (b"",),
    "ResultGroup.outcome": (1, 2),
    "ResultGroup.refs": (),
    "ResultGroup.errors": (),
    "Credit.run_items": (),
}  # fmt: skip
CLIENT = KEYS | ITEMS | {
    "SubmitUp.epoch": (0,),
    "RunSpec.workload": ("script",),
    "RunSpec.order": ("schedule", "arrival"),
    "RunSpec.config": (b"{}", b'{"a": 1}'),
    "RunSpec.lanes": (),
    "RunSpec.policies": (),
    "LaneConfig.name": ("a", "b"),
    "Policy.name": ("prune_lane", "stop_early", "end_run", "append", "keep_objects"),
    "OptionsEntry.key": ("after", "lane", "failures", "successes", "on", "state", "times", "limit", "last", "from"),
    "OptionsEntry.value": ("1", "2", "done", "failed", "completed", "\u0663", "\xb2", "9" * 5000),
    "Seal.count": (2, 1, 0, 3),
}  # fmt: skip
COMMAND = {"CommandRequest.run_id": OWN, "CommandRequest.verb": VERBS}


INVENTORY = common_pb2.Inventory(capacity={"slots": 8.0}, executors=["script"])
SPECS: list[dict[str, Any]] = [
    {},
    {"lane": "a"},
    {"lane": "a\ufffd"},
    {"chain": "c", "pipelined": True},
    {"chain": "c", "pipelined": True},
    {"group": "g", "timeout_ms": 1},
    {"group": "g", "max_attempts": 1},
    {"exclusive": True, "fail_on_worker_lost": True},
    {"max_attempts": (1 << 32) - 1, "retry_backoff_ms": (1 << 63) - 1},
    {"resources": {"slots": 5e-324}},
]


class Scene(World):
    """A world that looks at each transaction and frame with the eyes of the databases and the wire."""

    def __init__(self) -> None:
        self.given: dict[str, list[tuple[int, int, int]]] = {}  # what attackers were assigned, by session
        super().__init__(window_items=16, window_items_max=32, commit_horizon=24, assign_items_max=5)
        self.good = self.worker("W1", credit=4, executors=("script",), labels=LABEL)
        self.open(INNOCENT)
        self.submit(ROWS, INNOCENT, specs=ItemSpec(require_labels=LABEL))
        self.names = ("01BX5ZZKBKACTAV9WEVGEMMVR0", "01BX5ZZKBKACTAV9WEVGEMMVR1")
        self.open_sessions: dict[str, str] = {}
        self.sessions = 0

    def _step(self, events: tuple[Any, ...]) -> core_step.Step:
        step = super()._step(events)
        for bulk, columns in bulks(step.writes):
            for column in columns:
                for value in column:
                    check_value(value)
            if bulk.insert.startswith("INSERT INTO lane"):
                lanes = list(zip(columns[0], columns[1], strict=True))
                assert len(set(lanes)) == len(lanes), "one upsert touches a row twice"
                assert all(len(name.encode()) <= BTREE_KEY_MAX for _, name in lanes)
        for send in step.sends:
            if isinstance(send, core_step.CloseSession):
                assert send.session != self.good.session
                self.open_sessions = {n: s for n, s in self.open_sessions.items() if s != send.session}
            elif hasattr(send, "session") and not isinstance(send, core_step.SendControl):
                known = AssignWithRuns(send, {}) if isinstance(send, core_step.SendAssign) else send
                if isinstance(send, core_step.SendAssign):
                    keys = [(g.log, q, a) for g in send.groups for q, a in zip(g.seq, g.attempt, strict=True)]
                    self.given.setdefault(send.session, []).extend(keys)
                for frame in down_frames(known, "c", "a:1"):
                    assert frame.ByteSize() <= FRAME_MAX
        return step

    def begin(self) -> None:
        """The attackers are let in as what they say they are, with a run and items of their own."""
        for name in self.names:
            self.greet(name, work_pb2.Hello(inventory=INVENTORY, credit=work_pb2.Credit(items=8, bytes=1 << 20)))
        self.requests += 1
        policies = [runs_pb2.Policy(name="append", options={"on": "failed", "times": "2"})]
        wire = runs_pb2.RunSpec(run_id=OWN[0], workload="script", order="schedule", policies=policies)
        self.step(SubmitOpen(self.requests, run_spec_from_wire(wire)))
        specs = [common_pb2.ItemSpec(**fields) for fields in SPECS]
        table = range(len(specs))
        batch = common_pb2.ItemBatch(
            ids=bytes(32 * len(specs)), length=[0] * len(specs), specs=specs, spec_index=table
        )  # fmt: skip
        first, ids, payloads, kinds, index = item_batch_from_wire(batch)
        self.requests += 1
        self.step(SubmitItems(self.requests, OWN[0], first, ids, payloads, kinds, index))

    # ---- what the services do with a frame

    def greet(self, name: str, hello: work_pb2.Hello) -> None:
        self.sessions += 1
        hello.incarnation = name
        event = hello_event(work_pb2.WorkUp(session=f"A{self.sessions}", hello=hello), f"host-{name}")
        self.open_sessions[name] = event.session
        self.step(event)

    def worker_frame(self, who: int, feed: Feed) -> None:
        name = self.names[who]
        session = self.open_sessions.get(name)
        known = UP
        given = self.given.get(session or "")
        if given:
            log, seq, attempt = feed.pick(given)
            known = UP | {"log": (log,), "seq": (seq, seq + 1), "attempt": (attempt,)}
        frame: work_pb2.WorkUp = build(work_pb2.WorkUp, feed, known, depth=3)
        if frame.WhichOneof("body") == "hello":  # rarely what is wanted
            frame = build(work_pb2.WorkUp, feed, known, depth=3)
        if session is None:
            self.greet(name, build(work_pb2.Hello, feed, known, depth=2))
        else:
            frame.session = session
            self.step(up_event(frame))

    def client_frame(self, run_id: str, feed: Feed) -> None:
        frame: runs_pb2.SubmitUp = build(runs_pb2.SubmitUp, feed, CLIENT, depth=3)
        kind = frame.WhichOneof("body")
        self.requests += 1
        number = self.requests
        if kind == "items":
            first, ids, payloads, specs, index = item_batch_from_wire(frame.items)
            check_items(ids, payloads, first)
            self.step(SubmitItems(number, run_id, first, ids, payloads, specs, index))
        elif kind == "seal":
            self.step(SubmitSeal(number, run_id, frame.seal.count))
        else:
            frame.open.run_id = run_id
            spec = run_spec_from_wire(frame.open)
            run_config(spec.config)
            self.step(SubmitOpen(number, spec))
        assert number in self.replies, "a client that waits for ever"

    def command(self, feed: Feed) -> None:
        request: runs_pb2.CommandRequest = build(runs_pb2.CommandRequest, feed, COMMAND)
        if request.verb not in VERBS or not is_ulid(request.run_id) or request.run_id == INNOCENT:
            return
        self.requests += 1
        self.step(RunCommand(self.requests, request.run_id, request.verb, request.reason, request.priority))
        assert self.requests in self.replies

    def delete(self, feed: Feed) -> None:
        self.requests += 1
        self.step(RunDelete(self.requests, feed.pick(OWN), feed.below(2) == 1))
        assert self.requests in self.replies

    def do(self, action: str, feed: Feed) -> None:
        try:
            if action.startswith("worker"):
                self.worker_frame(int(action[-1]), feed)
            elif action.startswith("client"):
                self.client_frame(OWN[int(action[-1])], feed)
            elif action == "command":
                self.command(feed)
            elif action == "delete":
                self.delete(feed)
            elif action == "drop":
                self.open_sessions.pop(feed.pick(self.names), None)
            elif action == "beat":
                load = feed.pick((0.5, float("nan"), float("inf"), -1e308))
                self.step(
                    WorkerBeat(feed.pick(self.names), "h", self.mono, feed.pick(("ready", "fenced", "draining")), load)
                )
            elif action == "time":
                self.pass_time(0.5)
            else:
                self.finish(self.good, 2)
        except (ProtocolError, InputError):
            pass  # a typed refusal; the service ends that stream with it
        for worker in self.core.worker_views(self.now):
            worker_to_wire(worker)
        for run in self.core.run_views():
            status_to_wire(run)

    def finish(self, worker: FakeWorker, count: int) -> None:
        while worker.revokes:
            worker.confirm()
        some = list(worker.held)[:count]
        if some:
            worker.start(*some)
            worker.finish(*some)

    def settle(self) -> None:
        if not self.view(INNOCENT).sealed:
            self.seal(ROWS, INNOCENT)
        for _ in range(40):
            self.finish(self.good, 99)
            self.pass_time(0.25)
        view = self.ledger.runs[INNOCENT]
        assert view.state is RunState.COMPLETED
        table = self.ledger.results[view.root_log]
        assert sorted(table) == list(range(ROWS))
        assert all(row[0] == 1 and row[2] == b"r%d" % seq for seq, row in table.items()), "attempt 1, its own data"
        assert self.good.session
        states = {w.incarnation: w.state for w in self.core.worker_views(self.now)}
        assert states["W1"].value == "ready"


def check_value(value: Any) -> None:
    if isinstance(value, int):
        assert -INT_MAX - 1 <= value <= INT_MAX
    elif isinstance(value, str):
        value.encode()
        assert "\x00" not in value


ACTIONS = (
    "worker0",
    "worker0",
    "worker1",
    "client0",
    "client0",
    "client1",
    "command",
    "delete",
    "drop",
    "beat",
    "time",
    "good",
)
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.binary(min_size=160, max_size=160)), min_size=1, max_size=20)


@budget(80)
@given(steps)
def test_peers_can_say_what_they_want(script: list[tuple[str, bytes]]) -> None:
    scene = Scene()
    scene.begin()
    for action, data in script:
        scene.do(action, Feed(data))
    scene.settle()
    scene.restart()  # and what was written can be read again
    scene.pass_time(1.0)


# ---- what was found, kept


def opened(**spec: Any) -> Scene:
    scene = Scene()
    scene.requests += 1
    wire = runs_pb2.RunSpec(run_id=OWN[0], workload="script", order="schedule", **spec)
    scene.step(SubmitOpen(scene.requests, run_spec_from_wire(wire)))
    return scene


def test_a_gap_among_children_fails_their_parent_and_not_its_worker() -> None:
    """The first ordinal is the user's argument to `spawn`: it must not cost the worker its other work."""
    scene = Scene()
    held = next(iter(scene.good.held))
    scene.good.start(held)
    spawn = work_pb2.Spawn(
        log=held[0], seq=held[1], attempt=1, items=common_pb2.ItemBatch(first_seq=7, ids=bytes(32), length=[0])
    )
    scene.step(up_event(work_pb2.WorkUp(session=scene.good.session, spawn=spawn)))
    assert held not in scene.good.held
    _, outcome, _, failure = scene.ledger.results[held[0]][held[1]]
    assert outcome == 2 and failure.code == "spawn_conflict" and "only 0 are there" in failure.message
    states = {w.incarnation: w.state.value for w in scene.core.worker_views(scene.now)}
    assert states["W1"] == "ready"


@pytest.mark.parametrize("digits", ["9" * 5000, "\xb2", "\u0663", "-1"])
def test_numbers_in_the_options_of_a_policy(digits: str) -> None:
    """`isdigit` holds for superscripts, `int` refuses them, and it refuses more than 4,300 digits."""
    scene = opened(policies=[runs_pb2.Policy(name="stop_early", options={"failures": digits})])
    assert isinstance(scene.replies[scene.requests].error, InputError)


def test_a_pause_without_end() -> None:
    scene = opened(pause_timeout_ms=INT_MAX)
    scene.verb("pause", OWN[0])
    scene.pass_time(0.5)


def test_units_that_do_not_add_up_to_a_number() -> None:
    group = work_pb2.ResultGroup(log=1, seq=[0], attempt=[1], length=[0], units_in=[1 << 63])
    with pytest.raises(ProtocolError, match="units"):
        up_event(work_pb2.WorkUp(session="S", results=work_pb2.Results(groups=[group])))


@pytest.mark.parametrize("kept", [work_pb2.Kept(index=1, object_ids=[b"o" * 32]), work_pb2.Kept(object_ids=[b"short"])])
def test_objects_to_keep_that_are_none(kept: work_pb2.Kept) -> None:
    group = work_pb2.ResultGroup(log=1, seq=[0], attempt=[1], length=[0], kept=[kept])
    with pytest.raises(ProtocolError, match="an object to keep that is none"):
        up_event(work_pb2.WorkUp(session="S", results=work_pb2.Results(groups=[group])))


@pytest.mark.parametrize("name", ["a\x00b", "L" * 1025, "\u00dc" * 513])
def test_names_that_are_no_key(name: str) -> None:
    with pytest.raises(ProtocolError, match="NUL or more than"):
        item_batch_from_wire(common_pb2.ItemBatch(specs=[common_pb2.ItemSpec(lane=name)]))
    with pytest.raises(ProtocolError, match="NUL or more than"):
        run_spec_from_wire(
            runs_pb2.RunSpec(run_id=OWN[0], workload="w", order="schedule", lanes=[runs_pb2.LaneConfig(name=name)])
        )


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 101 + b"1" + b"}" * 101, b"[1]", b"\xff", b"9" * 5000])
def test_configurations_that_are_none(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="config"):
        run_config(body)
    assert run_config(b"") == {}
