"""Takes rows from a queue into a run for as long as they arrive.

A message is deleted as soon as its item is durable in the ledger, not before. One that is delivered again is found by
the hash of its id, in the run or on its way there: it does not become a second row, and is deleted again. What was
prefetched when the intake ends is returned.

The receipt of a message is on disk before its row is in the ledger, until the message is deleted: the next command
deletes what a killed one left. The run is not sealed while the queue may still have a message of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rollout.client.intake_index import NAME, IndexDamagedError, Receipt, Taken, TakenIndex, conflict_key_of
from rollout.client.intake_rows import Held, Make, RowFeed
from rollout.model.errors import ConflictError, RolloutError, StorageError, UnavailableError
from rollout.model.item import NewItem
from rollout.queues.keeper import Keeper, Loss
from rollout.queues.port import Message, Queue, may_pass
from rollout.queues.probe import is_probe, pass_on
from rollout.wire.v1 import runs_pb2 as pb

T = TypeVar("T")
Items = Callable[[int], Iterable[NewItem | None]]
Submit = Callable[[Items, Callable[[int], None]], Awaitable[int]]
State = Literal["beginning", "receiving", "away", "draining", "ended"]

WINDOW_MIN = 64
"""Minimum rows of the run without a result: the workers' next ones."""
AHEAD_S = 4.0
"""Seconds of work to keep in stock, since a status comes every second."""
BYTES_MAX = 64 << 20
"""Maximum bytes of messages that were received and not passed on."""
AT_ONCE = 500
"""Maximum messages requested in a call."""
POLL_S = 5.0
"""How long the service waits for a message; a drain waits as long."""
AWAY_S = (1.0, 30.0)
"""Pauses between two tries at a queue that cannot be reached: the first, and the longest."""
TELL_AGAIN_S = 60.0
DEPTH_EVERY_S = 5.0
DELETE_S = 60.0
"""How long a drain tries to delete what is in the ledger."""
GIVE_BACK_S = 10.0
EMPTY_ANYWAY, EMPTY_ANYWAY_S = 10.0, 60.0
"""A queue that reports waiting messages, but returns none for this many waits and this long, counts as empty: others
hold the messages before them in their group."""
_INDEX_TRIES = 3
_CONFLICTS = 5
"""How often another command may write to the run before that is an error."""


class Ledger(Protocol):
    """The methods of `rollout.client.Runs` that are used here."""

    def items(self, run_id: str, which: str = "all", *, from_seq: int = 0) -> AsyncGenerator[pb.ItemsReply, None]: ...


