"""Port of executors: the code that runs items of one kind, in a child process of the worker daemon.

Third parties register theirs under the entry point group `rollout.executors`. An item names its executor; an item that
names none is run by the executor with the name of its run's workload.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from rollout.model.errors import AttemptError
from rollout.model.item import HANDED_OVER, Blob, Failure, ItemSpec, Key, NewItem, Outcome


@dataclass(frozen=True, slots=True)
class Run:
    """The run of an attempt as the executor `executor` sees it (default: the workload's own).

    `config` is the run's resolved configuration for the workload's own executor, and its section
    `config["executors"][NAME]` (`{}` if absent) for an executor of another name.
    """

    run_id: str
    workload: str
    config: dict[str, Any]
    name: str = ""
    executor: str = ""

    def __post_init__(self) -> None:
        if not self.executor:
            object.__setattr__(self, "executor", self.workload)

    def seen_by(self, executor: str) -> Run:
        """Return this run as `executor` sees it. Raises AttemptError if the section is no table."""
        if executor in ("", self.workload):
            return self
        sections: Any = self.config.get("executors", {})
        section: Any = cast("dict[str, Any]", sections).get(executor, {}) if isinstance(sections, dict) else None
        if not isinstance(section, dict):
            message = f"the run's configuration has no table `executors.{executor}`, but something else there"
            raise AttemptError(message, code="bad_run_config", retry=False)
        return Run(self.run_id, self.workload, cast("dict[str, Any]", section), self.name, executor)


DISK_FULL, STORE_AWAY = "disk_full", "store_unavailable"
"""Codes of what an attempt waits for without failing."""
WEIGHTS_GONE = "weights_gone"
"""Code with which an attempt is returned, however often, until its parent restarts and recreates what it needs."""
RUNS_KEPT = 32
T = TypeVar("T")


def remember(runs: dict[str, T], run_id: str, what: T) -> T:
    """Keep `what` of a run, for the newest RUNS_KEPT runs only, because processes outlive the runs they work for.

    Both ends of a child's pipe forget in the same order, so that each knows what the other still knows.
    """
    runs[run_id] = what
    if len(runs) > RUNS_KEPT:
        del runs[next(iter(runs))]
    return what


@dataclass(slots=True)
class Attempt:
    """One attempt at one item. `payload` is resolved: always bytes, never a reference."""

    key: Key
    attempt: int
    id: bytes
    payload: bytes
    spec: ItemSpec
    run: Run
    parent: Key | None = None
    predecessor: bytes | None = None  # result of the chain's previous item
    isolate: bool = False
    failures: int = 0  # attempts at it that failed before; at `spec.max_attempts - 1` this one is the last
    handoff: bytes = b""  # `data` of the last HandOverError of an attempt at it; it may be ignored
    losses: int = 0  # attempts at it that died with their worker or process


@dataclass(slots=True)
class Done:
    """Result of an attempt. `data` is the deterministic part; it is stored as an object if it is larger than
    INLINE_MAX."""

    data: bytes
    units_in: int = 0
    units_out: int = 0
    outcome: Outcome = Outcome.DONE
    keeps: tuple[bytes, ...] = ()  # objects that the result names, kept as long as it is
    seconds: float | None = None  # what the work itself took, where the executor knows it better than the runner


class UnsuitableError(AttemptError):
    """This worker cannot run the attempt, though another may: it is returned, costs no try, and the cause is reported.

    `retry` says that this worker may be able to later. When no worker is left that may, the run ends with the cause.
    """


class LostError(AttemptError):
    """The attempt's process ended, and another attempt in it may be the cause. It is lost, which costs no try; from the
    second loss on it runs alone."""


class HandOverError(AttemptError):
    """The worker leaves, and the next attempt may continue elsewhere from `data` and the objects `keeps`. It costs no
    try.

    `data` has at most HANDED_OVER_MAX bytes; the objects are kept for it.
    """

    def __init__(self, data: bytes = b"", keeps: tuple[bytes, ...] = ()) -> None:
        message = "the worker leaves; what it did so far is handed over"
        super().__init__(message, code=HANDED_OVER, data=data, keeps=keeps)


@dataclass(frozen=True, slots=True)
class Child:
    ordinal: int
    outcome: Outcome
    data: bytes
    failure: Failure | None


class Replica(Protocol):
    """An attempt that answers requests of gateways, from `async with` to the end of the block.

    A channel is the stream of one gateway. Gateways never reuse the number of a channel.
    """

    async def __aenter__(self) -> Replica: ...

    async def __aexit__(self, *_: object) -> None:
        """Tell every gateway that the replica is gone."""
        ...

    def frames(self) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yield (channel, message) in order, without end. Only one reader at a time.

        A message of None means that the channel closed and nobody waits for its answers.
        """
        ...

    def send(self, channel: int, data: bytes) -> None:
        """Send a message without waiting; it is dropped if the channel has closed. Raises InputError above 4 MiB."""
        ...

    def withdraw(self) -> None:
        """Accept no new requests; those that came may be answered until the end of the block."""
        ...


class Context(Protocol):
    """Services of the worker for a running attempt."""

    @property
    def scratch(self) -> Path:
        """Directory of the attempt, created at first use, removed when it ends."""
        ...

    def progress(self, note: str, **figures: float | str | None) -> None:
        """Report progress as text for people and as figures for programs. It is shown about once a second and not
        stored."""
        ...

    def hindered(self, message: str, *, code: str = "") -> None:
        """Report that the attempt waits until something external is mended, such as a full disk, and then continues by
        itself.

        It is shown like what a worker cannot start. An empty message ends it.
        """
        ...

    async def spawn(
        self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, keeps: Sequence[bytes] = (),
        lets_go: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        """Submit children of this attempt. (parent, ordinal) identifies them: a retried parent finds those already
        there.

        `keeps` are objects that this attempt has stored and that children need. They stay until this item has a result
        or `lets_go` names them; then they are deleted soon, unless something else refers to them.
        """
        ...

    def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        """Yield results of children in ordinal order, as they are committed, until the children are sealed.

        The slot is released while waiting, unless `holds_slot` says that the attempt works meanwhile.
        """
        ...

    async def put_object(self, data: bytes | Path) -> bytes:
        """Store an object, durably on return, and return its content id (32 bytes)."""
        ...

    async def get_object(self, blob: Blob) -> bytes: ...

    async def object_path(self, object_id: bytes) -> Path:
        """Return a local file with the object's bytes, from the host's cache."""
        ...

    async def call_plugin(
        self, name: str, method: str, payload: dict[str, Any] | bytes, timeout_s: float = 60.0
    ) -> Any:
        """Call `method` of the worker's plugin `name`. Returns a JSON value, or bytes if the plugin returns bytes.

        The timeout starts when the plugin is free. Raises AttemptError with code `not_found` if this worker has no such
        plugin (an item with `require_plugin` is sent to one that does), and `plugin` for every fault of the plugin.
        """
        ...

    def replica(self) -> Replica:
        """Answer requests of gateways of this run, as one replica at a time. Raises StateError in an executor's
        start."""
        ...


class Executor(Protocol):
    placement: ClassVar[Literal["engine", "shared", "slot"]]
    """Processes of the executor.

    engine: one child per engine_key, many concurrent attempts; a worker has few of them, because each holds a model.
    shared: like engine, but without a model, and beside engines. slot: one attempt at a time in a child from the pool.
    """

    @property
    def concurrency(self) -> int:
        """Number of concurrent attempts in one child, known after start(). Credit is about twice this."""
        ...

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """Return the key; runs with equal keys share one engine process."""
        ...

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        """Return variables that the child needs before its imports (HF_TOKEN, OMP_NUM_THREADS, ...)."""
        ...

    async def start(self, run: Run, context: Context) -> None: ...

    async def run(self, attempt: Attempt, context: Context) -> Done:
        """Run an attempt. It is cancelled on timeout, cancel and shutdown.

        Raises AttemptError if the attempt failed; the error says whether to retry.
        """
        ...

    async def close(self) -> None: ...

    # Optional, for `engine`: `devices(run) -> int`, a classmethod: the accelerators that its process has to itself
    # where the worker has any (absent: none). A slot's process has those that its item asks for as the resource `gpus`.
    # `replicas(run) -> int`, a classmethod: processes of one engine_key at once, each with its own devices; 0: as many
    # as there are devices for (absent: one).
    # `shares_devices(run) -> bool`, a classmethod: it has them by turns with a process of its run that has as many,
    # where this worker has one: that of a parent, which waits while its children work.
    # Optional, for `engine`: `ahead`, attempts beyond `concurrency` that `run` is called for before their turn, so that
    # an engine with a queue of its own never waits for a row. They count as not begun: while they are among the last,
    # `run` may be cancelled and called again, here or elsewhere. Known after start().
    # Optional, for `slot`: `ahead`, as above, of what the process has in hand anyway: an executor with its own queue
    # need not wait for the next row, nor the worker for each result. With it `take_back(keys) -> list[Key]`: those of
    # `keys` that it has not begun and will not; they are cancelled then, and only they.
    # Optional: `leave(budget_s: float) -> None`: the worker leaves in so many seconds, or sooner if it is called again;
    # what cannot end by then may raise HandOverError.
    # Optional: `hold(on: bool) -> None`: the worker is cut off from its coordinator, and another may run its attempts
    # soon: nothing more is begun that counts elsewhere, such as requests to a server with limits; or, it is back.
    # Optional: `run_many(attempts: list[Attempt]) -> list[Done | None]`, synchronous, for attempts so short that a task
    # each would cost more than the work. None: this one goes through `run`. It must not wait and must not raise.
