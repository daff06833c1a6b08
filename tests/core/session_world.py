"""A worker's session, a clock that stands still until told, and short words for what it is told and does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Failure, ItemSpec
from rollout.model.worker import Inventory
from rollout.wire.codec import spec_to_wire
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import Finished, Plan, group_to_wire, keys_from_wire
from rollout_worker.executors.port import Run
from rollout_worker.session import Session, SessionSettings

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
LOG = 1
LEVELS = ("debug", "info", "warning", "error")


def plan_run(run: Run) -> Plan:
    if run.executor == "unknown":
        raise AttemptError("no such executor", code="executor_missing")
    kind = "engine" if run.executor == "infer" else "slot"
    return Plan(run, kind, run.executor + run.name)


class Worker:
    """A session and its surroundings."""

    def __init__(
        self, slots: int = 1, welcome: bool = True, plan_run: Callable[[Run], Plan] = plan_run, **settings: Any
    ) -> None:
        self.session = Session(SessionSettings("W", Inventory(), slots=slots, **settings), plan_run)
        self.now = 100.0
        self.streams = 0
        self.actions: list[ev.Action] = []
        if welcome:
            self.up()
            self.down(welcome=work_pb2.Welcome(objects_addr="o:1"))

    def do(self, event: ev.Event) -> list[ev.Action]:
        new = self.session.handle(event, self.now)
        for told in of(new, ev.Emit):
            assert told.level in LEVELS and isinstance(told.fields, dict), told
        self.actions += new
        return new

    def up(self) -> work_pb2.Hello:
        self.streams += 1
        sent = self.sent(self.do(ev.StreamUp(f"S{self.streams}")))
        return sent[0].hello

    def down(self, session: str = "", **body: Any) -> list[ev.Action]:
        return self.do(ev.Frame(work_pb2.WorkDown(epoch=1, session=session or f"S{self.streams}", **body)))

    def assign(
        self,
        seqs: Sequence[int],
        spec: ItemSpec = DEFAULT_SPEC,
        *,
        workload: str = "script",
        run: str = RUN,
        **more: Any,
    ) -> list[ev.Action]:
        name = more.pop("name", "")
        group = work_pb2.AssignGroup(
            log=LOG,
            run=work_pb2.RunContext(run_id=run, workload=workload, config=b"{}", name=name),
            seq=seqs,
            attempt=[1] * len(seqs),
            ids=bytes(32) * len(seqs),
            length=[0] * len(seqs),
            specs=[spec_to_wire(spec)],
            **more,
        )
        return self.down(assign=work_pb2.Assign(groups=[group]))

    def ready(self, width: int = 1) -> list[ev.Action]:
        """Every process that was started comes up."""
        found: list[ev.Action] = []
        for child in [c for c in self.session.place.children.values() if c.state.value == "starting"]:
            found += self.do(ev.ChildReady(child.id, width))
        return found

    def end(self, child: int, *seqs: int, data: bytes = b"", failure: Failure | None = None) -> list[ev.Action]:
        outcome = 1 if failure is None else 2
        results = [Finished(LOG, seq, 1, "", data, outcome, failure) for seq in seqs]
        return self.do(ev.ChildResults(child, group_to_wire(LOG, results)))

    def tick(self, seconds: float = 0.0) -> list[ev.Action]:
        self.now += seconds
        return self.do(ev.Tick())

    def flush(self) -> list[work_pb2.WorkUp]:
        return self.sent(self.do(ev.Flush()))

    @staticmethod
    def sent(actions: list[ev.Action]) -> list[work_pb2.WorkUp]:
        return [a.frame for a in actions if isinstance(a, ev.Send)]


def delivered(actions: list[ev.Action]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for action in actions:
        if isinstance(action, ev.Deliver):
            found.setdefault(action.child, []).extend(h.seq for h in action.attempts)
    return found


def of(actions: list[ev.Action], kind: type) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def keys(*seqs: int) -> list[common_pb2.AttemptKeys]:
    return [common_pb2.AttemptKeys(log=LOG, seq=seqs, attempt=[1] * len(seqs))]


def seqs(wire: Any) -> list[int]:
    return [k.seq for k in keys_from_wire(wire)]
