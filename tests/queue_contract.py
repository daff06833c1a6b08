"""What every queue does, as tests that an adapter's own subclass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from rollout.model.errors import InputError, StateError
from rollout.queues import Message, Outgoing, Queue

PassTime = Callable[[float], Awaitable[None]]


def out(*bodies: bytes) -> list[Outgoing]:
    return [Outgoing(body) for body in bodies]


class QueueContract:
    """Subclass it with fixtures `queue` (empty) and `pass_time(seconds)` for an adapter.

    What a service does not promise: `ordered`: messages come in the order in which they were sent. `counts`: it tells
    how often a message was delivered. `tells_lost`: it tells that a lease was lost.
    """

    ordered = True
    counts = True
    tells_lost = True
    lease_s = 30.0
    short_s = 10.0
    wait_s = 10.0

    async def take(self, queue: Queue, count: int, lease_s: float = 0.0) -> list[Message]:
        """`count` messages, in as many calls as the service likes."""
        got: list[Message] = []
        while len(got) < count:
            new = await queue.dequeue(count - len(got), lease_s or self.lease_s, self.wait_s)
            assert new, f"only {len(got)} of {count} messages came"
            got += new
        return got

    def told(self, deliveries: int) -> int:
        return deliveries if self.counts else 0

    async def test_in_and_out(self, queue: Queue) -> None:
        ids = await queue.enqueue(out(b"a", b"b", b"c", b""))
        assert len(set(ids)) == 4
        got = await self.take(queue, 4)
        assert {m.id: m.body for m in got} == dict(zip(ids, (b"a", b"b", b"c", b""), strict=True))
        if self.ordered:
            assert [m.id for m in got] == ids
        assert {m.deliveries for m in got} == {self.told(1)}
        assert await queue.ack(got) == []
        assert await queue.dequeue(10, self.lease_s) == []

    async def test_nothing_sent_nothing_done(self, queue: Queue) -> None:
        assert await queue.enqueue([]) == []
        assert await queue.dequeue(0, self.lease_s, 5.0) == []
        assert await queue.extend([], self.lease_s) == []
        assert await queue.ack([]) == []
        await queue.nack([])

    async def test_attributes_and_bytes_arrive_as_they_were(self, queue: Queue) -> None:
        bodies = [b"\xff\x00\n", "text \u2028 \U0001f600 \ufffe".encode(), b"\x07", b"line\nline\t\r", b"YQ=="]
        sent = [Outgoing(body, {"row": str(n), "tenant": "a b"}, f"g{n}") for n, body in enumerate(bodies)]
        await queue.enqueue(sent)
        got = await self.take(queue, len(bodies))
        await queue.ack(got)
        assert sorted((m.attributes["row"], m.attributes, m.body) for m in got) == [
            (str(n), {"row": str(n), "tenant": "a b"}, body) for n, body in enumerate(bodies)
        ]

    async def test_a_batch_of_any_size(self, queue: Queue) -> None:
        bodies = {b"%d" % n for n in range(43)}
        await queue.enqueue([Outgoing(body, group=body.decode()) for body in sorted(bodies)])
        got = await self.take(queue, 43)
        assert {m.body for m in got} == bodies
        assert await queue.extend(got, self.lease_s) == []
        await queue.nack(got[:30])
        again = await self.take(queue, 30)
        assert {m.id for m in again} == {m.id for m in got[:30]}
        assert await queue.ack(got[30:] + again) == []
        assert await queue.dequeue(10, self.lease_s) == []

    async def test_what_is_too_large_stops_all_before_anything_is_sent(self, queue: Queue) -> None:
        small, most = Outgoing(b"x"), queue.facts.max_message_bytes
        assert queue.fits(small)
        for large in (Outgoing(b"x" * (most + 1)), Outgoing(b"x" * most, {"name": "value"})):
            assert not queue.fits(large)
            with pytest.raises(InputError) as error:
                await queue.enqueue([small, large])
            assert error.value.context["index"] == 1
        assert await queue.dequeue(1, self.lease_s) == []

    async def test_a_leased_message_is_nobody_elses(self, queue: Queue) -> None:
        await queue.enqueue([Outgoing(b"a", group="a"), Outgoing(b"b", group="b")])
        first, second = await self.take(queue, 1), await self.take(queue, 1)
        assert {first[0].body, second[0].body} == {b"a", b"b"}
        assert await queue.dequeue(1, self.lease_s) == []

    async def test_nack_gives_it_back_with_another_receipt(self, queue: Queue) -> None:
        await queue.enqueue(out(b"a", b"b", b"c"))
        got = await self.take(queue, 3)
        await queue.nack(got)
        again = await self.take(queue, 3)
        assert sorted(m.body for m in again) == [b"a", b"b", b"c"]
        if self.ordered:
            assert [m.body for m in again] == [b"a", b"b", b"c"]
        assert {m.deliveries for m in again} == {self.told(2)}
        assert not {m.receipt for m in got} & {m.receipt for m in again}

    async def test_what_is_not_acknowledged_in_time_comes_again(self, queue: Queue, pass_time: PassTime) -> None:
        await queue.enqueue(out(b"a"))
        (first,) = await self.take(queue, 1, self.short_s)
        await pass_time(self.short_s + 1)
        (second,) = await self.take(queue, 1)
        assert (second.id, second.deliveries) == (first.id, self.told(2))
        if self.tells_lost:
            assert await queue.extend([first, second], self.lease_s) == [first]
        assert await queue.ack([second]) == []

    async def test_id_and_receipt_are_enough_to_extend_and_to_delete(self, queue: Queue) -> None:
        await queue.enqueue(out(b"a", b"b"))
        left = [Message(one.id, b"", one.receipt, 0) for one in await self.take(queue, 2)]
        assert await queue.extend(left, self.lease_s) == []
        assert await queue.ack(left) == []
        assert await queue.dequeue(1, self.lease_s) == []

    async def test_extend_keeps_it(self, queue: Queue, pass_time: PassTime) -> None:
        await queue.enqueue(out(b"a"))
        (held,) = await self.take(queue, 1, self.short_s)
        assert await queue.extend([held], 60.0) == []
        await pass_time(self.short_s + 1)
        assert await queue.dequeue(1, self.lease_s) == []
        assert await queue.ack([held]) == []

    async def test_waiting_ends_when_something_comes(self, queue: Queue) -> None:
        waiting = asyncio.create_task(queue.dequeue(1, self.lease_s, 20.0))
        await asyncio.sleep(0.1)
        await queue.enqueue(out(b"a"))
        assert [m.body for m in await asyncio.wait_for(waiting, 15)] == [b"a"]

    async def test_two_runs_share_a_queue(self, queue: Queue) -> None:
        await queue.enqueue([Outgoing(b"%d" % n, group=str(n)) for n in range(24)])
        parts = await asyncio.gather(self.take(queue, 12), self.take(queue, 12))
        assert {m.body for part in parts for m in part} == {b"%d" % n for n in range(24)}

    async def test_a_taker_that_was_cancelled_loses_nothing(self, queue: Queue) -> None:
        waiting = asyncio.create_task(queue.dequeue(5, self.lease_s, 20.0))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await queue.enqueue(out(b"a", b"b"))
        got = await self.take(queue, 2)
        assert {m.body for m in got} == {b"a", b"b"}

    async def test_closed(self, queue: Queue) -> None:
        await queue.close()
        await queue.close()
        with pytest.raises(StateError):
            await queue.enqueue(out(b"x"))
        with pytest.raises(StateError):
            await queue.dequeue(1, 30.0)
