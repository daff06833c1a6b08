"""What people get wrong with a cloud, and what is said to them: where it stands, and what to do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import rollout.cloud.installed
from aiobotocore.client import AioBaseClient
from blake3 import blake3
from botocore.exceptions import ClientError
from gcs_emulator import Gcs
from located import places
from moto_locked import REGION, AwsEmulator
from pubsub_fake import PROJECT, FakePubsub
from rollout.cli.cloud_doctor.doctor import examine
from rollout.cli.commands.plan import check_coordinator
from rollout.cloud.url import BucketUrl
from rollout.config.cloud import CloudSection, WithCloud
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, ObjectsSection, SecretsSection, StorageSection
from rollout.model.errors import ConfigError, ObjectCorruptError, RolloutError
from rollout.objects.opening import open_store
from rollout.queues import Place, open_queue
from rollout.secrets import open_secrets
from rollout.storage.kv_sqlite import SqliteStorage
from rollout.workloads.publishing import looked_at
from rollout_coordinator.objects_opening import open_objects

Denied = dict[str, tuple[str, str, dict[str, Any]]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Denied]:
    """Errors that AWS would answer operations with: moto checks neither permissions nor regions of buckets."""
    told: Denied = {}
    real: Any = AioBaseClient._make_api_call  # type: ignore[attr-defined]

    async def call(self: Any, operation: str, parameters: Any) -> Any:
        if operation in told:
            code, message, metadata = told[operation]
            raise ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}, operation)  # type: ignore[typeddict-item]
        return await real(self, operation, parameters)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", call)
    yield told


async def started(tmp_path: Path, cloud: CloudSection) -> str:
    """What a coordinator with this [cloud] says that does not start."""
    storage = StorageSection.model_validate({"embedded": {"path": str(tmp_path / "rollout.db")}})
    settings = CoordinatorSettings(cloud=cloud, storage=storage)
    kept = SqliteStorage(str(tmp_path / "rollout.db"))
    store = open_store(settings.objects, settings.storage, settings.cloud)
    await kept.open()

    async def no_runs() -> bool:
        return False

    try:
        with pytest.raises(ConfigError) as error:
            await open_objects(store, kept, settings, no_runs)
        return error.value.message
    finally:
        await store.close()
        await kept.close()


async def failed(cloud: CloudSection, *without: str) -> dict[str, str]:
    found = await examine(cloud, without, lambda _: None)
    return {one.name: one.error for one in found if not one.ok}


def test_the_value_of_a_secret_in_the_list_is_told_once_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "cloud.toml"
    value = "hf_abcdefghijklmnopqrstuvwxyz012345ABCD"
    path.write_text(f'[cloud]\nprovider = "aws"\n[cloud.secrets]\nallowlist = ["{value}"]\n')
    with pytest.raises(ConfigError) as error:
        load_settings(WithCloud, path)
    said = error.value.message
    assert said.startswith(f"{path}:4: cloud.secrets.allowlist.0: looks like the value") and "\n" not in said
    assert value not in said


async def test_a_missing_bucket(tmp_path: Path, aws: AwsEmulator) -> None:
    said = await started(tmp_path, aws.cloud(s3={"bucket": "nobody-made-this"}))
    assert said.startswith("cloud.s3.bucket: s3://nobody-made-this/ cannot be used: NoSuchBucket")
    assert "make it" in said


async def test_a_missing_bucket_of_a_url(tmp_path: Path, aws: AwsEmulator) -> None:
    with pytest.raises(ConfigError) as error:
        await asyncio.to_thread(
            looked_at,
            BucketUrl("s3", "nobody-made-this", "out/"),
            tmp_path,
            aws.cloud(s3={"bucket": "other"}),
            (),
            print,
        )
    said = error.value.message
    assert said.startswith("output.dir: s3://nobody-made-this/ cannot be used: NoSuchBucket")
    assert "check the URL s3://nobody-made-this/" in said and "[cloud.s3]" not in said


async def test_a_missing_bucket_of_gcs(tmp_path: Path, gcs: Gcs) -> None:
    said = await started(tmp_path, gcs.cloud(bucket="nobody-made-this"))
    assert said.startswith("cloud.gcs.bucket: ") and "there is no bucket nobody-made-this" in said


async def test_another_region_than_the_buckets(tmp_path: Path, aws: AwsEmulator, answers: Denied) -> None:
    headers = {"HTTPStatusCode": 301, "HTTPHeaders": {"x-amz-bucket-region": "us-east-1"}}
    answers["ListObjectsV2"] = ("PermanentRedirect", "The bucket you are attempting to access ...", headers)
    cloud = aws.cloud(s3={"bucket": aws.bucket()})
    said = await started(tmp_path, cloud)
    assert said.startswith("cloud.region: ") and "it is in region us-east-1: set [cloud] region" in said
    assert "us-east-1" in (await failed(cloud, "queue", "secret_store"))["object_store"]


@pytest.mark.parametrize(
    ("operation", "permission"),
    [("ListObjectsV2", "s3:ListBucket"), ("PutObject", "s3:PutObject")],
)
async def test_no_permission_names_the_one_that_lacks(
    tmp_path: Path, aws: AwsEmulator, answers: Denied, operation: str, permission: str
) -> None:
    answers[operation] = ("AccessDenied", "User: arn:... is not authorized", {"HTTPStatusCode": 403})
    said = await started(tmp_path, aws.cloud(s3={"bucket": aws.bucket()}))
    assert said.startswith("cloud.s3.bucket: ") and f"allow {permission}" in said


@pytest.mark.parametrize("key", ["topic", "output_topic"])
async def test_a_missing_topic_is_told_by_the_key_that_names_it(pubsub_fake: FakePubsub, key: str) -> None:
    pubsub = {"endpoint_url": pubsub_fake.endpoint, key: "gone"}
    cloud = CloudSection.model_validate({"provider": "gcp", "project": PROJECT, "pubsub": pubsub})
    queue = open_queue("pubsub", Place("gone", "output"), cloud)
    with pytest.raises(ConfigError, match=rf"look at cloud\.pubsub\.{key} "):
        await queue.open()
    await queue.close()


async def test_no_permission_for_a_queue_or_a_secret(aws: AwsEmulator, answers: Denied) -> None:
    for operation in ("SendMessage", "SendMessageBatch", "GetSecretValue"):
        answers[operation] = ("AccessDeniedException", "is not authorized to perform", {"HTTPStatusCode": 400})
    aws.secret("denied/one", "x")
    cloud = aws.cloud(sqs={"queue_url": aws.queue()}, secrets={"allowlist": ["denied/one"]})
    found = await failed(cloud, "object_store")
    assert found.keys() == {"queue", "secret_store"}
    assert found["queue"].startswith("enqueue: ") and "sqs:SendMessage" in found["queue"]
    assert "secretsmanager:GetSecretValue" in found["secret_store"]


async def test_a_secret_that_is_not_on_the_allowlist(aws: AwsEmulator) -> None:
    aws.secret("outside/one", "hf_hidden")
    store = open_secrets(SecretsSection(), aws.cloud(secrets={"allowlist": ["inside/one"]}))
    try:
        with pytest.raises(ConfigError) as error:
            await store.get("outside/one")
    finally:
        await store.close()
    assert "add it to [cloud.secrets] allowlist" in error.value.message and "hf_hidden" not in error.value.message


@pytest.mark.parametrize("provider", ["aws", "gcp"])
async def test_bytes_that_do_not_match_their_id(
    provider: str, request: pytest.FixtureRequest, aws: AwsEmulator, tmp_path: Path
) -> None:
    if provider == "aws":
        cloud = aws.cloud(s3={"bucket": aws.bucket()})
    else:
        gcs: Gcs = request.getfixturevalue("gcs")
        cloud = gcs.cloud()
    storage = StorageSection.model_validate({"embedded": {"path": str(tmp_path / "rollout.db")}})
    kept = SqliteStorage(str(tmp_path / "rollout.db"))
    await kept.open()
    store = open_store(ObjectsSection(), storage, cloud)
    wrong = blake3(b"something else").digest()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"these bytes"

    try:
        await store.open()
        with pytest.raises(ObjectCorruptError):
            await store.put(wrong, chunks(), 11)
        assert await store.has([wrong]) == [False]
    finally:
        await store.close()
        await kept.close()


async def test_a_queue_that_is_fifo(aws: AwsEmulator) -> None:
    """Rows may arrive from one; what people get wrong is its name."""
    url = aws.queue(f"{aws.fresh('rows')}.fifo", FifoQueue="true")
    assert await failed(aws.cloud(sqs={"queue_url": url}), "object_store", "secret_store") == {}
    queue = open_queue("sqs", Place(url.removesuffix(".fifo")), aws.cloud(sqs={"queue_url": url}))
    try:
        with pytest.raises(RolloutError) as error:
            await queue.open()
    finally:
        await queue.close()
    assert "queue_url" in error.value.message


def test_both_providers_and_an_unknown_key_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        f'[cloud]\nprovider = "aws"\nregion = "{REGION}"\n[cloud.aws.s3]\nbuket = "abc"\n[cloud.gcp.gcs]\nbucket = "abc"\n'
    )
    with pytest.raises(ConfigError) as error:
        load_settings(CoordinatorSettings, path, environ={})
    assert places(error.value.message) == [f"{path}:5: cloud.aws.s3.buket", f"{path}:6: cloud.gcp.gcs"]


def test_a_missing_extra_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.cloud.installed, "_MODULES", {"aws": ("there_is_no_such_module",)})
    path = tmp_path / "coordinator.toml"
    path.write_text('[cloud]\nprovider = "aws"\n[cloud.s3]\nbucket = "abc"\n')
    with pytest.raises(ConfigError) as error:
        check_coordinator(path)
    assert error.value.message.startswith(f"{path}:2: cloud.provider: ")
    assert error.value.message.endswith("pip install 'rollout-engine[aws]'")


def test_plan_shows_where_everything_is(tmp_path: Path, aws: AwsEmulator) -> None:
    path = tmp_path / "coordinator.toml"
    sections = {"bucket": "abc", "prefix": "runs"}
    path.write_text(
        f'[cloud]\nprovider = "aws"\nregion = "{REGION}"\n[cloud.s3]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in sections.items())
    )
    assert any(f"objects in s3://abc/runs/ ({REGION})" in line for line in check_coordinator(path))


@pytest.mark.slow
def test_a_command_says_where_its_file_names_a_bucket_that_is_not_there(tmp_path: Path, aws: AwsEmulator) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "infer.toml").write_text(
        '[model]\nuri = "mock"\n[backend]\nkind = "mock"\n[input]\nglob = "in.jsonl"\n[output]\ndir = "out"\n'
        f'[cloud]\nprovider = "aws"\nregion = "{REGION}"\nendpoint_url = "{aws.endpoint}"\n'
        '[cloud.aws.s3]\nbucket = "nobody-made-this"\n'
    )
    command = [sys.executable, "-m", "rollout.cli", "infer", "batch", "--config", "infer.toml", "--local"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 2, run.stderr
    assert "error [config_invalid]: infer.toml:14: cloud.aws.s3.bucket: s3://nobody-made-this/" in run.stderr
