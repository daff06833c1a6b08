"""Virtual time: one scheduler, and an asyncio event loop for each node on it.

No selector, no threads. Handles run in the order in which they became ready; when none is, time jumps to the next
timer. A node's loop has its own monotonic clock, can be paused (its handles wait) and killed (they are dropped).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.events import _set_running_loop  # pyright: ignore[reportPrivateUsage]
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any

RUNNING, PAUSED, DEAD = 0, 1, 2


class Handle:
    """What `call_soon`, `call_later` and `call_at` return, which fill it: a seed makes 5,000, and a call each shows."""

    __slots__ = ("args", "callback", "due", "gone", "loop")

    loop: NodeLoop
    due: float  # of the scheduler's clock
    callback: Callable[..., Any]
    args: tuple[Any, ...]
    gone: bool

    def cancel(self) -> None:
        self.gone = True

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self.loop.local(self.due)


class SimTask(asyncio.Task[Any]):
    """Hashed by number, so that sets of tasks have one order in every process."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class NodeLoop(asyncio.AbstractEventLoop):
    """The event loop of one node. `rate`: seconds of its clock in a second of the scheduler's."""

    def __init__(self, scheduler: Scheduler, name: str, *, start: float = 0.0, rate: float = 1.0) -> None:
        self.scheduler = scheduler
        self.name = name
        self.state = RUNNING
        self.rate = rate
        self.lag = 0.0  # a slow node: every timer fires this much later
        self.start = start
        self._stash: list[Handle] = []
        self.tasks: list[SimTask] = []
        self._ready = scheduler.ready

    # ---- time

    def time(self) -> float:
        return self.start + self.scheduler.now * self.rate

    def local(self, due: float) -> float:
        return self.start + due * self.rate

    # ---- handles

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        handle = Handle()
        handle.loop = self
        handle.due = 0.0
        handle.callback = callback
        handle.args = args
        handle.gone = False
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        scheduler = self.scheduler
        handle = Handle()
        handle.loop = self
        handle.due = due = scheduler.now + delay / self.rate + self.lag
        handle.callback = callback
        handle.args = args
        handle.gone = False
        scheduler.count += 1
        heappush(scheduler.timers, (due, scheduler.count, handle))
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_later(when - self.time(), callback, *args)

    # ---- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None) -> Any:
        task = SimTask(coro, loop=self, name=name or "t")
        self.scheduler.numbers += 1
        task.number = self.scheduler.numbers
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once: a thread would make the order of things depend on the machine."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        return future

    get_debug: Any = staticmethod(bool)  # False, and every future asks

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.state is not DEAD and not self.scheduler.over:
            self.scheduler.unhandled(self, context)

    # ---- life

    def pause(self) -> None:
        if self.state == RUNNING:
            self.state = PAUSED

    def resume(self) -> None:
        if self.state == PAUSED:
            self.state = RUNNING
            self._ready.extend(self._stash)
            self._stash.clear()

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs again, no `finally` either."""
        self.state = DEAD
        self._stash.clear()

    def stashed(self, handle: Handle) -> None:
        self._stash.append(handle)


class Scheduler:
    """`run` until the given time or until `stop` is set. `unhandled(loop, context)` hears of lost exceptions."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[Handle] = deque()
        self.numbers = 0
        self.stop = False
        self.over = False
        self.unhandled: Callable[[NodeLoop, dict[str, Any]], None] = lambda loop, context: None
        self.timers: list[tuple[float, int, Handle]] = []
        self._loops: list[NodeLoop] = []
        self.count = 0  # of timers ever set: those of one moment fire in this order

    def loop(self, name: str, **clock: float) -> NodeLoop:
        loop = NodeLoop(self, name, **clock)
        self._loops.append(loop)
        return loop

    def at(self, due: float, loop: NodeLoop, callback: Callable[..., Any], *args: Any) -> Handle:
        """On `loop`, at `due` of this clock."""
        handle = Handle()
        handle.loop = loop
        handle.due = due
        handle.callback = callback
        handle.args = args
        handle.gone = False
        self.count += 1
        heappush(self.timers, (due, self.count, handle))
        return handle

    def run(self, until: float) -> None:
        ready, timers = self.ready, self.timers
        current: NodeLoop | None = None
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finalize)
        try:
            while not self.stop:
                if ready:
                    handle = ready.popleft()
                    if handle.gone:
                        continue
                else:
                    if not timers or timers[0][0] > until:
                        self.now = max(self.now, until)
                        return
                    due, _, handle = heappop(timers)
                    if handle.gone:
                        continue
                    if due > self.now:
                        self.now = due
                loop = handle.loop
                if loop is not current:
                    current = loop
                    _set_running_loop(loop)
                if not loop.state:
                    handle.callback(*handle.args)
                elif loop.state == PAUSED:
                    loop.stashed(handle)
        finally:
            sys.set_asyncgen_hooks(*hooks)
            _set_running_loop(None)

    def _finalize(self, generator: Any) -> None:
        """Of an async generator that was dropped half way: as asyncio does, unless its process is no more."""
        loop = asyncio.get_running_loop() if not self.over else None
        if loop is not None:
            loop.create_task(generator.aclose())

    def close(self) -> None:
        """Ends every coroutine that is left, quietly: they belong to processes that are no more."""
        self.over = True
        grave = NodeLoop(self, "grave")
        _set_running_loop(grave)
        try:
            for loop in self._loops:
                for task in loop.tasks:
                    if not task.done():
                        task._log_destroy_pending = False  # type: ignore[attr-defined]  # pyright: ignore
                        _bury(task.get_coro())
            for task in grave.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # pyright: ignore
                _bury(task.get_coro())
        finally:
            _set_running_loop(None)
        self.ready.clear()
        self.timers.clear()


def _bury(coro: Any) -> None:
    for _ in range(20):  # a `finally` that awaits ignores the first one
        with contextlib.suppress(BaseException):
            coro.close()
            return
