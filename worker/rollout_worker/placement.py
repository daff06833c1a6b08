"""Placement: which child process runs what, on which accelerators; engines by key, slots from a pool. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum

from rollout.model.item import NO_LIMIT
from rollout.processes.backoff import Backoff

from rollout_worker.attempts import AttemptKey, Held, Plan, State
from rollout_worker.devices import DevicePool
from rollout_worker.session_events import Action, Deliver, KillAt, RecallIn, StartChild, StopChild

DEPTH_MAX = 512
FAST_S = 0.01
"""Seconds below which attempts are sent in larger batches, because a round trip each would cost more than the work."""
BUSY_S = 0.08
"""Seconds of work that a process is given ahead."""
RECALL_S = 0.05
"""Seconds without an ended attempt after which a process gives back what waits in it; others may be free."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 30.0
START_BACKOFF_FIRST_S, START_BACKOFF_MAX_S = 1.0, 60.0
FAIR_S = 60.0
"""Seconds that another process waits for a slot or devices before one in use makes room."""
GIVE_BACK_S = 10.0
"""Seconds that attempts wait for processes in which parents wait, before they are returned.

The children of those parents may need the slots under caps, and the credit, that the attempts take.
"""
SLOT_IDLE_S, SLOT_SLICE_S = 0.5, 3.0
"""Seconds idle, or waited for by others, after which a slot's process makes room.

A start costs more than a short row, so runs that share a slot take turns and do not swap at every row.
"""
SHARED_MAX = 8
"""Maximum number of shared processes without a model."""
UNLOAD_S = 5.0
"""Seconds idle after which an engine gives its devices to what waits for them; loading it again takes long."""


class ChildState(StrEnum):
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"


