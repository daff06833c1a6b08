"""Whatever happens in whatever order: nothing is lost, nothing is committed twice, and everything ends."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout.model.item import Failure, ItemSpec
from rollout.model.run import Lane, Order, Policy, RunState
from rollout_coordinator.core.events import WorkerGone

SPECS = {
    "plain": ([ItemSpec()], {}),
    "chains": ([ItemSpec(chain="x"), ItemSpec(chain="y"), ItemSpec(chain="x", lane="l")], {}),
    "pipelined": ([ItemSpec(chain="x", pipelined=True), ItemSpec()], {}),
    "lanes": ([ItemSpec(lane="a"), ItemSpec(lane="b", priority=1)], {"lanes": (Lane("a", 1), Lane("b", 2))}),
    "pruned": (
        [ItemSpec(lane="a", max_attempts=1), ItemSpec(lane="b", max_attempts=2)],
        {"policies": (Policy("prune_lane", (("after", "2"),)),)},
    ),
    "groups": ([ItemSpec(group="g"), ItemSpec(group="h"), ItemSpec(), ItemSpec(group="g")], {}),
    "arrival": ([ItemSpec(), ItemSpec(affinity="m")], {"order": Order.ARRIVAL}),
    "preferred": ([ItemSpec(affinity="a"), ItemSpec(affinity="b", cost=3), ItemSpec(), ItemSpec(cost=1)], {}),
    "gpu": ([ItemSpec(resources=(("slots", 1.0), ("gpus", 1.0))), ItemSpec(max_worker_lost=2)], {}),
    "executors": ([ItemSpec(executor="tool"), ItemSpec(), ItemSpec(executor="tool", priority=1)], {}),
    "changing chains": (
        [ItemSpec(chain="x", pipelined=True, executor="tool"), ItemSpec(chain="x", pipelined=True), ItemSpec(chain="x")],
        {},
    ),
    "append": ([ItemSpec(max_attempts=1)], {"policies": (Policy("append", (("on", "failed"),)),)}),
}  # fmt: skip

ACTIONS = (
    "finish", "finish_some", "fail", "crash_item", "start", "release", "confirm", "time", "die", "blink", "forget",
    "restart", "submit", "submit", "pause", "resume", "drop_frame",
)  # fmt: skip


class Chaos:
    def __init__(self, kind: str) -> None:
        self.specs, options = SPECS[kind]
        self.w = World(window_items=16, window_items_max=32, commit_horizon=24, assign_items_max=5)
        self.born = 0
        for _ in range(2):
            self.born_worker()
        self.w.open(**options)
        self.total = 40
        self.sent = 0

    def born_worker(self) -> None:
        self.born += 1
        own = (("tool",), ("script",))[self.born % 2]
        hosted = own if any(spec.executor for spec in self.specs) else ()
        self.w.worker(f"W{self.born}", credit=5, capacity=(("slots", 2.0), ("gpus", 1.0)), executors=hosted)

    def live(self) -> list[FakeWorker]:
        return [x for x in self.w.workers.values() if x.alive]

    def do(self, action: str, n: int) -> None:
        w = self.w
        if w.view().state not in (RunState.RUNNING, RunState.PAUSED, RunState.INTERRUPTED):
            return
        worker = self.live()[n % len(self.live())]
        if action == "submit" and self.sent < self.total:
            more = min(7, self.total - self.sent)
            w.submit(more, first=self.sent, specs=self.specs)
            self.sent += more
            return
        if action in ("pause", "resume"):
            state = w.view().state
            if action == "pause" and state is RunState.RUNNING:
                w.verb("pause")
            elif state is RunState.PAUSED:
                w.verb("resume")
            elif state is RunState.INTERRUPTED:
                w.verb("continue")
            return
        if action == "time":
            w.pass_time(0.25 * (n % 9))
            return
        if action == "restart":
            w.restart()
            for one in self.live():
                if n % 3:
                    one.hello()
            return
        self.of_worker(action, worker, n)

    def of_worker(self, action: str, worker: FakeWorker, n: int) -> None:
        w = self.w
        if not worker.session:
            worker.hello()
        some = list(worker.held)[n % 3 :: 2]
        if action == "finish":
            worker.finish()
        elif action == "finish_some" and some:
            worker.finish(*some)
        elif action == "fail" and some:
            worker.finish(*some[:1], failure=Failure("boom", "x", retryable=bool(n % 4)))
        elif action == "crash_item" and some:
            worker.finish(*some[:1], failure=Failure("crash", "x", worker_lost=True))
        elif action == "start" and worker.held:
            worker.start(*(some or list(worker.held)))
        elif action == "release" and some:
            unstarted = [k for k in some if k not in worker.started]
            if unstarted:
                worker.release(*unstarted)
        elif action == "confirm" and worker.revokes:
            worker.confirm()
        elif action == "die":
            worker.alive = False
            self.born_worker()
        elif action == "blink":
            w.step(WorkerGone(worker.session))
            worker.session = ""
            worker.hello()
        elif action == "forget" and some:
            for key in some:
                del worker.held[key]
                worker.started.discard(key)
            worker.hello()
        elif action == "drop_frame" and some:  # finished, but the result frame was lost with the stream
            for key in some:
                worker.unacked[key] = worker.held.pop(key)
                worker.started.discard(key)
            w.step(WorkerGone(worker.session))
            worker.session = ""
            resend = dict(worker.unacked)
            worker.hello()
            worker.send({k: a for k, a in resend.items() if k in worker.unacked})

    def finish(self) -> None:
        w = self.w
        if self.sent < self.total and w.view().state is not RunState.COMPLETED:
            self.do("resume", 0)
            w.submit(self.total - self.sent, first=self.sent, specs=self.specs)
        if w.view().state is RunState.PAUSED:
            w.verb("resume")
        if w.view().state is RunState.INTERRUPTED:
            w.verb("continue")
        w.seal(self.total)
        for _ in range(2):
            self.born_worker()
        for worker in self.live():
            worker.hello()
        for _ in range(60):
            w.drain_all(20)
            if w.view().state is RunState.COMPLETED:
                break
            w.pass_time(3.0)
        view = w.view()
        assert view.state is RunState.COMPLETED, (view, {k: v.held for k, v in w.workers.items()})
        table = w.ledger.results[view.root_log]
        assert sorted(table) == list(range(view.submitted))
        assert view.cursor == view.submitted and view.in_flight == 0 and view.running == 0
        assert not w.ledger.assignments
        assert not any(worker.in_flight for worker in w.core.worker_views(w.now))


@pytest.mark.parametrize("kind", SPECS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))  # pyright: ignore[reportArgumentType]
@given(script=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=60))
def test_everything_ends_once(kind: str, script: list[tuple[str, int]]) -> None:
    chaos: Any = Chaos(kind)
    for action, n in script:
        chaos.do(action, n)
    chaos.finish()
