"""Concurrent rows of an `async def` function in the event loop of its process (map_process.py).

A row is read from the socket when there is a slot for it, so rows that were not begun can still be taken back. The
number of the row that holds the loop is in memory that the executor reads: if the process crashes or its loop does not
answer, that row is to blame.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from rollout.processes.framing import HEAD

ROW_OF_CONTEXT: ContextVar[int] = ContextVar("row", default=0)
"""Number of the current row, also in tasks and threads that the row starts."""
NUMBER = struct.Struct("<Q")
"""Format of a row's number: the body of a cancelling frame, and the first bytes of the dump."""
CANCEL = 1
"""Kind of the frame that cancels a row."""
_CANCEL_BYTES = HEAD.size + NUMBER.size
_FRAMES_MAX = 30
OWN_FILES = frozenset({__file__, os.path.join(os.path.dirname(__file__), "map_process.py")})  # noqa: PTH118, PTH120


class Holder:
    """Number of the row that holds the event loop, in the first bytes of a shared file; 0 for none."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, NUMBER.size)

    def set(self, number: int) -> None:
        NUMBER.pack_into(self._memory, 0, number)


class Stepped(Coroutine[Any, Any, Any]):
    """Coroutine that records at each of its steps which row it belongs to."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, holder: Holder) -> None:
        self.inner = inner
        self._number = number
        self._holder = holder

    def send(self, value: Any) -> Any:
        self._holder.set(self._number)
        try:
            return self.inner.send(value)
        finally:
            self._holder.set(0)

    def throw(
        self, typ: Any, val: BaseException | object | None = None, tb: TracebackType | None = None, /
    ) -> Any:  # fmt: skip
        self._holder.set(self._number)
        try:
            return self.inner.throw(typ) if val is None and tb is None else self.inner.throw(typ, val, tb)
        finally:
            self._holder.set(0)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.inner.__await__()


def where(task: asyncio.Task[Any]) -> str:
    """Return the user's frames in which `task` waits, innermost first."""
    coroutine: Any = task.get_coro()
    awaited: Any = coroutine.inner if isinstance(coroutine, Stepped) else coroutine
    lines: list[str] = []
    while (frame := getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)) is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file not in OWN_FILES:
            lines.append(f'  File "{file}", line {line} in {frame.f_code.co_name}')
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "\n".join(reversed(lines[-_FRAMES_MAX:]))


class Rows:
    """Reads rows while fewer than `at_once` run, and cancels those whose numbers arrive on `control`.

    `read` splits a datagram into number and payload. `perform` calls the function with the payload and reports the
    result, unless the row is cancelled: then `cancelled` reports where it was, once it has ended.
    """

    def __init__(
        self,
        rows: socket.socket,
        control: socket.socket,
        at_once: int,
        holder: Holder,
        *,
        read: Callable[[bytes], tuple[int, bytes]],
        perform: Callable[[int, bytes, Callable[[], bool]], Coroutine[Any, Any, None]],
        cancelled: Callable[[int, str], None],
    ) -> None:
        self._rows = rows
        self._control = control
        self._at_once = at_once
        self._holder = holder
        self._read = read
        self._perform = perform
        self._cancelled = cancelled
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waited: dict[int, str] = {}  # where rows were that have been cancelled
        self._asked = b""
        self._reads = False
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._task)
        self._loop.add_reader(control, self._cancel)
        self._go_on()

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task that belongs to the row that starts it."""
        if number := ROW_OF_CONTEXT.get():
            coroutine = Stepped(coroutine, number, self._holder)
        return asyncio.Task(coroutine, loop=loop, **options)

    def _go_on(self) -> None:
        room = len(self._tasks) < self._at_once
        if room and not self._reads:
            self._loop.add_reader(self._rows, self._begin)
        elif self._reads and not room:
            self._loop.remove_reader(self._rows)
        self._reads = room

    def _begin(self) -> None:
        while len(self._tasks) < self._at_once:
            try:
                message = self._rows.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:  # it was taken back
                break
            if not message:
                os._exit(0)
            number, payload = self._read(message)
            token = ROW_OF_CONTEXT.set(number)
            task = self._loop.create_task(self._perform(number, payload, partial(self._waited.__contains__, number)))
            ROW_OF_CONTEXT.reset(token)
            self._tasks[number] = task
            task.add_done_callback(partial(self._ended, number))
        self._go_on()

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if (waited := self._waited.pop(number, None)) is not None:
            self._cancelled(number, waited)
        self._go_on()

    def _cancel(self) -> None:
        said = self._control.recv(1 << 12)
        if not said:
            os._exit(0)
        self._asked += said
        while len(self._asked) >= _CANCEL_BYTES:
            (number,) = NUMBER.unpack_from(self._asked, HEAD.size)
            self._asked = self._asked[_CANCEL_BYTES:]
            task = self._tasks.get(number)
            if task is not None and number not in self._waited:
                self._waited[number] = where(task)
                task.cancel()


def run(make: Callable[[], object]) -> NoReturn:
    """Run the `Rows` that `make` returns in a loop that lives as long as the process."""

    async def main() -> None:
        rows = make()
        await asyncio.get_running_loop().create_future()
        del rows

    asyncio.run(main())
    os._exit(0)