class Child:
    """Child process. Of its attempts `in_hand`, in order, it runs the first `width` that do not wait.

    It is given `base` at once: `width`, plus what its engine wants beyond that so that its batch never waits for a row.
    """

    __slots__ = (
        "alone", "base", "delivered_at", "depth", "endless", "exclusive", "id", "in_hand", "kill_at", "lender",
        "moved_at", "plan", "recalled", "retiring", "state", "timed", "used", "waiting", "width",
    )  # fmt: skip

    def __init__(self, id: int, plan: Plan) -> None:
        self.id = id
        self.plan = plan
        self.state = ChildState.STARTING
        self.width = 1
        self.base = 1
        self.depth = 1
        self.in_hand: dict[tuple[int, int], Held] = {}
        self.waiting = 0
        self.endless = 0  # those that go on until their run ends
        self.timed = 0
        self.exclusive = 0
        self.kill_at = 0.0  # when the guard kills it, if nobody moves that
        self.alone = False
        self.retiring = False
        self.used = 0
        self.delivered_at = 0.0
        self.moved_at = 0.0  # it was started, given something, or ended something
        self.recalled = False
        self.lender = 0  # the process whose devices it has by turns; 0: it has its own

    @property
    def room(self) -> int:
        if self.state is not ChildState.UP or (self.alone and self.company):
            return 0
        if self.retiring and not self.waiting:  # it ends with its parents, and their children may have no other place
            return 0
        return self.depth - len(self.in_hand) + self.waiting

    @property
    def active(self) -> int:
        return len(self.in_hand) - self.waiting

    @property
    def company(self) -> int:
        """Number of attempts that an isolated attempt must not run beside."""
        return self.active - self.endless

    @property
    def running(self) -> int:
        return min(self.active, self.width)

    def heads(self) -> Iterator[Held]:
        """Yield the attempts that it runs."""
        left = self.width
        for held in self.in_hand.values():
            if held.state is State.WAITING:
                continue
            if left == 0:
                return
            left -= 1
            yield held

    def mark_started(self, now: float) -> list[AttemptKey]:
        """Return the attempts that it runs from now on."""
        begun: list[AttemptKey] = []
        for held in self.heads():
            if held.started is None:
                held.started = now
                begun.append(held.key)
        return begun

    def take_out(self, held: Held) -> None:
        if self.in_hand.pop((held.log, held.seq), None) is None:
            return
        if held.state is State.WAITING:
            self.waiting -= 1
        if held.spec.timeout_ms:
            self.timed -= 1
        if held.spec.exclusive:
            self.exclusive -= 1
        if _is_endless(held):
            self.endless -= 1
        if held.isolate:
            self.alone = False

    def settle(self, now: float, ended: int = 0) -> list[AttemptKey]:
        """After `ended` attempts, decide how many to give it next; return those that begin now."""
        self.recalled = False
        since, self.moved_at = now - self.moved_at, now
        took = now - self.delivered_at
        if self.active and ended and self.plan.kind == "slot":
            # It is given the next before it has done all: what it has must last for the way there and back.
            lasts = self.depth * since / ended
            if lasts < BUSY_S:
                self.depth = min(self.depth * 2, DEPTH_MAX)
            elif lasts > 4 * BUSY_S:
                self.depth = max(self.base, self.depth // 2)
            return self.mark_started(now)
        if took < FAST_S:
            if not self.active:
                self.depth = min(self.depth * 2, max(DEPTH_MAX, self.base))
        elif took > 2 * FAST_S:
            self.depth = max(self.base, self.depth // 2)
        return self.mark_started(now)

    def recall(self, now: float) -> list[AttemptKey]:
        """Return what waits in it behind long attempts, beyond what it should have."""
        late = self.state is ChildState.UP and self.active > self.base and now - self.moved_at >= RECALL_S
        if self.recalled or not late:
            return []
        self.recalled = True
        self.depth = self.base
        return self.behind()[self.base - self.width :]

    def behind(self) -> list[AttemptKey]:
        """Return what it was given and does not run yet."""
        heads = set(map(id, self.heads()))
        rest = [h for h in self.in_hand.values() if h.state is State.RUNNING and id(h) not in heads]
        return [h.key for h in rest if h.started is None]  # what began while a parent waited runs on beside it


def _is_endless(held: Held) -> bool:
    """Return whether the attempt lasts until its run ends."""
    return held.spec.max_worker_lost >= NO_LIMIT


class Placement:
    """Placement of attempts. `slots` and `max_engines` limit processes; queues of unstarted attempts wait here, one per
    key.

    Each process holds the devices of its plan until it has ended. If too few are free, idle processes of other keys are
    ended, and their devices are reserved for the key that they were ended for.
    """

    def __init__(self, slots: int, max_engines: int, devices: Sequence[str] = ()) -> None:
        self.slots = slots
        self.max_engines = max_engines
        self.pool = DevicePool(devices)
        self._claim = ""  # the key that the next free devices are for
        self.children: dict[int, Child] = {}
        self.queues: dict[str, deque[Held]] = {}
        self.plans: dict[str, Plan] = {}
        self.backoffs: dict[str, Backoff] = {}
        self._blocked_since: dict[str, float] = {}
        self._behind_parents: dict[str, tuple[Plan, float]] = {}  # since when, by key
        self._next_child = 1
        self._uses = 0

    # ---- queues

    def enqueue(self, held: Held, front: bool = False) -> None:
        key = held.plan.key
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = deque()
        self.plans[key] = held.plan
        if front:
            queue.appendleft(held)
        else:
            queue.append(held)

    def head(self, key: str) -> Held | None:
        """Return the first attempt to start; those that were given up are dropped here."""
        queue = self.queues.get(key)
        while queue:
            if queue[0].state is State.QUEUED and queue[0].stop_reason == "":
                return queue[0]
            queue.popleft()
        return None

    def of_kind(self, kind: str) -> list[Child]:
        return [c for c in self.children.values() if c.plan.kind == kind]

    def _most(self, kind: str) -> int:
        """Return the maximum number of processes of a kind of which each key has one."""
        return self.max_engines if kind == "engine" else SHARED_MAX

    def backoff(self, key: str) -> Backoff:
        return self.backoffs.setdefault(key, Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S))

    # ---- dispatch

    def dispatch(self, now: float) -> tuple[list[Action], list[AttemptKey]]:
        """Return (starts, stops and deliveries; the attempts that begin). The longest-waiting key is served first."""
        actions: list[Action] = []
        begun: list[AttemptKey] = []
        if not self.queues:
            return actions, begun
        heads = [(head.assigned, key) for key in list(self.queues) if (head := self.head(key)) is not None]
        if self._claim not in [key for _, key in heads]:
            self._claim = ""
        for _, key in sorted(heads):
            self._serve(key, now, actions, begun)
        for key in [k for k, q in self.queues.items() if not q]:
            del self.queues[key], self.plans[key]
            self._blocked_since.pop(key, None)
        return actions, begun

    def _serve(self, key: str, now: float, actions: list[Action], begun: list[AttemptKey]) -> None:
        served: set[int] = set()
        while (head := self.head(key)) is not None:
            child = self._free_child(key, alone=head.isolate, skip=served)
            if child is None:
                break
            served.add(child.id)
            batch = self._fill(child, key, served)
            if batch:
                actions.append(Deliver(child.id, batch))
                child.delivered_at = child.moved_at = now
                child.recalled = False
                begun += child.mark_started(now)
        if self.head(key) is not None:
            self._grow(key, now, actions)
        else:
            self._blocked_since.pop(key, None)

    def _free_child(self, key: str, *, alone: bool, skip: set[int]) -> Child | None:
        # One whose parent attempts wait for children dies with their memory: last, when no other may be started.
        plan = self.plans[key]
        spread = self._spreads(self.head(key), plan)
        shared = plan.kind != "slot" or self._slot_room() <= 0 or plan.devices > self.pool.free
        # Processes that were made while parents waited stay; no more of them than there are slots work at once.
        full = plan.kind == "slot" and sum(1 for c in self.of_kind("slot") if c.active) >= self.slots
        best: Child | None = None
        for child in self.children.values():
            if full and not child.active:
                continue
            if child.plan.key != key or child.id in skip or child.room <= 0 or (alone and child.company):
                continue  # parents that wait are no company: they may wait for this very attempt
            if (child.waiting and not shared) or (child.endless and spread):
                continue
            if best is None or (bool(child.waiting), child.active) < (bool(best.waiting), best.active):
                best = child
        return best

    def _slot_room(self) -> int:
        """Return the number of processes to start.

        Those whose parents wait do not count, up to the same number, because children must find a slot.
        """
        pool = self.of_kind("slot")
        waiting = sum(1 for c in pool if c.waiting and not c.active)
        return self.slots + min(waiting, self.slots) - len(pool)

    def _parents_only(self) -> bool:
        """Return whether, apart from waiting parents, there are fewer processes than slots."""
        return sum(1 for c in self.of_kind("slot") if c.active or not c.waiting) < self.slots

    def _fill(self, child: Child, key: str, served: set[int]) -> list[Held]:
        batch: list[Held] = []
        room = child.room
        if child.plan.replicas != 1:
            others = sum(1 for c in self.children.values() if c.plan.key == key and c.room > 0 and c.id not in served)
            room = min(room, -(-len(self.queues[key]) // (others + 1)))  # none has rows ahead while another idles
        while len(batch) < room and (held := self.head(key)) is not None:
            if (held.isolate and child.company) or (child.endless and self._spreads(held, child.plan)):
                break
            self.queues[key].popleft()
            batch.append(held)
            held.move("deliver")
            held.child = child.id
            child.in_hand[held.log, held.seq] = held
            if held.spec.timeout_ms:
                child.timed += 1
            if held.spec.exclusive:
                child.exclusive += 1
            if _is_endless(held):
                child.endless += 1
            if held.isolate:
                child.alone = True
                break
        self._uses += 1
        child.used = self._uses
        return batch

    def _grow(self, key: str, now: float, actions: list[Action]) -> None:
        plan = self.plans[key]
        mine = [c for c in self.children.values() if c.plan.key == key]
        starting = sum(1 for c in mine if c.state is ChildState.STARTING)
        wanted = len(self.queues[key]) - starting
        if wanted <= 0 or plan.devices > len(self.pool.devices):
            return
        if now < self.backoff(key).until:
            self._claim = "" if self._claim == key else self._claim
            return
        replica = bool(mine) and plan.kind != "slot"
        if replica:
            room = self._replicas(plan) - len(mine)  # those there are start, are full, alone or retiring
        elif plan.kind != "slot":
            engines = len({c.plan.key for c in self._rivals(plan)})
            room = self._replicas(plan) if engines < self._most(plan.kind) else 0
        else:
            room = self._slot_room()
            if room <= 0 and not mine and self._parents_only():
                room = 1  # children of another executor than their parents, whose processes they cannot share
        supplied = self._supplied(plan)
        for _ in range(min(wanted, room, supplied)):
            actions.append(self.start(plan, now))
        if starting or replica:  # one that works ends no other process for a second one
            return
        if supplied == 0:  # first: a place is no use without them, and others have work for it
            self._free_devices(key, plan.devices, now, actions)
        elif room <= 0:
            self._make_room(key, plan.kind, now, actions)

    def _spreads(self, held: Held | None, plan: Plan) -> bool:
        """Return whether an endless attempt goes to its own process; it does while there is or may be one without."""
        mine = [c for c in self.children.values() if c.plan.key == plan.key]
        free = any(not c.endless for c in mine) or len(mine) < self._replicas(plan)
        return plan.replicas != 1 and held is not None and _is_endless(held) and free

    def _replicas(self, plan: Plan) -> int:
        """Return the number of processes of an engine."""
        if plan.replicas:
            return plan.replicas
        return max(1, len(self.pool.devices) // plan.devices) if plan.devices else 1

    def impossible(self, now: float) -> list[tuple[str, Plan]]:
        """Return the keys that wait for more devices than exist."""
        return [
            (key, plan)
            for key, plan in self.plans.items()
            if plan.devices > len(self.pool.devices) and now >= self.backoff(key).until and self.head(key) is not None
        ]

    def behind_parents(self, now: float) -> list[str]:
        """Return the keys whose attempts have no process, and could only replace one in which parents have waited long.

        This includes attempts that came since.
        """
        known = {key: (plan, now) for key, plan in self.plans.items()} | self._behind_parents
        self._behind_parents = {key: (plan, t) for key, (plan, t) in known.items() if self._is_behind_parents(plan)}
        long = [key for key, (_, since) in self._behind_parents.items() if now - since >= GIVE_BACK_S]
        return [key for key in long if self.head(key) is not None]

    def _is_behind_parents(self, plan: Plan) -> bool:
        parents = [c for c in self.children.values() if c.waiting]
        if not parents or any(c.plan.key == plan.key for c in self.children.values()):
            return False
        others = len(self.pool.devices) - sum(len(self.pool.of(c.id)) for c in parents)
        if plan.devices > others and self._lender(plan) is None:
            return True
        rivals = [c for c in self._rivals(plan) if c.waiting]
        return plan.kind != "slot" and len({c.plan.key for c in rivals}) >= self._most(plan.kind)

    def _rivals(self, plan: Plan) -> list[Child]:
        """Return the processes that take slots of the plan's kind, without those of its own run whose parents wait,
        because their children must find a slot."""
        parents = [c for c in self.of_kind(plan.kind) if c.waiting and c.plan.run.run_id == plan.run.run_id]
        return [c for c in self.of_kind(plan.kind) if c not in parents]

    def _supplied(self, plan: Plan) -> int:
        """Return how many processes there are devices for."""
        if not plan.devices or self._lender(plan) is not None:
            return self.slots + self.max_engines
        return self.pool.free // plan.devices if self._claim in ("", plan.key) else 0

    def _free_devices(self, key: str, count: int, now: float, actions: list[Action]) -> None:
        """End idle processes of other keys if that frees enough; those in use only if `key` has waited long."""
        since = self._blocked_since.setdefault(key, now)
        if self._claim not in ("", key):
            return
        holders = [c for c in self.children.values() if c.plan.key != key and self.pool.of(c.id)]
        leaving = [c for c in holders if c.state is ChildState.STOPPING]
        short = count - self.pool.free - sum(len(self.pool.of(c.id)) for c in leaving)
        up = sorted((c for c in holders if c.state is ChildState.UP), key=lambda c: c.used)
        chosen: list[Child] = []
        for child in [c for c in up if not c.in_hand and self._may_unload(c, now)]:
            if short > 0:
                short -= len(self.pool.of(child.id))
                chosen.append(child)
        if short <= 0:
            self._claim = key
            actions += [self.stop(child) for child in chosen]
        elif now - since >= FAIR_S:
            self._claim = key
            short -= sum(len(self.pool.of(c.id)) for c in up if c.retiring and c not in chosen)
            for child in [c for c in up if not c.retiring and not c.waiting and not c.endless and c not in chosen]:
                if short > 0:
                    short -= len(self.pool.of(child.id))
                    child.retiring = True
            actions += [self.stop(child) for child in chosen]

    def _may_unload(self, child: Child, now: float) -> bool:
        """Return whether to unload an idle engine: it may soon be needed again, unless nothing else can run without its
        devices."""
        if child.plan.kind == "slot" or now - child.moved_at >= UNLOAD_S:
            return True
        return not any(c.in_hand for c in self.children.values())

    def _make_room(self, key: str, kind: str, now: float, actions: list[Action]) -> None:
        """End the least recently used idle process of another key.

        One in use gives nothing up, but takes no more once `key` has waited its time.
        """
        others = [c for c in self.of_kind(kind) if c.plan.key != key]
        if any(c.state is ChildState.STOPPING for c in others):
            return
        limit, grace = (SLOT_SLICE_S, SLOT_IDLE_S) if kind == "slot" else (FAIR_S, 0.0)
        due = now - self._blocked_since.setdefault(key, now) >= limit
        up = [c for c in others if c.state is ChildState.UP]
        idle = [c for c in up if not c.in_hand and (due or now - c.moved_at >= grace)]
        busy = [c for c in up if not c.waiting and not c.endless]
        if idle:
            actions.append(self.stop(min(idle, key=lambda c: c.used)))
        elif due and busy and not any(c.retiring for c in others):
            min(busy, key=lambda c: c.used).retiring = True

    def behind_endless(self) -> list[tuple[Plan, list[str]]]:
        """Return what waits for a process, and the runs whose endless attempts have all that it could get."""
        found: list[tuple[Plan, list[str]]] = []
        for key in self._blocked_since:
            plan, others = self.plans[key], [c for c in self._rivals(self.plans[key]) if c.plan.key != key]
            if others and all(c.endless for c in others) and self.head(key) is not None:
                endless = (h for c in others for h in c.in_hand.values() if _is_endless(h))
                found.append((plan, sorted({held.plan.run.run_id for held in endless})))
        return found

    def recall(self, now: float) -> list[Action]:
        asked = [(child.id, child.recall(now)) for child in self.children.values()]
        asked += [self._recall_for(child) for child in self.children.values() if self._is_idle_replica(child)]
        return [RecallIn(child, keys) for child, keys in asked if keys]

    def _is_idle_replica(self, child: Child) -> bool:
        return child.plan.replicas != 1 and child.room > 0 and not child.in_hand and self.head(child.plan.key) is None

    def _recall_for(self, idle: Child) -> tuple[int, list[AttemptKey]]:
        """Return half of the rows that wait in the fullest of the other replicas."""
        others = [c for c in self.children.values() if c.plan.key == idle.plan.key and not c.recalled and c is not idle]
        full = max(others, key=lambda c: len(c.behind()), default=idle)
        behind = full.behind()
        full.recalled = bool(behind)
        return full.id, behind[len(behind) // 2 :]

    def kill_times(self, at: float) -> list[Action]:
        """Return the times for the guard: processes with exclusive attempts are killed then, others are not."""
        actions: list[Action] = []
        for child in self.children.values():
            wanted = at if child.exclusive else 0.0
            if child.kill_at != wanted and child.state is not ChildState.STARTING:
                child.kill_at = wanted
                actions.append(KillAt(child.id, wanted))
        return actions

    # ---- processes

    def start(self, plan: Plan, now: float) -> StartChild:
        child = Child(self._next_child, plan)
        child.moved_at = now
        self._next_child += 1
        self.children[child.id] = child
        lender = self._lender(plan)
        if lender is not None:
            child.lender = lender.id
            devices = self.pool.of(lender.id)[: plan.devices]
        else:
            devices = self.pool.lease(child.id, plan.devices)
        if self._claim == plan.key:
            self._claim = ""
        self._blocked_since.pop(plan.key, None)
        return StartChild(child.id, plan, devices if self.pool.devices else None)

    def ended(self, child: Child) -> None:
        """Record that a child's process has ended and holds no devices."""
        del self.children[child.id]
        self.pool.give_back(child.id)
        for borrower in self.children.values():
            if borrower.lender == child.id:
                borrower.retiring = True

    def _lender(self, plan: Plan) -> Child | None:
        """Return the process of its run whose devices suffice for `plan`, which may share them."""
        if not plan.shares or not plan.devices:
            return None
        others = (c for c in self.children.values() if c.plan.run.run_id == plan.run.run_id and c.plan.key != plan.key)
        return next((c for c in others if len(self.pool.of(c.id)) >= plan.devices), None)

    def stop(self, child: Child, *, kill: bool = False) -> StopChild:
        child.state = ChildState.STOPPING
        return StopChild(child.id, kill)

    def starting_since(self, time: float) -> list[Child]:
        """Return processes that were started by then and are not ready yet."""
        return [c for c in self.children.values() if c.state is ChildState.STARTING and c.moved_at <= time]

    def retire(self, run_id: str) -> None:
        """Mark processes of an ended run whose executor used its id as their key: no other run can use them."""
        for child in self.children.values():
            if run_id in child.plan.key:
                child.retiring = True

    def retire_idle(self) -> list[Action]:
        """End idle processes that were asked to make room, or whose run is over."""
        return [
            self.stop(c)
            for c in self.children.values()
            if c.retiring and not c.in_hand and c.state is ChildState.UP
        ]  # fmt: skip

    def ready(self, child: Child, width: int, ahead: int = 0) -> None:
        child.state = ChildState.UP
        child.width = max(1, width)
        child.base = child.depth = child.width + ahead
