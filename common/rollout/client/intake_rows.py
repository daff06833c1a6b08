"""Messages on their way from a queue into a run: received, handed to the thread that submits, durable. No I/O."""

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
"""So long a frame that is not full waits for the next row."""
_BOM = b"\xef\xbb\xbf"

Make = Callable[[Line], NewItem]
"""What makes an item of a row. InputError: it is none."""


@dataclass(slots=True, eq=False)
class Held:
    """A message that is not known to be in the ledger yet. `message`: as it was delivered last. `fault`: why it is no
    row, where that is known before it is looked at. `seq`: once it was handed on. `durable`: it is in the ledger."""

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
        """A message of the ledger that an earlier command did not delete."""
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
    """What is wrong, without where: a message is a row, whatever its lines."""
    return error.message.removeprefix(f"{line.where}: ").removeprefix(f"{line.file}: ")


class RowFeed:
    """`begin`, then `items` is what is submitted; `end` when nothing more comes, `close` to stop at once.

    `skip`: a message that is no row becomes an invalid item; else `items` raises InputError with what is wrong with
    it, once all before it is durable. Messages are added and settled in the event loop, items are taken in a thread.
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
        """The next row is the run's `seq`."""
        self._next = self._durable = seq

    @property
    def taken(self) -> int:
        """Rows of the run, those included that wait here."""
        return self._next + len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    @property
    def unsettled(self) -> int:
        """Handed on, and not known to be durable."""
        return len(self._handed)

    def add(self, held: Sequence[Held]) -> None:
        with self._changed:
            self._waiting.extend(held)
            self._bytes += sum(len(one.message.body) for one in held)
            self._changed.notify_all()

    def withdraw(self, which: Callable[[Held], bool] = lambda held: True) -> list[Held]:
        """Those that wait here and are not handed on any more."""
        with self._changed:
            gone = [held for held in self._waiting if which(held)]
            self._waiting = deque(held for held in self._waiting if not which(held))
            self._bytes -= sum(len(held.message.body) for held in gone)
            return gone

    def durable(self, count: int) -> list[Held]:
        """The run has `count` rows for good: those of them that were handed on and are news."""
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
        """None: nothing more for now, so what came so far should go."""
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
        """What is in the ledger is settled before the intake ends."""
        if fresh:
            yield None
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._durable >= self._next)

    def _item(self, held: Held) -> tuple[NewItem | None, str]:
        """Or what is wrong with it, where that ends the intake."""
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
