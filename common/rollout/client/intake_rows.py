"""Messages on their way from a queue to a run: received, passed to the submitting thread, durable. No I/O."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollout.client.intake_index import Receipt, Taken, body_of, item_id, key_of
from rollout.model.errors import InputError
from rollout.model.item import NewItem
from rollout.queues.port import Message
from rollout.workloads.input_lines import Line
from rollout.workloads.invalid import invalid_item

LINGER_S = 0.01
"""How long a frame that is not full waits for the next row."""
_BOM = b"\xef\xbb\xbf"

Make = Callable[[Line], NewItem]
"""Makes an item of a row. Raises InputError if it is not one."""


@dataclass(slots=True, eq=False)
class Held:
    """A message that is not known to be in the ledger. `message` is its last delivery. `fault` says why it is not a
    row, if that is known early. `seq` is set once it was passed on, `durable` once it is in the ledger."""

    message: Message
    key: bytes
    body: bytes
    fault: str = ""
    seq: int = -1
    durable: bool = False

    @classmethod
    def of(cls, message: Message) -> Held:
        return cls(message, key_of(message.id), body_of(message.body))

    @classmethod
    def left(cls, receipt: Receipt) -> Held:
        """Return a message of the ledger that an earlier command did not delete."""
        return cls(Message(receipt.id, b"", receipt.receipt, 0), receipt.key, b"", durable=True)

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.key, self.message.id, self.message.receipt)

    @property
    def taken(self) -> Taken:
        return Taken(self.key, self.body, self.seq)


def line_of(message: Message, seq: int) -> Line:
    raw = message.body.removeprefix(_BOM).strip()
    return Line(seq, f"message {message.id}", 1, raw)


def fault_in(error: InputError, line: Line) -> str:
    """Return the fault without its place: a message is one row, whatever its lines."""
    return error.message.removeprefix(f"{line.where}: ").removeprefix(f"{line.file}: ")


class RowFeed:
    """Call `begin`, then submit `items`; call `end` when nothing more comes, `close` to stop at once.

    With `skip`, a message that is not a row becomes an invalid item; otherwise `items` raises InputError once all rows
    before it are durable. Messages are added and settled in the event loop, items are taken in a thread.
    """

    def __init__(self, make: Make, *, skip: bool) -> None:
        self._make = make
        self._skip = skip
        self._waiting: deque[Held] = deque()
        self._handed: deque[Held] = deque()
        self._bytes = 0
        self._next = 0
        self._durable = 0
        self._ended = self._closed = False
        self._changed = threading.Condition()

    def begin(self, seq: int) -> None:
        """Set the seq of the next row."""
        self._next = self._durable = seq

    @property
    def taken(self) -> int:
        """Number of the run's rows, including those that wait here."""
        return self._next + len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    @property
    def unsettled(self) -> int:
        """Number of rows that were passed on and are not known to be durable."""
        return len(self._handed)

    def add(self, held: Sequence[Held]) -> None:
        with self._changed:
            self._waiting.extend(held)
            self._bytes += sum(len(one.message.body) for one in held)
            self._changed.notify_all()

    def withdraw(self, which: Callable[[Held], bool] = lambda held: True) -> list[Held]:
        """Remove and return messages that wait here."""
        with self._changed:
            gone = [held for held in self._waiting if which(held)]
            self._waiting = deque(held for held in self._waiting if not which(held))
            self._bytes -= sum(len(held.message.body) for held in gone)
            return gone

    def durable(self, count: int) -> list[Held]:
        """Return messages that became durable, now that the run has `count` durable rows."""
        settled: list[Held] = []
        with self._changed:
            self._durable = max(self._durable, count)
            while self._handed and self._handed[0].seq < count:
                settled.append(self._handed.popleft())
            self._changed.notify_all()
        return settled

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def items(self) -> Iterator[NewItem | None]:
        """Yield items, or None when no row is ready and the frame so far should be sent."""
        fresh = 0  # handed on since the last None
        while True:
            with self._changed:
                if not self._changed.wait_for(self._ready, LINGER_S if fresh else None):
                    item = None
                elif self._closed or not self._waiting:
                    return
                else:
                    held = self._waiting[0]
                    item, fault = self._item(held)
                    if item is None:
                        break
                    self._take(held)
            fresh = 0 if item is None else fresh + 1
            yield item
        yield from self._until_durable(fresh)
        raise InputError(
            f'message {held.message.id}: {fault}. Mend or remove it, or set on_bad_row = "skip" in section [input]'
        )

    def _take(self, held: Held) -> None:
        self._waiting.popleft()
        self._bytes -= len(held.message.body)
        held.seq = self._next
        self._next += 1
        self._handed.append(held)

    def _until_durable(self, fresh: int) -> Iterator[None]:
        """Yield None until what is in the ledger is settled."""
        if fresh:
            yield None
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._durable >= self._next)

    def _item(self, held: Held) -> tuple[NewItem | None, str]:
        """Return the item, or the fault that ends the intake."""
        line = line_of(held.message, self._next)
        try:
            if held.fault:
                raise InputError(held.fault)
            if not line.raw:
                raise InputError("it is empty")
            item = self._make(line)
        except InputError as error:
            line.fault = fault_in(error, line)
            if not self._skip:
                return None, line.fault
            item = invalid_item(line)
            item.id = b"invalid"
        item.id = item_id(held.key, held.body, item.id)
        return item, ""

    def _ready(self) -> bool:
        return self._closed or bool(self._waiting) or self._ended
