"""The suite of queues over the providers' emulators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from moto_locked import AwsEmulator
from moto_sqs import Clock
from pubsub_emulator import Pubsub
from pubsub_fake import FakePubsub
from queue_contract import PassTime, QueueContract
from rollout.queues import Place, Queue, open_queue


class OnSqs(QueueContract):
    @pytest.fixture
    def pass_time(self, sqs_clock: Clock) -> PassTime:
        async def pass_time(seconds: float) -> None:
            sqs_clock.ahead_s += seconds

        return pass_time


class TestSqs(OnSqs):
    ordered = False

    @pytest.fixture
    async def queue(self, aws: AwsEmulator, sqs_clock: Clock) -> AsyncIterator[Queue]:
        queue = open_queue("sqs", Place(aws.queue()), aws.cloud())
        await queue.open()
        yield queue
        await queue.close()


class TestSqsFifo(OnSqs):
    @pytest.fixture
    async def queue(self, aws: AwsEmulator, sqs_clock: Clock) -> AsyncIterator[Queue]:
        queue = open_queue("sqs", Place(aws.queue(aws.fresh("queue") + ".fifo", FifoQueue="true")), aws.cloud())
        await queue.open()
        yield queue
        await queue.close()


class OnPubsub(QueueContract):
    """Order is a matter of ordering keys; how often one was delivered is told with a dead letter policy only."""

    ordered = False
    counts = False
    tells_lost = False


async def both(subscription: Queue, topic: Queue) -> AsyncIterator[Queue]:
    """One that is taken from and sent to."""
    close = subscription.close

    async def close_both() -> None:
        await close()
        await topic.close()

    await subscription.open()
    await topic.open()
    subscription.enqueue = topic.enqueue  # type: ignore[method-assign]
    subscription.close = close_both  # type: ignore[method-assign]
    yield subscription
    await subscription.close()


@pytest.mark.slow
class TestPubsubEmulator(OnPubsub):
    @pytest.fixture
    async def queue(self, pubsub: Pubsub) -> AsyncIterator[Queue]:
        topic, subscription = pubsub.pair(ackDeadlineSeconds=30)
        cloud = pubsub.cloud()
        async for queue in both(
            open_queue("pubsub", Place(subscription), cloud), open_queue("pubsub", Place(topic, "output"), cloud)
        ):
            yield queue

    @pytest.fixture
    def pass_time(self) -> PassTime:
        return asyncio.sleep


class OnFake(OnPubsub):
    @pytest.fixture
    async def queue(self, pubsub_fake: FakePubsub) -> AsyncIterator[Queue]:
        self.configure(pubsub_fake)
        cloud = pubsub_fake.cloud()
        async for queue in both(
            open_queue("pubsub", Place("s"), cloud), open_queue("pubsub", Place("t", "output"), cloud)
        ):
            yield queue

    def configure(self, fake: FakePubsub) -> None: ...

    @pytest.fixture
    def pass_time(self, pubsub_fake: FakePubsub) -> PassTime:
        return pubsub_fake.pass_time


class TestPubsub(OnFake): ...


class TestPubsubExactlyOnce(OnFake):
    counts = True
    tells_lost = True

    def configure(self, fake: FakePubsub) -> None:
        fake.config["enableExactlyOnceDelivery"] = True
        fake.config["deadLetterPolicy"] = {"deadLetterTopic": "projects/p/topics/dead", "maxDeliveryAttempts": 7}