class Intake:
    """Call `run` until the intake has ended, drained or empty for long. `observe` reports the run's progress meanwhile.

    `stop_when_empty_s` 0 means never. `lease_s` is that of messages. `directory` has the index of what was taken.
    `tell` is for the user.
    """

    def __init__(
        self,
        queue: Queue,
        ledger: Ledger,
        run_id: str,
        make: Make,
        *,
        skip: bool,
        lease_s: float,
        stop_when_empty_s: float,
        directory: Path,
        tell: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._run_id = run_id
        self._make, self._skip = make, skip
        self._feed = RowFeed(make, skip=skip)
        self._keeper = Keeper(queue, lease_s, self._lost)
        self._index = TakenIndex(directory / NAME, run_id)
        self._lease_s = min(lease_s, queue.facts.max_lease_s)
        self._empty_s = stop_when_empty_s
        self._tell = tell
        self._now = now
        self._coming: dict[bytes, Held] = {}
        """Messages by key that were received and are not in the index yet."""
        self._settled: deque[Held] = deque()
        self._deleting: list[Held] = []
        self._acking: set[str] = set()
        """Receipts that the service is being asked to delete."""
        self._astray: dict[bytes, float] = {}
        """Messages of the ledger that may be delivered again, by key, with the time at which their lease ended."""
        self._gone = False
        """Whether the queue no longer exists, and with it none of its messages."""
        self._unknown_until = 0.0
        """Until then an earlier command, whose receipts are lost, may have leases."""
        self._wanted, self._unfinished, self._running = WINDOW_MIN, 0, True
        self._mean_bytes = 1024.0
        self._began = asyncio.Event()
        self._drained = asyncio.Event()
        self._changed = asyncio.Event()
        self._indexing = asyncio.Lock()
        self._told: dict[str, float] = {}
        self._depth: int | None = None
        self._state: State = "beginning"

    # ---- for those who watch

    @property
    def source(self) -> str:
        """The queue's name for users."""
        return self._queue.facts.name

    @property
    def state(self) -> State:
        return self._state

    @property
    def taken(self) -> int:
        """Number of the run's rows so far, including those on their way."""
        return self._feed.taken

    @property
    def draining(self) -> bool:
        return self._drained.is_set()

    def drain(self) -> None:
        """Stop receiving, and end. May be called repeatedly."""
        self._drained.set()
        self._changed.set()

    def observe(self, *, final: int, running: int, per_s: float, active: bool) -> None:
        """Report progress: `final` rows of the run have a result, `running` ones are at work, `active` means that the
        run takes work."""
        self._wanted = max(WINDOW_MIN, 2 * running, round(AHEAD_S * per_s))
        self._unfinished = max(0, self._feed.taken - final)
        self._running = active
        self._changed.set()

    def committed(self, count: int) -> None:
        """Report results that are known earlier than by `observe`."""
        self._unfinished = min(self._unfinished, max(0, self._feed.taken - count))
        self._changed.set()

    @property
    def depth(self) -> int | None:
        """Approximate number of waiting messages, None if unknown."""
        return self._depth

    async def _measure(self) -> None:
        while True:
            try:
                self._depth = await self._queue.depth()
            except RolloutError:
                self._depth = None
            await asyncio.sleep(DEPTH_EVERY_S)

    # ---- the intake

    async def run(self, submit: Submit) -> int:
        """Run the intake, and return the run's number of rows once it is sealed. Raises errors of `submit` and of the
        queue, or InputError for a message that is not a row, if none may be skipped.

        Rows of another command, such as the last ones of a killed one, are no error: what was on its way is returned,
        and is a row only if the ledger does not have it.
        """
        for left in reversed(range(_CONFLICTS)):
            try:
                return await self._run(submit)
            except ConflictError as error:
                if not left:
                    text = f"another command wrote to this run: {error.message}. Give the same command again"
                    raise ConflictError(text) from error
                self._tell("note: another command wrote to this run: what it has is read anew, and the intake goes on")
                await self._begin_anew()
        raise AssertionError("returned or raised above")

    async def _begin_anew(self) -> None:
        await self._give_back_messages([held.message for held in self._coming.values() if not held.durable])
        self._coming.clear()
        self._deleting.clear()  # their receipts are in the index
        self._feed = RowFeed(self._make, skip=self._skip)
        self._began.clear()
        self._state = "beginning"

    async def _run(self, submit: Submit) -> int:
        jobs: list[asyncio.Future[Any]] = []
        try:
            await self._indexed(self._index.open)
            submitting = asyncio.ensure_future(submit(self._items, self._durable))
            work = (self._keeper.run(), self._receive_all(), self._settle_all(), self._measure())
            jobs = [submitting, *(asyncio.ensure_future(one) for one in work)]
            waiting = set(jobs)
            while not submitting.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for job in done:
                    job.result()
            return submitting.result()
        finally:
            self._feed.close()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self._leave()
            self._state = "ended"

    async def _leave(self) -> None:
        """Clean up, however it ended: return what was not passed on, and delete what is in the ledger."""
        await self._give_back(self._feed.withdraw())
        with suppress(RolloutError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await self._settle()
                await self._delete([])
        if self._deleting:
            self._tell(
                f"note: {len(self._deleting)} messages are in the ledger, and could not be deleted from the queue: "
                "the same command deletes them; before it did, another run takes them as its rows too"
            )
        await asyncio.to_thread(self._index.close)

    def _items(self, start: int) -> Iterator[NewItem | None]:
        """Yield the items. Called once, unless the run is sealed."""
        self._feed.begin(start)
        self._began.set()
        return self._feed.items()

    def _durable(self, count: int) -> None:
        for held in self._feed.durable(count):
            held.durable = True
            self._settled.append(held)
        self._changed.set()

    # ---- receiving

    async def _receive_all(self) -> None:
        await self._began.wait()
        known = self._index.count
        if known > self._feed.taken:
            self._tell("note: the ledger has fewer rows than were taken before: what was taken is read from it anew")
            await self._indexed(self._index.clear)
        await self._delete_what_was_left(known)
        pause, empty_since, last = AWAY_S[0], None, False
        self._state = "receiving"
        while not self.draining:
            if (room := self._room()) <= 0:
                empty_since, last = None, False
                await self._change()
                continue
            asked = self._now()
            try:
                messages = await self._receive(
                    room, min(POLL_S, self._empty_s) if self._empty_s and not last else POLL_S
                )
                if self._state == "away" and not messages:
                    await self._queue.is_empty(self._lease_s)  # that nothing came may be no answer
                empty_since = None if messages else asked if empty_since is None else empty_since
                empty = empty_since is not None and await self._is_empty(self._now() - empty_since)
                empty = empty and not self._own_may_come()
            except RolloutError as error:
                if not may_pass(error):
                    raise
                self._state = "away"
                self._tell_again("away", f"the queue cannot be reached: {error.message}; it is tried again")
                await self._change(pause)
                pause, empty_since, last = min(2 * pause, AWAY_S[1]), None, False
                continue
            self._back()
            pause = AWAY_S[0]
            if messages:
                last = False
                await self._sort(messages)
                continue
            if last and empty:
                self._tell(f"nothing has come from the queue for {self._empty_s:g} s: the intake ends")
                break
            last = empty  # one long look, for what is on its way
        await self._finish()

    async def _delete_what_was_left(self, known: int) -> None:
        """Delete messages of the ledger that a killed command did not delete. If the index had only `known` rows, and
        some of the others have no receipt, wait for their leases."""
        count = self._feed.taken
        left = await self._indexed(self._index.receipts)
        found = await self._indexed(lambda: self._index.find([one.key for one in left]), count=count)
        if count - known > sum(one.seq >= known for one in found.values()):
            self._unknown_until = self._now() + self._lease_s
        await self._indexed(lambda: self._index.release([one for one in left if one.key not in found], taken=False))
        held = [Held.left(one) for one in left if one.key in found]
        if held:
            self._tell(f"note: {len(held)} messages of an earlier command are in the ledger: they are deleted now")
            messages, lost = [one.message for one in held], list[Message]()
            try:
                lost = await self._queue.extend(messages, self._lease_s)
            except RolloutError as error:
                if not may_pass(error):
                    raise
            self._keeper.hold([message for message in messages if message not in lost])
            self._deleting += held
            self._changed.set()

    def _own_may_come(self) -> int:
        """Return how many messages of the ledger the queue may still have: their lease was lost before they were
        deleted, and they neither came again nor had time to."""
        now = self._now()
        self._astray = {key: until for key, until in self._astray.items() if until > now}
        if count := len(self._astray) or (self._feed.taken if self._unknown_until > now else 0):
            until = max(self._unknown_until, *self._astray.values(), now)
            self._tell_again(
                "astray",
                f"up to {count} messages that are in the ledger may be in the queue still: they are waited for, "
                f"{until - now:.0f} s at most",
            )
        return count

    async def _is_empty(self, for_s: float) -> bool:
        """Return whether nothing arrived for as long as the intake waits. A slow or unreachable service returns
        nothing, too, so its report counts as well, unless it claims waiting messages for long. Raises UnavailableError.
        """
        if not self._empty_s or for_s < self._empty_s:
            return False
        self._depth = await self._queue.depth()
        if self._depth is None:
            return await self._queue.is_empty(self._lease_s)
        return not self._depth or for_s >= max(EMPTY_ANYWAY * self._empty_s, EMPTY_ANYWAY_S)

    async def _receive(self, room: int, wait_s: float) -> list[Message]:
        """Receive messages. A drain waits for a running request: to cancel it would hide messages from everyone for a
        lease."""
        asking = asyncio.ensure_future(self._queue.dequeue(room, self._lease_s, wait_s))
        try:
            messages = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.cancel()
            with suppress(asyncio.CancelledError, RolloutError):
                await self._give_back_messages(await asking)
            raise
        self._keeper.hold(messages)
        return await self._without_probes(messages)

    async def _without_probes(self, messages: list[Message]) -> list[Message]:
        """Return messages of a `doctor` to it, and the others to the caller."""
        probes = [message for message in messages if is_probe(message)]
        if not probes:
            return messages
        self._keeper.release(probes)
        with suppress(RolloutError):
            await pass_on(self._queue, probes)
        return [message for message in messages if message not in probes]

    def _room(self) -> int:
        if not self._running:
            return 0
        waiting = self._feed.waiting + self._feed.unsettled
        by_bytes = int((BYTES_MAX - self._feed.waiting_bytes) / self._mean_bytes)
        by_flight = self._queue.facts.max_in_flight - self._keeper.held
        return min(self._wanted - max(self._unfinished, waiting), by_bytes, by_flight, AT_ONCE)

    async def _change(self, at_most_s: float | None = None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()

    async def _sort(self, messages: list[Message]) -> None:
        """Pass on new messages, and delete again those already taken."""
        mean = sum(len(message.body) for message in messages) / len(messages)
        self._mean_bytes = max(1.0, mean, 0.8 * self._mean_bytes + 0.2 * mean)
        received = [Held.of(message) for message in messages]
        new, again, conflicts = await self._told_apart(received)
        if conflicts:
            more, once_more, _ = await self._told_apart(conflicts)
            new, again = [*new, *more], [*again, *once_more]
        await self._indexed(lambda: self._index.hold([held.receipt for held in received]))
        self._feed.add(new)
        self._unfinished += len(new)
        await self._delete(again)

    async def _told_apart(self, received: list[Held]) -> tuple[list[Held], list[Held], list[Held]]:
        """Return (new ones, those already taken, those with the id of another message, to be checked again)."""
        coming = {held.key: self._coming.get(held.key) for held in received}  # some are settled meanwhile
        found = await self._indexed(lambda: self._index.find(coming))
        new: list[Held] = []
        again: list[Held] = []
        conflicts: list[Held] = []
        for held in received:
            was = coming[held.key]  # its lease may have been lost meanwhile: then this one takes its place
            other = found.get(held.key) or self._coming.get(held.key) or (was if was and was.durable else None)
            if other is None:
                self._coming[held.key] = held
                new.append(held)
            elif other.body != held.body:
                held.key = conflict_key_of(held.message.id, held.message.body)
                held.fault = "a message with this id came before, with another body"
                self._tell(f"warning: message {held.message.id} came before, with another body: it is no row")
                conflicts.append(held)
            elif isinstance(other, Held) and not other.durable:  # it is deleted with the delivery that came first
                self._keeper.release([other.message])
                other.message = held.message
            else:
                again.append(held)
        return new, again, conflicts

    def _lost(self, messages: list[Message], why: Loss) -> None:
        """Note that the leases of these messages are lost: what was not passed on may go elsewhere."""
        receipts = {message.receipt for message in messages} - self._acking
        if not receipts:
            return
        gone = self._feed.withdraw(lambda held: held.message.receipt in receipts)
        for held in gone:
            self._coming.pop(held.key, None)
        reason = {
            "taken": "the queue gave them to somebody else",
            "outage": "they could not be extended in time",
            "limit": "a message cannot be held for longer",
        }[why]
        kept = len(receipts) - len(gone)
        also = (
            f"; {kept} of them are on their way into the ledger, and are deleted when they come again" if kept else ""
        )
        self._tell_again("lost", f"the leases of {len(receipts)} messages ended: {reason}{also}")

    # ---- settling

    async def _settle_all(self) -> None:
        await self._began.wait()
        while True:
            await self._settle()
            await self._change_of_settled()

    async def _change_of_settled(self) -> None:
        while not self._settled:
            await self._change(1.0 if self._deleting else None)
            if self._deleting and not self._settled:
                await self._delete([])

    async def _settle(self) -> None:
        """Delete what is durable at once, and add it to the index."""
        settled = [self._settled.popleft() for _ in range(len(self._settled))]
        if not settled:
            return
        deleting = asyncio.ensure_future(self._delete(settled))
        try:
            taken = [held.taken for held in settled]
            await self._indexed(lambda: self._index.add(taken, settled[-1].seq + 1))
        finally:
            await deleting
        for held in settled:
            if self._coming.get(held.key) is held:
                del self._coming[held.key]

    async def _delete(self, held: list[Held]) -> None:
        """Delete messages, extending their leases until then. Those that may be delivered again are remembered, and
        deleted then."""
        self._deleting += held
        batch, self._deleting = self._deleting, []
        if not batch:
            return
        messages = [one.message for one in batch]
        acking = {message.receipt for message in messages}
        self._acking |= acking
        try:
            unsure = {message.receipt for message in await self._queue.ack(messages)}
        except RolloutError as error:
            self._deleting += batch
            if not may_pass(error):
                raise
            self._gone = error.context.get("failure") == "missing"
            self._tell_again(
                "away", f"the queue cannot be reached: {error.message}; {len(batch)} messages are deleted later"
            )
            return
        except BaseException:
            self._deleting += batch
            raise
        finally:
            self._acking -= acking
        self._gone = False
        self._keeper.release(messages)
        self._astray |= {one.key: self._now() + self._lease_s for one in batch if one.message.receipt in unsure}
        deleted = [one.receipt for one in batch if one.message.receipt not in unsure]
        for one in deleted:
            self._astray.pop(one.key, None)
        await self._indexed(lambda: self._index.release(deleted))

    # ---- the end

    async def _finish(self) -> None:
        """Return what was prefetched, wait until what was passed on is durable and deleted, then seal the run."""
        self._state = "draining"
        await self._give_back(self._feed.withdraw())
        until = None
        while self._feed.unsettled or self._settled or self._undeleted or self._coming:
            if not self._feed.unsettled:
                until = self._now() + DELETE_S if until is None else until
                if self._gone:
                    break
                if self._now() >= until:
                    raise UnavailableError(
                        f"{self._undeleted} messages are in the ledger, and could not be deleted from the queue: "
                        "the run stays open, so that they are known when they come again; give the same command again"
                    )
            await self._change(0.2)
        if own := self._own_may_come():
            raise UnavailableError(
                f"up to {own} messages that are in the ledger may be in the queue still, and another run would take "
                "them: the run stays open, so that they are known when they come again; give the same command again"
            )
        self._feed.end()

    @property
    def _undeleted(self) -> int:
        """Number of messages whose deletion the service has not confirmed."""
        return len(self._deleting) + len(self._acking)

    async def _give_back(self, held: list[Held]) -> None:
        for one in held:
            self._coming.pop(one.key, None)
        await self._give_back_messages([one.message for one in held])

    async def _give_back_messages(self, messages: list[Message]) -> None:
        if not messages:
            return
        self._keeper.release(messages)
        with suppress(RolloutError, TimeoutError):  # else they come again when their leases end
            async with asyncio.timeout(GIVE_BACK_S):
                await self._queue.nack(messages)

    # ---- the index

    async def _indexed(self, do: Callable[[], T], *, count: int = 0) -> T:
        """Run `do` in a thread once the index knows `count` rows, since an earlier command may have ended before that.
        A damaged index is made anew from the ledger, which knows them all."""
        async with self._indexing:
            damaged = False
            for _ in range(_INDEX_TRIES):
                try:
                    if damaged:
                        await asyncio.to_thread(self._index.open)
                        await asyncio.to_thread(self._index.hold, self._receipts())
                    if damaged or self._index.count < count:
                        await self._read_ledger(None if damaged else count)
                    return await asyncio.to_thread(do)
                except IndexDamagedError as error:
                    damaged = True
                    if self._state == "beginning":
                        self._unknown_until = self._now() + self._lease_s
                    self._tell(f"note: {error}; it is made anew from the ledger")
        raise StorageError(f"{NAME} is damaged again and again: another program writes to it, or the disk fails")

    def _receipts(self) -> list[Receipt]:
        return [held.receipt for held in (*self._coming.values(), *self._deleting)]

    async def _read_ledger(self, count: int | None) -> None:
        """Read the ledger into the index. `count` is the number of rows wanted, None for all."""
        async with aclosing(self._ledger.items(self._run_id, "all", from_seq=self._index.count)) as pages:
            async for page in pages:
                taken = [Taken.of(one.seq, one.id) for one in page.items]
                known = page.items[-1].seq + 1 if page.items else page.next_seq
                await asyncio.to_thread(self._index.add, taken, known)
                if count is not None and known >= count:
                    break

    # ---- telling

    def _tell_again(self, what: str, text: str) -> None:
        """Tell the user at once, and then from time to time."""
        told = self._told.get(what)
        if told is None or self._now() - told >= TELL_AGAIN_S:
            self._told[what] = self._now()
            self._tell(text)

    def _back(self) -> None:
        if self._state == "away":
            self._state = "receiving"
            if self._told.pop("away", None) is not None:
                self._tell("the queue can be reached again")
