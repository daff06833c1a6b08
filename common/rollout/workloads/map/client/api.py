"""What `import rollout` offers: functions over many rows, on a cluster or on this machine.

    with rollout.connect("head:50051") as cluster:          # or rollout.local(workers=4)
        for outcome in cluster.map("scoring:score", rows, code=".", timeout_s=60):
            ...

The same for asyncio: `connect_async`, `local_async`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 # pyright: ignore[reportUnusedImport] - before _close_all is registered
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack
from weakref import WeakSet

from rollout.model.errors import RolloutError, StateError
from rollout.wire.event_loop import EventLoop
from rollout.workloads.map.client.cluster import (
    WINDOW,
    AsyncCluster,
    AsyncRun,
    MapOptions,
    Outcome,
    RowFailed,
    RunEnded,
    RunState,
    connect_async,
    local_async,
    resolve_with,
)
from rollout.workloads.map.client.function import Function
from rollout.workloads.map.failure import RowError

__all__ = [
    "AsyncCluster",
    "AsyncRun",
    "Cluster",
    "Outcome",
    "RowError",
    "RowFailed",
    "Run",
    "RunEnded",
    "RunState",
    "connect",
    "connect_async",
    "local",
    "local_async",
    "map",
]

T = TypeVar("T")
_JOIN_S = 30.0
_CLOSED = "the cluster is closed, or these outcomes are: read them within its `with` statement"
_open: set[Cluster] = set()


def _close_all() -> None:
    """Close all clusters at exit. A program that ends inside its `with` statement must not hang: neither here, where
    the interpreter joins threads that wait for rows, nor later, when no thread is left to answer."""
    for cluster in list(_open):
        with suppress(Exception):  # nobody is left to hear of it
            cluster.__exit__(SystemExit, None, None)


# As `atexit`, but before the threads of executors are waited for: those registered last go first.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


class _Loop:
    """An event loop in a thread of its own. After `close`, and in a fork, which does not inherit the thread, `call`
    raises StateError."""

    def __init__(self) -> None:
        self.results: WeakSet[Results] = WeakSet()
        self._pid = os.getpid()
        self._closed = False
        self._closing = threading.Lock()
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def runs(self) -> bool:
        return not self._closed and not self.is_forked

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_forked:
            work.close()
            raise StateError("a fork cannot use the cluster of its parent: open one of its own, after the fork")
        with self._closing:
            if self._closed:
                work.close()
                raise StateError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in this thread: what nobody waits for is not to go on
            future.cancel()
            raise

    def close(self) -> None:
        async def rest() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_asyncgens()
            await asyncio.get_running_loop().shutdown_default_executor()

        with self._closing:
            self._closed = True
        asyncio.run_coroutine_threadsafe(rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        self._loop.close()


class Results(Iterator[Outcome]):
    """Iterates over outcomes in order, as they arrive. `close` stops waiting; for `map` it also stops the run. Threads
    may share the iterator: each outcome goes to one of them."""

    def __init__(self, loop: _Loop, run: AsyncRun, *, start: int, owned: bool) -> None:
        self._loop = loop
        self._run = run
        self._pages: AsyncGenerator[list[Outcome], None] | None = run.pages(start=start)
        self._ready: Iterator[Outcome] = iter(())
        self._owned = owned
        self._turn = threading.Lock()
        self._reading = asyncio.Lock()  # after Ctrl-C a read still ends in the loop's thread while `close` is here
        self._read: asyncio.Task[Any] | None = None
        loop.results.add(self)

    @property
    def run_id(self) -> str:
        return self._run.id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Outcome:
        with self._turn:
            return self._following()

    def _following(self) -> Outcome:
        outcome = next(self._ready, None)
        while outcome is None:
            pages = self._pages
            if pages is None:
                raise StopIteration
            try:
                found = self._loop.call(self._next(pages))
            except CancelledError:
                raise StateError(_CLOSED) from None
            except BaseException:
                self.close()
                raise
            if found is None:
                self._pages = None
                raise StopIteration
            self._ready = iter(found)
            outcome = next(self._ready, None)
        return outcome

    def close(self) -> None:
        """Stop reading. Has no effect if all outcomes have been read."""
        pages, self._pages, self._ready = self._pages, None, iter(())
        if pages is not None and self._loop.runs:  # with the cluster, the waiting has ended
            self._end(pages)

    def end_with_cluster(self) -> None:
        """Close, and make further reads raise: outcomes must not seem to end here."""
        if self._pages is not None:
            self._end(self._pages)

    def _end(self, pages: AsyncGenerator[list[Outcome], None]) -> None:
        try:
            if self._owned:
                self._loop.call(self._run.cancel())  # another thread that waits in it hears that the run has ended
        finally:
            self._loop.call(self._ended(pages))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if threading.current_thread().name != "rollout-client":
            self.close()

    async def _next(self, pages: AsyncGenerator[list[Outcome], None]) -> list[Outcome] | None:
        async with self._reading:
            self._read = asyncio.current_task()
            return await anext(pages, None)

    async def _ended(self, pages: AsyncGenerator[list[Outcome], None]) -> None:
        if self._read is not None and not self._owned:
            self._read.cancel()  # another thread's, of a run that goes on
        async with self._reading:
            await pages.aclose()


class Run:
    """A run at a cluster, as `submit` returns it and `Cluster.run` finds it again."""

    def __init__(self, loop: _Loop, run: AsyncRun) -> None:
        self._loop = loop
        self._run = run

    @property
    def id(self) -> str:
        return self._run.id

    def __repr__(self) -> str:
        return f"<rollout run {self.id}>"

    def submitted(self) -> int:
        """Wait until all rows are submitted, and return their number; the run then no longer needs this process. Raises
        what the rows raised, or RunEnded if the run ends first."""
        return self._loop.call(self._run.submitted())

    def state(self) -> RunState:
        """Return the state in the ledger. Raises NotFoundError."""
        return self._loop.call(self._run.state())

    def wait(self) -> RunState:
        """Wait until the run has ended in any way. Raises what the rows raised."""
        return self._loop.call(self._run.wait())

    def results(self, *, start: int = 1) -> Results:
        """Return outcomes in order from row `start` on, as they arrive. It may be called repeatedly. Raises what the
        rows raised, or RunEnded if the run ends before all outcomes exist, for example because no worker can load the
        function."""
        return Results(self._loop, self._run, start=start, owned=False)

    def cancel(self) -> None:
        """Kill the run and its running rows. Has no effect if the run has ended."""
        self._loop.call(self._run.cancel())


class Cluster:
    """A cluster to run functions on, from `with rollout.connect(...)` or `with rollout.local(...)`."""

    def __init__(self, cluster: AsyncCluster) -> None:
        self._cluster = cluster
        self._loop_: _Loop | None = None

    @property
    def _loop(self) -> _Loop:
        if self._loop_ is None:
            raise StateError("the cluster is not open: use it in a `with` statement")
        return self._loop_

    def __enter__(self) -> Self:
        self._loop_ = _Loop()
        try:
            self._loop_.call(self._cluster.__aenter__())
        except BaseException:
            self._loop_.close()
            raise
        _open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = self._loop_
        if loop is None or loop.is_forked:
            return  # closed already, or the parent's
        _open.discard(self)
        try:
            for results in list(loop.results):
                with suppress(RolloutError, RuntimeError):  # another thread may be waiting for them
                    results.end_with_cluster()
            try:
                loop.call(self._cluster.drain(kind))
            finally:
                loop.call(self._cluster.close())
        finally:
            self._loop_ = None
            loop.close()

    @property
    def address(self) -> str:
        """Address of the coordinator, `host:port`."""
        return self._cluster.runs.address

    def run(self, run: str) -> Run:
        """Find a run that was submitted earlier, here or elsewhere, by id, unique part of the id, or name (the newest
        with that name). Raises NotFoundError, or ConfigError if several runs match."""
        return Run(self._loop, self._loop.call(self._cluster.find(run)))

    def submit(
        self,
        function: Function,
        rows: Iterable[Any],
        *,
        window: int | None = None,
        **options: Unpack[MapOptions],
    ) -> Run:
        """Start a run of `function` over `rows`, which are read while the run proceeds. Arguments are those of
        `AsyncCluster.submit`. Raises ConfigError if the run cannot start."""
        return Run(self._loop, self._submit(function, rows, window, options))

    def map(
        self,
        function: Function,
        rows: Iterable[Any],
        *,
        window: int = WINDOW,
        **options: Unpack[MapOptions],
    ) -> Results:
        """Return outcomes of `function` over `rows`, lazily and in order.

        At most `window` rows are read ahead of the last outcome taken, so `rows` may be endless. Leaving the loop
        early, by `break`, an exception or Ctrl-C, kills the run.
        """
        run = self._submit(function, rows, window, options)
        return Results(self._loop, run, start=1, owned=True)

    def _submit(self, function: Function, rows: Iterable[Any], window: int | None, options: MapOptions) -> AsyncRun:
        return self._loop.call(self._cluster.submit(function, rows, window=window, **options))


def connect(
    address: str | Iterable[str] | None = None, *, tls_dir: str | Path | None = None, patience_s: float = 60.0
) -> Cluster:
    """Return the cluster whose coordinators are at `address` (one or several `host:port`), for a `with` statement.

    Without an address it is found as commands find it (ROLLOUT_COORDINATOR, ./rollout.toml, the cluster that was
    joined). Calls follow the leader, and retry for `patience_s` seconds before they raise UnavailableError.
    """
    return Cluster(connect_async(address, tls_dir=tls_dir, patience_s=patience_s))


def local(workers: int | Literal["auto"] = 1, *, directory: str | Path | None = None) -> Cluster:
    """Return a cluster on this machine that lives as long as the `with` statement. It has `workers` processes; `"auto"`
    starts one per core.

    `directory` keeps the ledger, so that a later cluster finds the runs; by default it is deleted.
    """
    return Cluster(local_async(workers, directory=directory))


def map(
    function: Function, rows: Iterable[Any], *, workers: int | Literal["auto"] = 1, **options: Unpack[MapOptions]
) -> Iterator[Outcome]:
    """Return outcomes of `function` over `rows`, from a temporary cluster on this machine."""
    resolve_with(function, options)  # what cannot be sent is told before processes are started for it
    with local(workers) as cluster, cluster.map(function, rows, **options) as outcomes:
        yield from outcomes
