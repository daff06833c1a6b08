"""deploy/iam.yaml against the calls that are made: each row has one. That each call has a row is checked in every test
of this directory (`api_calls`)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing

from api_calls import Calls
from botocore.exceptions import ConnectionClosedError
from gcs_emulator import Gcs
from iam_page import Table
from moto_locked import AwsEmulator
from pubsub_fake import FakePubsub
from rollout.cli.cloud_doctor.doctor import examine
from rollout.cloud.bucket import Bucket
from rollout.cloud.open_bucket import open_bucket
from rollout.config.cloud import CloudSection
from rollout.config.settings import SecretsSection
from rollout.queues import Outgoing, Place, open_queue
from rollout.secrets import open_secrets
from test_secrets_gcp import SecretManager, serving

PART = 5 << 20


def rows(provider: str) -> set[str]:
    return {row.call for row in Table().rows[provider] if not row.unseen}


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 1 << 20):
        yield data[at : at + (1 << 20)]


async def use_bucket(bucket: Bucket) -> None:
    await bucket.open()
    try:
        small = await bucket.write("a", pieces(b"data"), 4)
        found = await bucket.head("a")  # whose time is the store's, and that of `small` the answer's
        assert found is not None and (found.size, found.version) == (small.size, small.version)
        large = os.urandom(2 * PART + 1)
        await bucket.write("large", pieces(large), len(large))
        await bucket.copy(small, "b")
        async with aclosing(bucket.read("b")) as found:
            assert b"".join([piece async for piece in found]) == b"data"
        assert [one.key async for one in bucket.list("")] == ["a", "b", "large"]
        assert await bucket.delete("b")
        await bucket.sweep("", 0.0)
    finally:
        await bucket.close()


async def use_queue(backend: str, taken: str, sent: str, cloud: CloudSection) -> None:
    source, target = open_queue(backend, Place(taken), cloud), open_queue(backend, Place(sent, "output"), cloud)
    try:
        await source.open()
        await target.open()
        await target.enqueue([Outgoing(b"one")])
        found = await source.dequeue(1, 30.0, 5.0)
        assert await source.extend(found, 60.0) == [] and await source.ack(found) == []
    finally:
        await source.close()
        await target.close()


async def use_secret(cloud: CloudSection, name: str) -> None:
    store = open_secrets(SecretsSection(), cloud)
    try:
        assert await store.get(name) == "sesame-one"
    finally:
        await store.close()


def lost() -> Exception:
    return ConnectionClosedError(endpoint_url="http://aws.example")


async def test_aws(aws: AwsEmulator, api_calls: Calls) -> None:
    name, queue = aws.bucket(), aws.queue()
    secret = aws.fresh("token")
    aws.secret(secret, "sesame-one")
    cloud = aws.cloud(
        s3={"bucket": name, "multipart_chunk_bytes": PART},
        sqs={"queue_url": queue},
        secrets={"allowlist": [secret]},
    )
    api_calls.lost["s3.UploadPart"] = lost  # the next try looks first whether the part arrived
    await use_bucket(open_bucket(cloud, "s3", name))
    api_calls.lost["s3.CreateMultipartUpload"] = lost  # that upload is aborted when it is swept
    await use_bucket(open_bucket(cloud, "s3", aws.bucket()))
    missing = open_bucket(cloud, "s3", name + "-elsewhere")
    try:
        await missing.open()
    except Exception as error:  # noqa: BLE001 - which one is told elsewhere
        assert name in str(error)
    await missing.close()
    await use_queue("sqs", queue, queue, cloud)
    await use_secret(cloud, secret)
    outcomes = await examine(cloud, ["compute_hint"], lambda _: None)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert api_calls.made == rows("aws")


async def test_google(gcs: Gcs, pubsub_fake: FakePubsub, api_calls: Calls) -> None:
    served = SecretManager()
    served.secrets = {"token": [b"sesame-one"]}
    await use_bucket(open_bucket(gcs.cloud(resumable_chunk_bytes=PART), "gs", gcs.bucket))
    await use_queue("pubsub", "s", "t", pubsub_fake.cloud())
    async with serving(served):
        given = {"provider": "gcp", "project": "proj-1", "secrets": {"allowlist": ["token"]}}
        await use_secret(CloudSection.model_validate(given | {"endpoint_url": served.address}), "token")
    assert api_calls.made == rows("gcp")
