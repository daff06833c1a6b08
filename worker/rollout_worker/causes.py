"""What this worker cannot start, and why, as it tells its coordinator. Pure, as the session is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollout.model.item import Failure
from rollout.wire.v1 import work_pb2

from rollout_worker.attempts import Held, Plan
from rollout_worker.executors.port import DISK_FULL, STORE_AWAY, WEIGHTS_GONE
from rollout_worker.processes.plans import Limits, limits

TRIES = 4
"""Failed tries in a row after which a cause counts as final though it might go away by itself: pauses of seven
seconds in all, beside what a try takes. One that no repetition can change is final at once."""
MESSAGE_MAX = 2000
OF_STORE = frozenset({DISK_FULL, STORE_AWAY})
"""What keeps inputs and results from being moved, until a person makes room or brings the store back."""

Concerned = tuple[str, str, Limits | None]
"""Run, executor, what its items ask for of a process of their own (None: they share an engine)."""


class StartFailure:
    """Of one process key."""

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
    """By process key."""

    def __init__(self) -> None:
        self._causes: dict[str, StartFailure] = {}

    def knows(self, key: str) -> bool:
        return key in self._causes

    def keys_of(self, code: str) -> list[str]:
        return [key for key, cause in self._causes.items() if cause.failure.code == code]

    def runs(self) -> set[str]:
        """All that are concerned."""
        return {run_id for cause in self._causes.values() for run_id, _, _ in cause.concerned}

    def failed(self, plan: Plan, failure: Failure, *, waits: bool = False) -> None:
        """A try to start a process of that plan failed, or what it runs cannot go on, and `waits` or goes back."""
        cause = self._causes.setdefault(plan.key, StartFailure())
        if failure.code != cause.failure.code:
            cause.times = 0
        cause.failure, cause.waits = failure, waits
        cause.times += 1

    def concern(self, key: str, waiting: Iterable[Held]) -> None:
        """These cannot begin for it."""
        cause = self._causes.get(key)
        if cause is not None:
            for held in waiting:
                asked = None if held.plan.kind != "slot" else limits(held.spec)
                cause.concerned.add((held.plan.run.run_id, held.plan.run.executor, asked))

    def is_of_store(self, key: str) -> bool:
        """Whether it is what inputs or results wait for."""
        return key in self._causes and self._causes[key].failure.code in OF_STORE

    def clear(self, key: str) -> bool:
        """It has started. Whether that is news."""
        return self._causes.pop(key, None) is not None

    def forget(self, run_id: str) -> list[str]:
        """That run has ended. The keys that concern no other."""
        for cause in self._causes.values():
            cause.concerned = {some for some in cause.concerned if some[0] != run_id}
        unused = [key for key, cause in self._causes.items() if not cause.concerned]
        for key in unused:
            del self._causes[key]
        return unused

    def to_wire(self, retry_in_s: Callable[[str], float]) -> work_pb2.Causes:
        """`retry_in_s`: until the next try, by key."""
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
