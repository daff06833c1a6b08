"""The suites of the ports on real clouds: `make test-cloud-live`. Never in CI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from live import PREFIX, Below, aws_cloud, gcp_cloud, named, unfinished_on_s3
from queue_contract import PassTime, QueueContract
from rollout.cloud.open_bucket import open_bucket
from rollout.config.cloud import CloudSection
from rollout.config.settings import SecretsSection
from rollout.queues import Message, Place, Queue, open_queue
from rollout.secrets import open_secrets
from test_bucket import (
    PART,
    Rig,
    test_a_body_of_another_size_leaves_nothing,
    test_a_body_that_fails_leaves_nothing,
    test_a_cancelled_write_leaves_nothing,
    test_a_write_on_a_version,
    test_conditions,
    test_copied,
    test_listed_in_order,
    test_what_is_not_there,
    test_written_and_read,
)
from test_queues_cloud import OnPubsub, both

pytestmark = [pytest.mark.cloud_live, pytest.mark.timeout(600)]
__all__ = [
    "test_a_body_of_another_size_leaves_nothing",
    "test_a_body_that_fails_leaves_nothing",
    "test_a_cancelled_write_leaves_nothing",
    "test_a_write_on_a_version",
    "test_conditions",
    "test_copied",
    "test_listed_in_order",
    "test_what_is_not_there",
    "test_written_and_read",
]


@pytest.fixture(params=["s3", "gcs"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "s3":
        name = named("ROLLOUT_LIVE_S3_BUCKET")
        cloud = aws_cloud(s3={"bucket": name, "prefix": PREFIX, "multipart_chunk_bytes": PART})
        missing, scheme = "rollout-no-such-bucket", "s3"
    else:
        name = named("ROLLOUT_LIVE_GCS_BUCKET")
        cloud = gcp_cloud(gcs={"bucket": name, "prefix": PREFIX, "resumable_chunk_bytes": PART})
        missing, scheme = "rollout-no-such-bucket", "gs"
    bucket = Below(open_bucket(cloud, scheme, name))
    rig = Rig(
        bucket,
        open_bucket(cloud, scheme, missing),
        lambda: unfinished_on_s3(name, bucket.prefix) if scheme == "s3" else [],
    )
    await bucket.open()
    yield rig
    await bucket.close()
    await rig.missing.close()
    assert rig.unfinished() == []


async def tidied(queue: Queue, tidy: Queue) -> AsyncIterator[Queue]:
    """`queue`, which is the same for all tests. What one was given is acknowledged after it, by `tidy`: a lease that is
    left would end in the middle of another test."""
    given: dict[str, Message] = {}
    dequeue = queue.dequeue

    async def noted(limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        found = await dequeue(limit, lease_s, wait_s)
        given.update({message.id: message for message in found})
        return found

    queue.dequeue = noted  # type: ignore[method-assign]
    await tidy.open()
    yield queue
    await tidy.ack(list(given.values()))
    while found := await tidy.dequeue(10, 30.0, 2.0):
        await tidy.ack(found)
    await tidy.close()


class TestSqs(QueueContract):
    ordered = False

    @pytest.fixture
    async def queue(self) -> AsyncIterator[Queue]:
        place = Place(named("ROLLOUT_LIVE_SQS_QUEUE_URL"))
        queue = open_queue("sqs", place, aws_cloud())
        await queue.open()
        async for one in tidied(queue, open_queue("sqs", place, aws_cloud())):
            yield one
        await queue.close()

    @pytest.fixture
    def pass_time(self) -> PassTime:
        return asyncio.sleep


class TestPubsub(OnPubsub):
    @pytest.fixture
    async def queue(self) -> AsyncIterator[Queue]:
        subscription, topic = named("ROLLOUT_LIVE_PUBSUB_SUBSCRIPTION"), named("ROLLOUT_LIVE_PUBSUB_TOPIC")
        source = open_queue("pubsub", Place(subscription), gcp_cloud())
        async for queue in both(source, open_queue("pubsub", Place(topic, "output"), gcp_cloud())):
            async for one in tidied(queue, open_queue("pubsub", Place(subscription), gcp_cloud())):
                yield one

    @pytest.fixture
    def pass_time(self) -> PassTime:
        return asyncio.sleep


async def read_secret(cloud: CloudSection, name: str) -> None:
    store = open_secrets(SecretsSection(), cloud)
    try:
        assert await store.get(name)
    finally:
        await store.close()


async def test_a_secret_of_aws() -> None:
    name = named("ROLLOUT_LIVE_AWS_SECRET")
    await read_secret(aws_cloud(secrets={"allowlist": [name]}), name)


async def test_a_secret_of_google() -> None:
    name = named("ROLLOUT_LIVE_GCP_SECRET")
    await read_secret(gcp_cloud(secrets={"allowlist": [name]}), name)
