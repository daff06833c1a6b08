"""What queue services do to those who use them: failures of single entries, throttling, refusals, foreign messages."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto_locked import REGION, AwsEmulator
from moto_sqs import Clock
from pubsub_fake import FakePubsub
from rollout.cloud.aws import Aws
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, InputError, UnavailableError
from rollout.queues import Message, Outgoing, Place
from rollout.queues.pubsub import PubsubQueue
from rollout.queues.pubsub import open_queue as open_pubsub
from rollout.queues.sqs import SqsQueue, open_queue
from rollout.queues.sqs_messages import ENCODING, encode


class FaultyAws(Aws):
    """`single`: operation to the code that the second entry of its next batch fails with, unheard by the service.
    `refuse`: operation to codes that its next calls are answered with."""

    def __init__(self, aws: AwsEmulator) -> None:
        super().__init__(aws.cloud())
        self.single: dict[str, str] = {}
        self.refuse: dict[str, list[str]] = {}
        self.made: list[str] = []

    async def call(
        self, service: str, operation: str, *, what: str, budget_s: float = 60.0, **parameters: Any
    ) -> dict[str, Any]:
        code = self.single.pop(operation, "")
        if not code:
            return await super().call(service, operation, what=what, budget_s=budget_s, **parameters)
        entries = list(parameters.pop("Entries"))
        failed = {"Id": entries.pop(1)["Id"], "Code": code, "SenderFault": False}
        answer = await super().call(service, operation, what=what, budget_s=budget_s, Entries=entries, **parameters)
        return {**answer, "Failed": [failed]}

    async def run(self, service: str, operation: str, attempt: Callable[[Any], Awaitable[Any]], **more: Any) -> Any:
        async def faulty(client: Any) -> Any:
            self.made.append(operation)
            if self.refuse.get(operation):
                code = self.refuse[operation].pop(0)
                raise ClientError(
                    {
                        "Error": {"Code": code, "Message": "as the test wants"},
                        "ResponseMetadata": {"HTTPStatusCode": 403 if "Denied" in code else 400},
                    },
                    operation,
                )
            return await attempt(client)

        return await super().run(service, operation, faulty, **more)


@pytest.fixture
def faulty(aws: AwsEmulator) -> FaultyAws:
    return FaultyAws(aws)


@pytest.fixture
async def sqs(aws: AwsEmulator, faulty: FaultyAws, sqs_clock: Clock) -> AsyncIterator[SqsQueue]:
    queue = SqsQueue(Place(aws.queue()), faulty)
    await queue.open()
    yield queue
    await queue.close()


def url(queue: SqsQueue) -> str:
    return queue._address


async def take(queue: SqsQueue | PubsubQueue, count: int) -> list[Message]:
    got: list[Message] = []
    while len(got) < count:
        new = await queue.dequeue(count - len(got), 30.0, 5.0)
        assert new
        got += new
    return got


@pytest.mark.parametrize("code", ["InternalError", "RequestThrottled"])
async def test_an_entry_that_fails_is_tried_again_alone(sqs: SqsQueue, faulty: FaultyAws, code: str) -> None:
    faulty.single = dict.fromkeys(
        ("send_message_batch", "change_message_visibility_batch", "delete_message_batch"), code
    )
    ids = await sqs.enqueue([Outgoing(b"%d" % n) for n in range(4)])
    got = await take(sqs, 4)
    assert {m.id: m.body for m in got} == {name: b"%d" % n for n, name in enumerate(ids)}
    assert await sqs.extend(got, 60.0) == []
    assert await sqs.ack(got) == []
    assert await sqs.dequeue(4, 30.0) == []
    assert {"send_message", "change_message_visibility", "delete_message"} <= set(faulty.made)


async def test_a_receipt_that_ended_is_told_and_the_others_are_done(sqs: SqsQueue, faulty: FaultyAws) -> None:
    await sqs.enqueue([Outgoing(b"%d" % n) for n in range(3)])
    got = await take(sqs, 3)
    faulty.single["delete_message_batch"] = "ReceiptHandleIsInvalid"
    assert await sqs.ack(got) == [got[1]]
    await sqs.nack([got[1]])
    assert [m.id for m in await take(sqs, 1)] == [got[1].id]


async def test_throttled_calls_are_made_again(sqs: SqsQueue, faulty: FaultyAws) -> None:
    for operation in ("send_message_batch", "receive_message", "delete_message_batch"):
        faulty.refuse[operation] = ["RequestThrottled", "InternalFailure"]
    await sqs.enqueue([Outgoing(b"a")])
    assert await sqs.ack(await take(sqs, 1)) == []
    assert faulty.made.count("send_message_batch") == 3


async def test_too_many_in_flight_is_no_error(sqs: SqsQueue, faulty: FaultyAws) -> None:
    await sqs.enqueue([Outgoing(b"a")])
    faulty.refuse["receive_message"] = ["OverLimit"]
    assert [m.body for m in await sqs.dequeue(1, 30.0, 10.0)] == [b"a"]


@pytest.mark.parametrize(
    ("operation", "code", "said"),
    [
        ("receive_message", "AccessDenied", "sqs:ReceiveMessage"),
        ("receive_message", "QueueDoesNotExist", "queue_url"),
        ("receive_message", "InvalidAddress", "cloud.sqs.queue_url"),
        ("receive_message", "InvalidClientTokenId", "credentials"),
    ],
)
async def test_refusals_name_what_to_mend(
    sqs: SqsQueue, faulty: FaultyAws, operation: str, code: str, said: str
) -> None:
    faulty.refuse[operation] = [code]
    with pytest.raises(ConfigError) as error:
        await sqs.dequeue(1, 30.0, 5.0)
    assert said in str(error.value) and url(sqs) in str(error.value)


async def test_facts_of_a_queue_whose_attributes_may_not_be_read(aws: AwsEmulator, faulty: FaultyAws) -> None:
    faulty.refuse["get_queue_attributes"] = ["AccessDenied"]
    queue = SqsQueue(Place(aws.queue(aws.fresh("queue") + ".fifo", FifoQueue="true")), faulty)
    await queue.open()
    assert (queue.facts.ordered, queue.facts.max_message_bytes) == (True, 262_144)
    assert "sqs:GetQueueAttributes" in queue.facts.remarks[0]
    assert await queue.depth() is None
    await queue.close()


async def test_facts_tell_of_dead_letters_and_limits(aws: AwsEmulator) -> None:
    dead = aws.queue(aws.fresh("dead"))
    arn = aws.sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "5"})
    queue = open_queue(Place(aws.queue(RedrivePolicy=policy, MaximumMessageSize="2048")), aws.cloud(), None)
    await queue.open()
    facts = queue.facts
    assert (facts.dead_letter, facts.max_deliveries) == (dead.rsplit("/", 1)[-1], 5)
    assert (facts.max_message_bytes, facts.max_in_flight, facts.max_held_s) == (2048, 120_000, 43_200.0)
    # Its size is that of what is sent: base64 of bytes that are no text.
    assert queue.fits(Outgoing(b"x" * 2048)) and not queue.fits(Outgoing(b"\xff" * 2048))
    with pytest.raises(InputError):
        await queue.enqueue([Outgoing(b"\xff" * 2000)])
    await queue.close()


@pytest.mark.parametrize(
    "address",
    [
        "https://sqs.us-east-1.amazonaws.com/123456789012/rows",
        "https://us-east-1.queue.amazonaws.com/123456789012/rows",
        "https://queue.amazonaws.com/123456789012/rows",
        "https://vpce-1-2.sqs.us-east-1.vpce.amazonaws.com/123456789012/rows",
    ],
)
async def test_a_queue_of_another_region_is_told_before_any_call(
    aws: AwsEmulator, faulty: FaultyAws, address: str
) -> None:
    queue = SqsQueue(Place(address), faulty)
    with pytest.raises(ConfigError, match=f'us-east-1.*{REGION}.*set \\[cloud\\] region = "us-east-1"'):
        await queue.open()
    assert faulty.made == []
    await queue.close()


async def test_a_region_that_there_is_not(monkeypatch: pytest.MonkeyPatch, aws: AwsEmulator) -> None:
    async def call(*given: Any, **more: Any) -> Any:
        raise UnavailableError("Could not connect to the endpoint URL")

    monkeypatch.setattr(Aws, "call", call)
    for region, error in (("us-wset-2", ConfigError), ("us-west-2", UnavailableError)):
        cloud = CloudSection.model_validate({"provider": "aws", "region": region})
        queue = open_queue(Place(f"https://sqs.{region}.amazonaws.com/1/q"), cloud, None)
        with pytest.raises(error, match="did you mean" if error is ConfigError else "connect"):
            await queue.open()
        await queue.close()


async def test_messages_of_others_arrive_as_they_are(aws: AwsEmulator, sqs: SqsQueue) -> None:
    marked = {ENCODING: {"DataType": "String", "StringValue": "base64"}}
    binary = {
        "blob": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
        "n": {"DataType": "Number", "StringValue": "7"},
    }
    aws.sqs.send_message(QueueUrl=url(sqs), MessageBody="no base64!", MessageAttributes=marked)
    aws.sqs.send_message(QueueUrl=url(sqs), MessageBody="YQ=\n=", MessageAttributes=marked)
    aws.sqs.send_message(QueueUrl=url(sqs), MessageBody="plain", MessageAttributes=binary)
    got = {m.body: m.attributes for m in await take(sqs, 3)}
    assert got == {
        b"no base64!": {ENCODING: "base64"},
        b"a": {},
        b"plain": {"blob": base64.b64encode(b"\x00\xff").decode(), "n": "7"},
    }


@pytest.mark.parametrize(
    "attributes",
    [{"a b": "x"}, {"AWS.x": "x"}, {"a..b": "x"}, {"a": ""}, {"a": "\x07"}, {f"a{n}": "x" for n in range(11)}],
)
def test_attributes_that_sqs_refuses_are_told_before_they_are_sent(attributes: dict[str, str]) -> None:
    with pytest.raises(InputError, match="SQS does not take") as error:
        encode(Outgoing(b"x", attributes), fifo=False, index=3)
    assert error.value.context == {"index": 3}


async def test_a_fifo_queue_keeps_the_order_of_a_group_and_takes_a_message_once(
    aws: AwsEmulator, sqs_clock: Clock
) -> None:
    queue = open_queue(Place(aws.queue(aws.fresh("queue") + ".fifo", FifoQueue="true")), aws.cloud(), None)
    await queue.open()
    sent = [Outgoing(b"%d" % n, group=f"g {n % 2}", deduplication=f"row {n}") for n in range(24)]
    await queue.enqueue(sent)
    await queue.enqueue(sent[:3])  # an outage before: nobody knows whether they were sent
    got: dict[str, list[int]] = {}
    for _ in range(24):
        (message,) = await take(queue, 1)
        got.setdefault(message.group, []).append(int(message.body))
        if len(got[message.group]) == 3:  # given back once: its order stays
            got[message.group].pop()
            await queue.nack([message])
            (message,) = await take(queue, 1)
            got.setdefault(message.group, []).append(int(message.body))
        assert await queue.ack([message]) == []
    assert sorted(got.values()) == [list(range(0, 24, 2)), list(range(1, 24, 2))]
    assert await queue.dequeue(1, 30.0) == []
    await queue.close()


@pytest.fixture
async def pubsub(pubsub_fake: FakePubsub) -> AsyncIterator[PubsubQueue]:
    pubsub_fake.config.update(enableExactlyOnceDelivery=True)
    queue = open_pubsub(Place("s"), pubsub_fake.cloud(), None)
    await queue.open()
    yield queue
    await queue.close()


def put(fake: FakePubsub, *bodies: bytes) -> Awaitable[Any]:
    return fake.publish({"messages": [{"data": base64.b64encode(body).decode()} for body in bodies]}, None)


@pytest.mark.parametrize(
    ("why", "returned"), [("TRANSIENT_FAILURE_SERVICE_UNAVAILABLE", False), ("PERMANENT_FAILURE_INVALID_ACK_ID", True)]
)
async def test_exactly_once_an_id_that_failed(
    pubsub: PubsubQueue, pubsub_fake: FakePubsub, why: str, returned: bool
) -> None:
    await put(pubsub_fake, b"a", b"b", b"c")
    got = await take(pubsub, 3)
    pubsub_fake.faults["acknowledge"] = [{"index": 1, "why": why}]
    assert await pubsub.ack(got) == ([got[1]] if returned else [])
    assert len(pubsub_fake.stored) == int(returned)


async def test_pubsub_delivers_twice_and_each_has_a_receipt(pubsub: PubsubQueue, pubsub_fake: FakePubsub) -> None:
    pubsub_fake.twice = True
    await put(pubsub_fake, b"a")
    first, second = await take(pubsub, 1), await take(pubsub, 1)
    assert first[0].id == second[0].id and first[0].receipt != second[0].receipt


async def test_pubsub_calls_are_made_again(pubsub: PubsubQueue, pubsub_fake: FakePubsub) -> None:
    pubsub_fake.faults = {"pull": [503, 429], "acknowledge": [503], "modifyAckDeadline": [500]}
    await put(pubsub_fake, b"a")
    got = await take(pubsub, 1)
    assert await pubsub.extend(got, 60.0) == []
    assert await pubsub.ack(got) == []
    assert pubsub_fake.stored == []


async def test_a_pull_that_hangs_is_not_waited_for(pubsub: PubsubQueue, pubsub_fake: FakePubsub) -> None:
    pubsub_fake.hang_s = 60.0
    began = time.monotonic()
    assert await pubsub.dequeue(1, 10.0) == []
    assert time.monotonic() - began < 10
    await put(pubsub_fake, b"a")
    assert [m.body for m in await take(pubsub, 1)] == [b"a"]
    assert pubsub_fake.calls.count("pull") == 1


async def test_that_pubsub_has_nothing_is_an_answer(pubsub: PubsubQueue, pubsub_fake: FakePubsub) -> None:
    assert await pubsub.is_empty(10.0)
    pubsub_fake.denied.add("pull")
    with pytest.raises(ConfigError):
        await pubsub.is_empty(10.0)
    pubsub_fake.denied.clear()
    await put(pubsub_fake, b"one")
    assert not await pubsub.is_empty(10.0)
    assert [message.body for message in await pubsub.dequeue(5, 10.0)] == [b"one"]


async def test_that_sqs_has_nothing_is_an_answer(sqs: SqsQueue) -> None:
    assert await sqs.is_empty(30.0)
    await sqs.enqueue([Outgoing(b"one")])
    assert not await sqs.is_empty(30.0)
    assert [message.body for message in await sqs.dequeue(5, 30.0)] == [b"one"]


async def test_what_arrives_after_the_last_taker_went_goes_back(pubsub: PubsubQueue, pubsub_fake: FakePubsub) -> None:
    waiting = asyncio.ensure_future(pubsub.dequeue(1, 30.0, 60.0))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await put(pubsub_fake, b"a")
    async with asyncio.timeout(10), pubsub_fake.changed:
        await pubsub_fake.changed.wait_for(
            lambda: "modifyAckDeadline" in pubsub_fake.calls and pubsub_fake.stored[0].until <= pubsub_fake.now()
        )


async def test_the_lease_of_a_subscription_costs_no_call_and_another_one_does(
    pubsub: PubsubQueue, pubsub_fake: FakePubsub
) -> None:
    await put(pubsub_fake, b"a")
    await pubsub.ack(await pubsub.dequeue(1, 10.0, 5.0))
    assert "modifyAckDeadline" not in pubsub_fake.calls
    await put(pubsub_fake, b"b")
    await pubsub.dequeue(1, 300.0, 5.0)
    assert pubsub_fake.stored[0].until > pubsub_fake.now() + 200


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pushConfig": {"pushEndpoint": "https://example.com/in"}}, "https://example.com/in.*pull"),
        ({"bigqueryConfig": {"table": "t"}}, "bigqueryConfig.*pull"),
        ({"topic": "_deleted-topic_"}, "deleted"),
    ],
)
async def test_subscriptions_that_nobody_can_take_from(
    pubsub_fake: FakePubsub, config: dict[str, Any], said: str
) -> None:
    pubsub_fake.config.update(config)
    queue = open_pubsub(Place("s"), pubsub_fake.cloud(), None)
    with pytest.raises(ConfigError, match=f"cloud.pubsub.subscription.*{said}"):
        await queue.open()
    await queue.close()


async def test_a_subscription_that_may_not_be_looked_at(pubsub_fake: FakePubsub) -> None:
    pubsub_fake.denied = {"get"}
    queue = open_pubsub(Place("projects/p/subscriptions/s"), pubsub_fake.cloud(), None)
    await queue.open()
    assert "pubsub.subscriptions.get" in queue.facts.remarks[0]
    pubsub_fake.denied = {"pull"}
    with pytest.raises(ConfigError, match=r"pubsub\.subscriptions\.consume"):
        await queue.dequeue(1, 30.0, 5.0)
    await queue.close()


@pytest.mark.parametrize(("place", "key"), [(Place("x"), "subscription"), (Place("x", "output"), "output_topic")])
async def test_a_name_that_pubsub_does_not_know(pubsub_fake: FakePubsub, place: Place, key: str) -> None:
    queue = open_pubsub(place, pubsub_fake.cloud(), None)
    with pytest.raises(ConfigError, match=f"cloud.pubsub.{key}"):
        await queue.open()
    await queue.close()


@pytest.mark.parametrize("name", ["", "a/b", "projects/p/topics/t"])
async def test_a_name_that_is_no_subscription(pubsub_fake: FakePubsub, name: str) -> None:
    queue = open_pubsub(Place(name), pubsub_fake.cloud(), None)
    with pytest.raises(ConfigError, match="projects/PROJECT/subscriptions/NAME"):
        await queue.open()
    assert pubsub_fake.calls == []
    await queue.close()
