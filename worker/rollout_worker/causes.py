"""What this worker cannot start, and why, as it reports to its coordinator. Pure, like the session."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollout.model.item import Failure
from rollout.wire.v1 import work_pb2

from rollout_worker.attempts import Held, Plan
from rollout_worker.executors.port import DISK_FULL, STORE_AWAY, WEIGHTS_GONE
from rollout_worker.processes.plans import Limits, limits

TRIES = 4
"""Consecutive failures after which a cause counts as final though it might resolve: pauses of seven seconds in all,
beside the time of the attempts. One that no retry can change is final at once."""
MESSAGE_MAX = 2000
OF_STORE = frozenset({DISK_FULL, STORE_AWAY})
"""Causes that keep inputs and results from being moved until a user makes room or brings the store back."""

Concerned = tuple[str, str, Limits | None]
"""(run, executor, what its items ask for their own process, or None if they share an engine)."""


class StartFailure:
    """Failure of one process key."""

    __slots__ = ("concerned", "failure", "times", "waits")

    def __init__(self) -> None:
        self.failure = Failure("", "", True)
        self.times = 0
        self.waits = False  # an attempt waits for its end, however long that takes
        self.concerned: set[Concerned] = set()

    @property
    def final(self) -> bool:
        if self.waits or self.failure.code == WEIGHTS_GONE:
            return False
        return not self.failure.retryable or self.times >= TRIES


class Causes:
    """Causes by process key."""

    def __init__(self) -> None:
        self._causes: dict[str, StartFailure] = {}

    def knows(self, key: str) -> bool:
        return key in self._causes

    def keys_of(self, code: str) -> list[str]:
        return [key for key, cause in self._causes.items() if cause.failure.code == code]

    def runs(self) -> set[str]:
        """Return all affected runs."""
        return {run_id for cause in self._causes.values() for run_id, _, _ in cause.concerned}

    def failed(self, plan: Plan, failure: Failure, *, waits: bool = False) -> None:
        """Record that a process of that plan did not start, or that its work cannot continue and `waits` or is
        returned."""
        cause = self._causes.setdefault(plan.key, StartFailure())
        if failure.code != cause.failure.code:
            cause.times = 0
        cause.failure, cause.waits = failure, waits
        cause.times += 1

    def concern(self, key: str, waiting: Iterable[Held]) -> None:
        """Add attempts that cannot begin because of it."""
        cause = self._causes.get(key)
        if cause is not None:
            for held in waiting:
                asked = None if held.plan.kind != "slot" else limits(held.spec)
                cause.concerned.add((held.plan.run.run_id, held.plan.run.executor, asked))

    def is_of_store(self, key: str) -> bool:
        """Return whether inputs or results wait for it."""
        return key in self._causes and self._causes[key].failure.code in OF_STORE

    def clear(self, key: str) -> bool:
        """Record that the process has started; return whether there was a cause."""
        return self._causes.pop(key, None) is not None

    def forget(self, run_id: str) -> list[str]:
        """Forget an ended run; return the keys that affect no other."""
        for cause in self._causes.values():
            cause.concerned = {some for some in cause.concerned if some[0] != run_id}
        unused = [key for key, cause in self._causes.items() if not cause.concerned]
        for key in unused:
            del self._causes[key]
        return unused

    def to_wire(self, retry_in_s: Callable[[str], float]) -> work_pb2.Causes:
        """Return the message. `retry_in_s` is the time until the next attempt, by key."""
        said = work_pb2.Causes()
        for key, cause in self._causes.items():
            for run_id, executor, asked in sorted(cause.concerned, key=str):
                said.causes.add(
                    run_id=run_id,
                    executor=executor,
                    any_resources=asked is None,
                    gpus=asked.devices if asked is not None else 0,
                    memory_mib=asked.memory_mib if asked is not None else 0,
                    code=cause.failure.code,
                    message=cause.failure.message[:MESSAGE_MAX],
                    times=cause.times,
                    final=cause.final,
                    retry_in_ms=int(1000 * retry_in_s(key)) + 1,
                )
        return said
