"""Turns the rows of any iterable into items of a run. Rows are read ahead, within a window, in a thread of their
own."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections import deque
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any

from rollout.model.errors import InputError, RolloutError
from rollout.model.item import NewItem
from rollout.workloads.map.plan import Planner, lane_of
from rollout.workloads.values import encode

LINGER_S = 0.02
"""How long a frame that is not full waits for the next row."""
READ_AHEAD = 1024
"""Number of rows to read ahead."""


class RowsError(RolloutError):
    """The iterable of rows raised an exception, which is the cause of this one."""


class Feed:
    """Call `start`, then submit what `items` yields. `consumed` moves the window; `close` ends the feed.

    `window` is the maximum number of submitted rows that are not consumed, or None for no limit; it must exceed two
    frames. `is_finite` means that the iterable has a length; one without may be endless.
    """

    def __init__(
        self, rows: Iterable[Any], planner: Planner, lane_key: str, lanes: frozenset[str], window: int | None
    ) -> None:
        self._rows = rows
        self._planner = planner
        self._lane_key = lane_key
        self._lanes = lanes
        self._window = window
        self._read: deque[NewItem] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self.failed = False  # its rows could not be submitted, which ends the run
        self._handed = 0
        self._consumed = 0
        self._changed = threading.Condition()
        self.is_finite = operator.length_hint(rows, -1) >= 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def handed(self) -> int:
        """Number of rows yielded so far."""
        return self._handed

    def start(self) -> None:
        threading.Thread(target=self._run, name="rollout-rows", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def consumed(self, count: int) -> None:
        with self._changed:
            self._consumed += count
            self._changed.notify_all()

    def lift_window(self) -> None:
        """Remove the limit, because nobody reads outcomes any more."""
        with self._changed:
            self._window = None
            self._changed.notify_all()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for index, row in enumerate(self._rows):
                item = self._item(index, row)
                with self._changed:
                    while len(self._read) >= READ_AHEAD and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        break
                    self._read.append(item)
                    self._changed.notify_all()
        except BaseException as caught:  # noqa: BLE001 - the caller's iterable: it is raised where outcomes are read
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _item(self, index: int, row: Any) -> NewItem:
        what = f"row {index + 1}"
        try:
            payload = encode(row, what)
            lane = self._lane(row) if self._lane_key else ""
        except (ValueError, RecursionError) as error:
            raise InputError(str(error)) from error
        except InputError as error:
            raise InputError(f"{what}: {error.message}") from error
        return self._planner.item(index, payload, lane)

    def _lane(self, row: Any) -> str:
        lane = lane_of(row, self._lane_key)
        if lane not in self._lanes:
            raise InputError(f"its field {self._lane_key!r} is {lane!r}, which is none of the lanes that were given")
        return lane

    def items(self) -> Iterator[NewItem | None]:
        """Yield items, or None when no row is ready and the frame so far should be sent. Raises RowsError if the rows
        raise."""
        fresh = 0  # handed on since the last None
        while True:
            with self._changed:
                if not self._changed.wait_for(self._ready, LINGER_S if fresh else None):
                    item = None
                elif self._closed:
                    return
                elif self._read:
                    item = self._read.popleft()
                    self._handed += 1
                    self._changed.notify_all()
                elif self._error is not None:
                    error = self._error
                    raise RowsError(f"the rows raised {type(error).__name__}: {error}") from error
                else:
                    return
            fresh = 0 if item is None else fresh + 1
            yield item

    def _ready(self) -> bool:
        """Return whether a row can be yielded, or the end has been reached."""
        room = self._window is None or self._handed - self._consumed < self._window
        return self._closed or (bool(self._read) and room) or (self._ended and not self._read)


_END = object()


class AsyncRows:
    """Lets another thread iterate over an async iterable, which runs in `loop`."""

    def __init__(self, rows: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._rows = rows
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        rows = aiter(self._rows)

        async def following() -> Any:
            return await anext(rows, _END)

        while (row := asyncio.run_coroutine_threadsafe(following(), self._loop).result()) is not _END:
            yield row
