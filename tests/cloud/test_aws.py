"""The session of AWS: what is missing is told with its remedy, and what a store cannot do is noticed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fault_proxy import fault_proxy
from moto_locked import AwsEmulator
from rollout.cloud import retry
from rollout.cloud.aws import Aws
from rollout.cloud.bucket import ABSENT
from rollout.cloud.missing import need
from rollout.cloud.retry import Failure, retrying
from rollout.cloud.s3_bucket import S3Bucket
from rollout.config.cloud import CloudSection
from rollout.model.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    StorageError,
    StorageUnavailableError,
    UnavailableError,
)


async def one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_an_sdk_that_is_not_installed(aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiobotocore.session", None)
    bucket = S3Bucket(Aws(aws.cloud()), "b", aws.cloud().s3, own_session=True)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-engine\[aws\]'"):
        await bucket.open()
    await bucket.close()
    with pytest.raises(ConfigError, match=r"this needs the package no_such_module.*rollout-engine\[gcp\]"):
        need("no_such_module", "gcp", "this")


async def test_no_region_anywhere(aws: AwsEmulator) -> None:
    session = Aws(CloudSection(provider="aws"))
    with pytest.raises(ConfigError, match=r"set \[cloud\] region, or AWS_REGION"):
        await session.client("s3")
    await session.close()


async def test_the_region_of_the_environment(aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    session = Aws(CloudSection(provider="aws"))
    assert (await session.client("s3")).meta.region_name == "ap-south-1"
    await session.close()


async def test_no_credentials_anywhere(aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    session = Aws(aws.cloud())
    with pytest.raises(ConfigError, match="there are none: give some through the default chain"):
        await session.call("s3", "list_objects_v2", Bucket="b", what="b cannot be listed")
    await session.close()


async def test_an_endpoint_that_is_not_there(aws: AwsEmulator) -> None:
    session = Aws(aws.cloud(endpoint_url="http://127.0.0.1:9"))
    with pytest.raises(StorageUnavailableError, match=r"check the network, endpoint_url and \[cloud\] region.*tried"):
        await session.call("s3", "list_objects_v2", Bucket="b", what="b cannot be listed", budget_s=0.2)
    await session.close()


@pytest.mark.parametrize("ignored", ["^P.* if-none-match", "^P.* if-match", "^POST if-none-match"])
async def test_a_store_that_ignores_conditions_is_noticed(aws: AwsEmulator, ignored: str) -> None:
    name = aws.bucket()
    async with fault_proxy(aws.endpoint) as proxy:
        pattern, header = ignored.split()
        proxy.add(pattern, without=(header,), times=1000)
        cloud = aws.cloud(endpoint_url=proxy.url, s3={"bucket": name})
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        await bucket.open()
        assert await bucket.conditional("k") is False
        assert aws.keys(name) == aws.unfinished(name) == []
        await bucket.write("k", one(b"1"), 1, when=ABSENT)
        with pytest.raises(ConflictError):
            await bucket.write("k", one(b"2"), 1, when=ABSENT)
        assert aws.body(name, "k") == b"1"
        await bucket.close()


@pytest.mark.parametrize("body", [b"<Error><Code>NotImplemented</Code></Error>", b""])
async def test_a_store_that_does_not_know_conditions_is_asked_once(aws: AwsEmulator, body: bytes) -> None:
    name = aws.bucket()
    async with fault_proxy(aws.endpoint) as proxy:
        proxy.add("^P", having="if-none-match", status=501, body=body, times=1000)
        cloud = aws.cloud(endpoint_url=proxy.url, s3={"bucket": name})
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        assert await bucket.conditional("k") is False
        assert len([1 for _, headers in proxy.asked if "if-none-match" in headers]) == 1
        await bucket.write("k", one(b"1"), 1, when=ABSENT)
        assert aws.body(name, "k") == b"1"
        await bucket.close()
        told = S3Bucket(Aws(cloud), name, cloud.s3.model_copy(update={"conditional_writes": "on"}), own_session=True)
        with pytest.raises(StorageError, match="conditional_writes"):
            await told.write("l", one(b"1"), 1, when=ABSENT)
        await told.close()


async def test_an_archived_object_is_no_missing_permission(aws: AwsEmulator) -> None:
    name = aws.bucket()
    aws.s3.put_object(Bucket=name, Key="k", Body=b"1")
    async with fault_proxy(aws.endpoint) as proxy:
        proxy.add("^GET", status=403, body=b"<Error><Code>InvalidObjectState</Code></Error>", times=99)
        cloud = aws.cloud(endpoint_url=proxy.url, s3={"bucket": name})
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        with pytest.raises(ConfigError, match=rf"restore-object --bucket {name} --key 'k'") as error:
            [piece async for piece in bucket.read("k")]
        assert "allow s3:" not in error.value.message
        await bucket.close()


PAGE = {"body": b"<html>log in</html>", "headers": {"content-type": "text/html"}, "status": 200}


@pytest.mark.parametrize(
    ("service", "operation", "parameters"),
    [
        ("s3", "put_object", {"Bucket": "b", "Key": "k", "Body": b"1"}),
        ("s3", "head_object", {"Bucket": "b", "Key": "k"}),
        ("s3", "get_object", {"Bucket": "b", "Key": "k"}),
        ("s3", "delete_object", {"Bucket": "b", "Key": "k"}),
        ("s3", "list_objects_v2", {"Bucket": "b"}),
        ("sqs", "get_queue_attributes", {"QueueUrl": "http://x/1/q"}),
        ("sts", "get_caller_identity", {}),
        ("secretsmanager", "get_secret_value", {"SecretId": "x"}),
    ],
)
async def test_a_page_with_200_in_place_of_an_answer_is_none(
    aws: AwsEmulator, service: str, operation: str, parameters: dict[str, Any]
) -> None:
    """As a captive portal gives it."""
    async with fault_proxy(aws.endpoint) as proxy:
        proxy.add("", **PAGE, times=1000)
        session = Aws(aws.cloud(endpoint_url=proxy.url))
        with pytest.raises(UnavailableError if service != "s3" else StorageUnavailableError, match="check the network"):
            await session.call(service, operation, what="it cannot be used", budget_s=0.1, **parameters)
        await session.close()


async def test_conditions_are_asked_beside_the_key_and_without_the_permission_to_delete(aws: AwsEmulator) -> None:
    name = aws.bucket()
    async with fault_proxy(aws.endpoint) as proxy:
        proxy.add(
            r"^(PUT|POST) /[^/]+/(?!out/)", status=403, body=b"<Error><Code>AccessDenied</Code></Error>", times=99
        )
        proxy.add(r"^DELETE", status=403, body=b"<Error><Code>AccessDenied</Code></Error>", times=99)
        cloud = aws.cloud(endpoint_url=proxy.url, s3={"bucket": name, "prefix": "other/"})
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        await bucket.open()
        assert proxy.lines("^P") == []
        await bucket.write("out/k", one(b"1"), 1, when=ABSENT)
        assert aws.body(name, "out/k") == b"1"
        await bucket.close()


async def test_aws_is_not_asked_for_conditions() -> None:
    cloud = CloudSection.model_validate({"provider": "aws", "region": "eu-central-1", "s3": {"bucket": "abc"}})
    assert await S3Bucket(Aws(cloud), "abc", cloud.s3).conditional("k") is True


async def test_a_bucket_of_a_url_needs_no_permission_to_list(aws: AwsEmulator) -> None:
    name = aws.bucket()
    aws.s3.put_object(Bucket=name, Key="k", Body=b"1")
    async with fault_proxy(aws.endpoint) as proxy:
        refusal = b"<Error><Code>AccessDenied</Code></Error>"
        proxy.add(r"list-type=2|\?location", status=403, body=refusal, times=1000)
        cloud = aws.cloud(endpoint_url=proxy.url, s3={"bucket": "another"})
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        await bucket.open()
        assert b"".join([piece async for piece in bucket.read("k")]) == b"1"
        await bucket.close()
        own = aws.cloud(endpoint_url=proxy.url, s3={"bucket": name})
        configured = S3Bucket(Aws(own), name, own.s3, own_session=True)
        with pytest.raises(ConfigError, match=r"allow s3:ListBucket.*\[cloud.s3\] bucket"):
            await configured.open()
        await configured.close()


@pytest.mark.parametrize("mode", ["when_supported", "when_required"])
async def test_checksums(aws: AwsEmulator, mode: str) -> None:
    name = aws.bucket()
    async with fault_proxy(aws.endpoint) as proxy:
        cloud = aws.cloud(
            endpoint_url=proxy.url, s3={"bucket": name, "checksums": mode, "multipart_chunk_bytes": 5 << 20}
        )
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        for size in (10, 6 << 20):
            await bucket.write("k", one(bytes(size)), size)
            assert aws.body(name, "k") == bytes(size)
            assert b"".join([piece async for piece in bucket.read("k")]) == bytes(size)
        sent = [headers for line, headers in proxy.asked if line.startswith("PUT")]
        assert all(("x-amz-checksum-crc32" in headers) == (mode == "when_supported") for headers in sent)
        await bucket.close()


class Service:
    """Answers as told, then well."""

    def __init__(self, *answers: Failure) -> None:
        self.answers = list(answers)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.answers:
            raise LookupError(self.answers.pop(0))
        return "well"


def kind(error: BaseException) -> Failure | None:
    return error.args[0] if isinstance(error, LookupError) else None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, in place of waiting."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(retry.asyncio, "sleep", sleep)
    return found


async def test_the_wait_that_a_service_asks_for_is_kept(waits: list[float]) -> None:
    service = Service(Failure("throttled", "slow", retry_after_s=7.0), Failure("transient", "broke"))
    assert await retrying(service, kind, what="x") == "well"
    assert service.calls == 3 and waits[0] == 7.0 and 0 <= waits[1] <= 0.2


async def test_a_wait_beyond_the_budget_is_not_begun(waits: list[float]) -> None:
    service = Service(Failure("throttled", "SlowDown", "wait", retry_after_s=90.0))
    with pytest.raises(StorageUnavailableError, match=r"x: SlowDown; wait \(tried 1 time\)"):
        await retrying(service, kind, what="x", budget_s=60)
    assert waits == []


async def test_what_another_try_cannot_mend_is_told_at_once(waits: list[float]) -> None:
    with pytest.raises(NotFoundError):
        await retrying(Service(Failure("missing", "none")), kind, what="x")

    async def unknown() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await retrying(unknown, kind, what="x")
    assert waits == []
