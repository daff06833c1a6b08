"""A scenario under way: the cluster, its faults as they strike, and what is observed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from rollout.model.run import ENDED, RunState
from rollout_coordinator.core.events import Event, RunCommand, Tick, WorkerGoodbye
from rollout_coordinator.core.state import State
from rollout_coordinator.core.step import Emit, LogRow, SendCancel, SendWelcome, Step, Writes
from rollout_coordinator.ledger.port import Fence
from rollout_worker.attempts import AttemptKey, Held
from sim_certificates import ulid
from sim_checker import Checker, Violation, books
from sim_client import ClientNode, OperatorNode
from sim_coordinator import CoordinatorNode
from sim_executors import executor_of
from sim_faults import strike
from sim_loop import PAUSED, NodeLoop, Scheduler, SimTask
from sim_network import Channel, Dial, Network
from sim_node import TTL, Node
from sim_scenario import Command, Scenario
from sim_store import Store
from sim_worker import WORKER_TICK, WorkerNode

STEPS_MIN = 400
"""Steps of a core in every seed, at least."""
ASKED_WITHIN_S = 10.0
"""Virtual seconds within which a task's exception is asked for, or lost."""


class World:
    def __init__(self, scenario: Scenario, *, trace: bool = False, steps_min: int = STEPS_MIN) -> None:
        self.scenario = scenario
        self.random = Random(scenario.seed * 2 + 1)
        self.jitter = Random(scenario.seed * 2 + 2).uniform
        self._deaths = Random(scenario.seed * 2 + 3)
        self.scheduler = Scheduler()
        self.scheduler.unhandled = self._unhandled
        self.network = Network(self.scheduler, self.random)
        self.network.count = self._fired
        self.store = Store(self.scheduler, self.random, TTL)
        self.store.count = self._fired
        self.store.before = self._before
        self.store.committed = self._committed
        self.checker = Checker(self.store.tables, self._holds)
        self.faults: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.liars: set[str] = set()  # worker processes that were made to break the protocol
        self.steps = 0
        self._steps_min = steps_min
        self.idle_steps = 0
        self.commits = 0
        self.over = False
        self.failure: Violation | None = None
        self._keep = trace
        self._lines: list[str] = []
        self.milestones: list[str] = []
        self._old: dict[int, LogRow] = {}
        self._numbers = 1000
        self._processes = 0
        self._ids: dict[str, list[bytes]] = {}
        self._pending_commands: Counter[str] = Counter()
        self._finished: set[str] = set()
        self._life = self.scheduler.loop("world")
        self._build()

    def _build(self) -> None:
        scenario = self.scenario
        self.coordinators = {name: CoordinatorNode(self, name, rate) for name, rate in scenario.coordinators}
        self.addresses = [c.address for c in self.coordinators.values()]
        self.workers = {spec.name: WorkerNode(self, spec) for spec in scenario.workers}
        self.clients = {plan.client: ClientNode(self, plan.client) for plan in scenario.runs}
        self.operator = OperatorNode(self)
        self.plans = {ulid(500 + n): plan for n, plan in enumerate(scenario.runs)}
        for run_id, plan in self.plans.items():
            self.clients[plan.client].plans.append((run_id, plan))
            self.checker.ids[run_id] = self.ids(run_id)
        self.nodes: dict[str, Node] = {
            **self.coordinators, **self.workers, **self.clients, "op": self.operator,
        }  # fmt: skip
        for n, node in enumerate(self.nodes.values()):
            joins_at = node.spec.joins_at if isinstance(node, WorkerNode) else 0.0
            self.later(0.01 * n + joins_at, node.start)
        for fault in scenario.faults:
            self.later(fault.at, lambda fault=fault: strike(self, fault))
        run_ids = list(self.plans)
        for command in scenario.commands:
            self._pending_commands[run_ids[command.run]] += 1
            self.later(0.5, lambda command=command: self._try(command, run_ids[command.run]))

    # ---- names and numbers

    def fresh(self) -> str:
        self._numbers += 1
        return ulid(self._numbers)

    def fresh_worker(self, executors: tuple[str, ...]) -> str:
        self._processes += 1
        incarnation = ulid(600 + self._processes)
        self.checker.hosts[incarnation] = executors
        return incarnation

    def ids(self, run_id: str) -> list[bytes]:
        found = self._ids.get(run_id)
        if found is None:
            count = len(self.plans[run_id].items)
            found = self._ids[run_id] = [b"%s%06d" % (run_id.encode(), n) for n in range(count)]
        return found

    def dial(self, loop: NodeLoop) -> Dial:
        return lambda address, credentials: Channel(self.network, loop, address, credentials.pem)

    def later(self, seconds: float, act: Callable[[], Any]) -> None:
        self.scheduler.at(self.scheduler.now + seconds, self._life, act)

    def time_to_die(self) -> float:
        """From SIGKILL to the end of a child process."""
        return self._deaths.uniform(0.001, 0.5)

    # ---- what is observed

    def note(self, line: str) -> None:
        """A milestone."""
        self.milestones.append(line)
        self._line(f"{self.scheduler.now:.6f} {line}")

    def _line(self, line: str) -> None:
        self._lines.append(line)

    def digest(self) -> str:
        """Of the whole trace."""
        return hashlib.blake2b("".join(self._lines).encode(), digest_size=16).hexdigest()

    @property
    def trace(self) -> list[str]:
        """If it was asked for."""
        return self._lines if self._keep else []

    def _fired(self, kind: str) -> None:
        self.faults[kind] += 1

    def count_event(self, name: str) -> None:
        self.events[name] += 1

    def violation(self, invariant: str, message: str) -> Violation:
        if self.failure is None:
            self.failure = Violation(invariant, message)
            self.scheduler.stop = True
        return self.failure

    violated = violation

    def _unhandled(self, loop: NodeLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.crashed(loop.name, error if isinstance(error, BaseException) else RuntimeError(str(context)))

    def crashed(self, name: str, error: BaseException) -> None:
        """Something of production code raised what nobody expects."""
        if isinstance(error, Violation):
            self.violation(error.invariant, error.message)
        else:
            self.violation("unhandled", f"{name}: {error!r}").__cause__ = error

    def lost_exceptions(self) -> None:
        """Of tasks whose result nobody asks for, in the seconds after the end of the seed neither: it may have come
        between the end of a task and the turn of whoever waits for it, who has to hear of something else first."""
        if self._failed_tasks():
            self.scheduler.stop = False
            self.scheduler.run(self.scheduler.now + ASKED_WITHIN_S)
        for node, task in self._failed_tasks():
            self.crashed(node.name, task.exception() or RuntimeError("?"))

    def _failed_tasks(self) -> list[tuple[Node, SimTask]]:
        return [
            (node, task)
            for node in self.nodes.values()
            for task in node.loop.tasks
            if node.alive and task.done() and not task.cancelled() and task._log_traceback  # type: ignore[attr-defined]  # pyright: ignore
        ]

    def stepped(self, node: CoordinatorNode, events: list[Event], step: Step, state: State) -> None:
        self.steps += 1
        idle = len(events) == 1 and isinstance(events[0], Tick)
        self.idle_steps += idle
        try:
            node.sessions.stepped(events, step, state.sessions)
            if idle:
                books(state)
        except Violation as violation:
            raise self.violation(violation.invariant, violation.message) from None
        commands = [e for e in events if isinstance(e, RunCommand)]
        node.continued = {e.run_id for e in commands if e.verb in ("resume", "continue")}
        node.ended = self._taken(events, step) if step.sends else set()
        lease, epoch = self.store.tables.lease, node.epoch
        if lease is not None and lease.epoch != epoch:
            self._fired("deposed_leader_steps")
        kinds = "Tick" if idle else ",".join([type(event).__name__ for event in events])
        self._line(f"{self.scheduler.now:.6f} {node.name}/{epoch} {kinds} -> {len(step.sends)} {len(step.loads)}")

    @staticmethod
    def _taken(events: list[Event], step: Step) -> set[tuple[int, int, int]]:
        """Attempts that a step cancels, or whose worker leaves by it."""
        left = {e.session for e in events if isinstance(e, WorkerGoodbye)}
        over = [keys for send in step.sends if isinstance(send, SendCancel) for keys in send.keys]
        over += [
            keys for send in step.sends if isinstance(send, SendWelcome) and send.session in left for keys in send.keep
        ]
        return {(k.log, *attempt) for k in over for attempt in zip(k.seq, k.attempt, strict=True)}

    def led(self, node: CoordinatorNode) -> None:
        self.note(f"{node.name} leads epoch {node.epoch}")
        if node.crashes_to_come:
            after, down = node.crashes_to_come.pop(0)
            self.later(after, lambda life=node.lives: self._dies(node, life, down))

    def _dies(self, node: CoordinatorNode, life: int, down: float) -> None:
        if node.alive and node.lives == life:
            self.note(f"{node.name} dies as leader")
            if node.recovering():
                self._fired("crash_in_recovery")
            node.crash()
            node.restart_in(down)

    def emitted(self, node: CoordinatorNode, send: Emit) -> None:
        self.events[send.event] += 1
        self._line(f"{self.scheduler.now:.6f} {node.name} {send.event} {sorted(send.fields.items())}")
        if send.event == "worker_quarantined" and send.fields["worker"] not in self.liars:
            self.violation("protocol", f"{node.name} takes an honest worker for a liar: {send.fields}")

    def _before(self, who: str, fence: Fence, writes: Writes) -> None:
        self._guarded(lambda: self.checker.before(who, fence, writes))
        logs = self.store.tables.logs
        self._old = {log: logs[log] for log in writes.logs if log in logs}

    def _committed(self, who: str, fence: Fence, writes: Writes) -> None:
        self.commits += 1
        self._guarded(lambda: self.checker.committed(writes, self._old))
        rows = [(row.log, row.submitted, row.cursor, row.done, row.failed) for row in writes.logs.values()]
        self._line(f"{self.scheduler.now:.6f} {who} commits {fence.epoch}/{fence.batch} {rows}")
        for run in writes.runs.values():
            self._line(f"run {run.spec.run_id[-3:]} {run.state}")

    def _guarded(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as violation:
            raise self.violation(violation.invariant, violation.message) from None

    def starts(self, node: WorkerNode, held: Held) -> None:
        def grace(incarnation: str) -> bool:
            # A host that was stopped and goes on finds out with its next tick.
            woke = [w.woke_at for w in self.workers.values() if w.incarnation == incarnation]
            asleep = [w for w in self.workers.values() if w.incarnation == incarnation and w.loop.state == PAUSED]
            return bool(asleep) or any(self.scheduler.now - at <= 2 * WORKER_TICK for at in [*woke, node.woke_at])

        self._guarded(lambda: self.checker.hosted(node.incarnation, executor_of(held), held.key))
        self.checker.starts(node.incarnation, held.log, held.seq, held.attempt, held.spec.exclusive, grace)

    def leased(self, node: WorkerNode, devices: Sequence[str], asked: int, others: Sequence[Sequence[str]]) -> None:
        """A child process starts beside `others`, which have not ended."""
        taken = {device for lease in others for device in lease}
        if len(devices) != asked or taken & set(devices):
            self.violation("devices", f"{node.name} gives {devices} to a process that asks for {asked}; taken {taken}")
        self.events["devices_leased"] += asked

    def start_failed(self, node: WorkerNode, executor: str) -> None:
        self._fired("start_fails")
        self.checker.start_failed.add(executor)

    def _holds(self, incarnation: str, key: AttemptKey) -> bool:
        """Whether that worker process still has the attempt."""
        node = next((w for w in self.workers.values() if w.incarnation == incarnation), None)
        return node is not None and node.alive and node.driver is not None and key in node.driver.session.held

    def heard(self, node: WorkerNode, epoch: int) -> None:
        """A worker process takes what a coordinator of that epoch said."""
        self._guarded(lambda: self.checker.heard(node.incarnation, epoch))

    def stops(self, node: WorkerNode, key: AttemptKey) -> None:
        self.checker.stops(node.incarnation, key.log, key.seq, key.attempt)

    def revoking(self, session: str) -> None:
        """A steal is under way: whoever waited for it is drained."""
        for node in self.workers.values():
            if node.drain_at_revoke is not None and node.alive and node.driver.session_id == session:
                budget, node.drain_at_revoke = node.drain_at_revoke, None
                self._fired("drain_in_steal")
                self.note(f"fault drain_in_steal {node.name}")
                node.drain(budget)

    # ---- runs

    def opened_at(self, run_id: str) -> float:
        return self.plans[run_id].at

    def is_known(self, run_id: str) -> bool:
        return run_id in self.store.tables.runs

    def has_ended(self, run_id: str) -> bool:
        row = self.store.tables.runs.get(run_id)
        return row is not None and row.state in ENDED

    def final(self, run_id: str) -> bool:
        return not self._pending_commands[run_id] and self.has_ended(run_id)

    def finished(self, run_id: str) -> None:
        row = self.store.tables.runs[run_id]
        log = self.store.tables.logs[row.root_log]
        self.note(f"run {run_id[-3:]} {row.state} {log.cursor}/{log.submitted} done {log.done} failed {log.failed}")
        self._finished.add(run_id)
        if len(self._finished) == len(self.plans):
            self._end_when_due()

    def _end_when_due(self) -> None:
        """Not before the last fault, nor before there was something to see."""
        if self.scheduler.now >= self.scenario.heal_at and self.steps >= self._steps_min:
            self.scheduler.stop = True
        else:
            self.later(0.5, self._end_when_due)

    def _try(self, command: Command, run_id: str) -> None:
        """Wait for the run to get that far."""
        row = self.store.tables.runs.get(run_id)
        waits = command.verb == "continue" and self.scheduler.now < self.scenario.heal_at  # for a run that failed
        if row is None or (
            row.state not in ENDED and (waits or self.store.tables.logs[row.root_log].cursor < command.after)
            and self.scheduler.now < self.scenario.heal_at
        ):  # fmt: skip
            self.later(0.2, lambda: self._try(command, run_id))
            return
        self.operator.spawn(self._command(command, run_id))

    async def _command(self, command: Command, run_id: str) -> None:

        obeyed = await self.operator.verb(run_id, command.verb, command.after)
        if obeyed:
            self.events[f"verb_{command.verb}"] += 1
        # The answer to a pause may have been lost, and be refused when it is asked again: the run is interrupted by then.
        # Or one of two copies was refused, and the other taken since somebody had continued the run in between.
        if command.back and not obeyed:
            await asyncio.sleep(1.0)
        held = self.store.tables.runs[run_id].state in (RunState.INTERRUPTED, RunState.PAUSED)
        if command.back and (obeyed or held):
            await asyncio.sleep(command.seconds)
            await self.operator.verb(run_id, command.back)
            if command.back == "resume":  # an interrupted run takes another word
                await self.operator.verb(run_id, "continue")
        self._pending_commands[run_id] -= 1
