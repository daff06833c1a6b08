"""`rollout cloud doctor` on the emulators: what passes, what fails and what is said of it, and that nothing stays."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import fault_proxy
from gcs_emulator import Gcs
from moto_locked import REGION, AwsEmulator
from pubsub_emulator import Pubsub
from rollout.cli.cloud_doctor import queue, stores
from rollout.cli.cloud_doctor.account import account_of
from rollout.cli.cloud_doctor.check import NAMES, Check, Outcome, Passed, Reached, run_checks
from rollout.cli.cloud_doctor.doctor import checks_of, examine, wanted_of
from rollout.cli.cloud_doctor.reach import reachability
from rollout.cli.cloud_doctor.report import as_json
from rollout.cli.commands.cloud import app
from rollout.cloud.s3_bucket import S3Bucket
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, UnavailableError
from structlog.testing import capture_logs
from typer.testing import CliRunner

Written = Callable[..., Path]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The large object is a little larger than two parts: of 64 MiB the emulators take long. Wherever this runs, it is no
    machine of the provider's."""
    monkeypatch.setattr("rollout.cli.cloud_doctor.doctor.in_cloud", lambda backend: False)
    monkeypatch.setattr(stores, "LARGE", 11 << 20)
    monkeypatch.setattr(stores.content_id, "__defaults__", (11 << 20,))
    monkeypatch.setattr("rollout.cli.cloud_doctor.aws.PART", 5 << 20)
    monkeypatch.setattr("rollout.cli.cloud_doctor.gcp.CHUNK", 5 << 20)
    with capture_logs():  # commands leave a logger to their own output, which is closed
        yield


@pytest.fixture
def account(aws: AwsEmulator, tmp_path: Path) -> Written:
    """A file for an account where all is well, but for what is given instead."""
    secret = aws.fresh("rollout/hf-token")
    aws.secret(secret, "hf_value")
    there: dict[str, Any] = {"bucket": aws.bucket(), "queue": aws.queue(aws.fresh("doctor")), "secrets": [secret]}

    def write(**given: Any) -> Path:
        values = there | given
        path = tmp_path / "train.toml"
        path.write_text(
            f'[model]\nuri = "x"\n[cloud]\nprovider = "aws"\nregion = "{REGION}"\nendpoint_url = "{aws.endpoint}"\n'
            f'[cloud.aws.s3]\nbucket = "{values["bucket"]}"\nprefix = "runs"\n'
            f'[cloud.aws.sqs]\nqueue_url = "{values["queue"]}"\n'
            f"[cloud.aws.secrets]\nallowlist = {json.dumps(values['secrets'])}\n"
        )
        return path

    write.there = there  # type: ignore[attr-defined]
    return write


def ran(path: Path, *options: str, provider: str = "aws") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", "--provider", provider, "--config", str(path), *options])
    if isinstance(done.exception, ConfigError):
        return 2, done.exception.message  # `rollout` prints it and ends with 2
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def failures(path: Path, *options: str) -> dict[str, str]:
    code, text = ran(path, "--format", "json", *options)
    assert code == 1, text
    return {one["name"]: one["error"] for one in json.loads(text.splitlines()[-1])["checks"] if one["status"] == "fail"}


def test_a_healthy_account(account: Written, aws: AwsEmulator) -> None:
    code, text = ran(account(), "--format", "json")
    found = json.loads(text)
    assert code == 0, text
    assert [one["name"] for one in found["checks"]] == list(NAMES)
    assert {tuple(sorted(one)) for one in found["checks"]} == {("latency_ms", "name", "status")}
    assert found["summary"].keys() == {"pass_count", "fail_count", "total_latency_ms"}
    assert (found["summary"]["pass_count"], found["summary"]["fail_count"]) == (7, 0)
    bucket = account.there["bucket"]  # type: ignore[attr-defined]
    assert aws.keys(bucket) == [] and aws.unfinished(bucket) == []
    attributes = aws.sqs.get_queue_attributes(
        QueueUrl=account.there["queue"],  # type: ignore[attr-defined]
        AttributeNames=["All"],
    )["Attributes"]
    assert attributes["ApproximateNumberOfMessages"] == attributes["ApproximateNumberOfMessagesNotVisible"] == "0"


def test_for_people(account: Written) -> None:
    code, text = ran(account(), "--without", "content_id_roundtrip", "--without", "queue")
    assert code == 0
    assert [line.split()[1] for line in text.splitlines() if line[0] in "✔✖"] == [
        name for name in NAMES if name not in ("content_id_roundtrip", "queue")
    ]
    assert re.fullmatch(r"5 pass, 0 fail — total \d+ ms", text.splitlines()[-1])
    assert text.count("aws s3api put-bucket-lifecycle-configuration") == 1


def test_the_advice_of_the_lifecycle_rule_can_be_followed(account: Written, aws: AwsEmulator) -> None:
    path = account()
    kept = {"ID": "mine", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}
    bucket = account.there["bucket"]  # type: ignore[attr-defined]
    aws.s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [kept]})
    only = ("--without", "queue", "--without", "secret_store", "--without", "content_id_roundtrip")
    command = re.search(r"--lifecycle-configuration '(.*)'", ran(path, *only)[1])
    assert command is not None
    rules = json.loads(command[1])
    assert [rule["ID"] for rule in rules["Rules"]] == ["mine", "abort-unfinished-uploads"]
    aws.s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    assert "lifecycle" not in ran(path, *only)[1]


def test_without_a_store_nothing_of_s3_is_asked(account: Written) -> None:
    code, text = ran(account(bucket="there-is-no-such-bucket"), "--without", "object_store", "--format", "json")
    assert code == 0, text
    assert "content_id_roundtrip" not in text


def test_what_is_not_configured_says_how_to_leave_it_out(tmp_path: Path, aws: AwsEmulator) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'[cloud]\nprovider = "aws"\nregion = "{REGION}"\nendpoint_url = "{aws.endpoint}"\n')
    found = failures(path)
    assert found.keys() == {"object_store", "queue", "secret_store", "content_id_roundtrip"}
    assert "[cloud.s3] bucket" in found["object_store"] and "--without object_store" in found["object_store"]
    assert "[cloud.sqs] queue_url" in found["queue"] and "--without queue" in found["queue"]
    assert "allowlist is empty" in found["secret_store"] and "--without secret_store" in found["secret_store"]


def test_every_secret_is_read(account: Written) -> None:
    good = account.there["secrets"][0]  # type: ignore[attr-defined]
    found = failures(account(secrets=[good, "rollout/gone", "rollout/gone-too"]), "--without", "object_store")
    assert "rollout/gone" in found["secret_store"] and "(and 1 more of 3)" in found["secret_store"]


def test_the_secrets_of_a_worker_s_own_list_are_read_too(account: Written, aws: AwsEmulator) -> None:
    path = account()
    path.write_text(f'[secrets]\nallow = ["rollout/gone"]\n{path.read_text()}')
    found = failures(path, "--without", "object_store")
    assert "rollout/gone" in found["secret_store"]
    aws.secret("rollout/gone", "there")
    code, text = ran(path, "--without", "object_store")
    assert code == 0 and "2 of 2 read" in text


def test_on_a_machine_of_the_provider_s_a_silent_metadata_service_is_a_failure(
    account: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it is none, and the address of the service is shown whole."""
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    others = ("--without", "object_store", "--without", "queue", "--without", "secret_store")
    code, text = ran(account(), *others)
    assert code == 0 and "(the metadata service at http://127.0.0.1:1 does not answer)" in text
    monkeypatch.setattr("rollout.cli.cloud_doctor.doctor.in_cloud", lambda backend: backend == "ec2")
    assert "does not answer" in failures(account(), *others)["compute_hint"]


async def test_a_file_of_authorities_that_cannot_be_read_is_a_failure_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in (None, "no certificate"):
        file = tmp_path / "ca.pem"
        if text is not None:
            file.write_text(text)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
        with pytest.raises(UnavailableError, match=r"s3: .*ca\.pem, which AWS_CA_BUNDLE"):
            await reachability({"s3": "https://127.0.0.1:1"}, Reached())


async def test_an_endpoint_that_several_services_share_is_told_of_once() -> None:
    with pytest.raises(UnavailableError) as error:
        await reachability({"s3": "http://127.0.0.1:1", "sqs": "http://127.0.0.1:1"}, Reached())
    assert error.value.message.startswith("s3, sqs: 127.0.0.1:1: ") and "; " not in error.value.message


@pytest.mark.parametrize("url", ["http://h:99999", "http://localhost:abc", "http://[::1", "https://:80"])
def test_an_endpoint_without_a_host_and_a_port_is_a_fault_of_the_file(account: Written, url: str) -> None:
    path = account()
    text = path.read_text()
    path.write_text(re.sub('endpoint_url = ".*"', f'endpoint_url = "{url}"', text))
    code, told = ran(path)
    assert code == 2 and "cloud.endpoint_url: is no URL with a host and a port up to 65535" in told


def test_nothing_listens(account: Written, aws: AwsEmulator) -> None:
    path = account()
    path.write_text(path.read_text().replace(aws.endpoint, "http://127.0.0.1:9"))
    found = failures(path)
    assert "endpoint_url" in found["reachability"] and "127.0.0.1:9" in found["reachability"]
    assert found["object_store"] == "not tried: s3 cannot be reached (see reachability)"
    assert "auth" in found and "compute_hint" not in found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('provider = "aws"', 'provider = "gcp"'), "cloud.aws.s3: is of provider"),
        (("[cloud.aws.s3]\nbucket", "[cloud.aws.s3]\nbuket"), 'cloud.aws.s3.buket: unknown key; did you mean "bucket"?'),
        (("[model]", "[model"), "not valid TOML"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(account: Written, change: tuple[str, str], told: str) -> None:
    path = account()
    path.write_text(path.read_text().replace(*change))
    code, text = ran(path)
    assert code == 2 and told in text


def test_the_providers_of_file_and_option_must_be_the_same(account: Written, tmp_path: Path) -> None:
    path = account()
    assert ran(path, provider="gcp") == (
        2,
        f'{path}:4: cloud.provider: is "aws", and --provider is gcp: give --provider aws',
    )
    none = tmp_path / "none.toml"
    none.write_text("[run]\n")
    assert "there is no [cloud] section" in ran(none)[1]
    assert "no such file" in ran(tmp_path / "missing.toml")[1]


async def test_what_is_interrupted_leaves_nothing(aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, url = aws.bucket(), aws.queue()
    cloud = aws.cloud(s3={"bucket": bucket}, sqs={"queue_url": url})
    copying, sent = asyncio.Event(), asyncio.Event()

    async def hang(self: S3Bucket, *args: Any, **options: Any) -> Any:
        copying.set()
        await asyncio.Event().wait()

    async def no_message(*args: Any, **options: Any) -> bool:
        if not options:  # the first look, not the one that tidies
            sent.set()
            await asyncio.Event().wait()
        return await received(*args, **options)

    received = queue._received  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(S3Bucket, "copy", hang)
    monkeypatch.setattr(queue, "_received", no_message)
    examining = asyncio.create_task(examine(cloud, ["secret_store"], lambda _: None))
    await asyncio.wait_for(asyncio.gather(copying.wait(), sent.wait()), 60)
    examining.cancel()
    await asyncio.gather(examining, return_exceptions=True)
    assert examining.cancelled()
    assert aws.keys(bucket) == [] and aws.unfinished(bucket) == []
    counted = aws.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert counted["ApproximateNumberOfMessages"] == counted["ApproximateNumberOfMessagesNotVisible"] == "0"


async def test_a_check_that_ends_as_it_is_interrupted_does_not_hold_up_the_end() -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def ends() -> Passed:
        begun.set()
        with suppress(asyncio.CancelledError):  # as what is over at that moment
            await never.wait()
        return Passed("")

    async def hangs() -> Passed:
        await never.wait()
        return Passed("")

    checks = [Check("queue", ends), Check("object_store", hangs)]
    running = asyncio.create_task(run_checks(checks, Reached(), lambda _: None))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 10)


async def test_messages_of_others_are_given_back(aws: AwsEmulator) -> None:
    url = aws.queue()
    aws.sqs.send_message(QueueUrl=url, MessageBody='{"prompt": "theirs"}')
    passed = await queue.roundtrip(aws.cloud(sqs={"queue_url": url}))
    assert "no dead-letter queue" in passed.advice[-1]
    left = aws.sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
    assert [one["Body"] for one in left] == ['{"prompt": "theirs"}']


async def test_gcs(gcs: Gcs) -> None:
    name = "doctor-bucket"
    gcs.make_bucket(name)
    cloud = gcs.cloud(bucket=name)
    found = await examine(cloud, ["queue", "secret_store"], lambda _: None)
    assert {one.name: one.error for one in found if not one.ok} == {}
    assert not gcs.names(name) and not gcs.unfinished()


async def test_pubsub(pubsub: Pubsub) -> None:
    topic, subscription = pubsub.pair()
    cloud = pubsub.cloud(topic=topic, subscription=subscription)
    found = await examine(cloud, ["object_store", "secret_store", "compute_hint"], lambda _: None)
    assert {one.name: one.error for one in found if not one.ok} == {}


async def test_checks_run_at_once_and_are_told_in_order() -> None:
    last = asyncio.Event()

    async def waits() -> Passed:
        await asyncio.wait_for(last.wait(), 10)
        return Passed()

    async def opens() -> Passed:
        last.set()
        return Passed()

    told: list[str] = []
    checks = [Check("queue", waits), Check("secret_store", opens)]

    def tell(outcome: Outcome) -> None:
        told.append(outcome.name)

    found = await run_checks(checks, Reached(), tell)
    assert told == ["queue", "secret_store"] and as_json(found, 3)["summary"]["pass_count"] == 2


async def test_a_check_has_its_limit() -> None:
    async def never() -> Passed:
        await asyncio.Event().wait()
        raise AssertionError

    found = await run_checks([Check("queue", never, limit_s=0.01)], Reached(), lambda _: None)
    assert found[0].error.startswith("did not end within 0.01 s")


async def test_the_permission_to_end_an_upload_is_tried(aws: AwsEmulator) -> None:
    async with fault_proxy(aws.endpoint) as proxy:
        proxy.add(r"^DELETE .*uploadId", status=403, body=b"<Error><Code>AccessDenied</Code></Error>", times=99)
        cloud = aws.cloud(endpoint_url=proxy.url, s3={"bucket": aws.bucket()})
        found = await examine(cloud, ["queue", "secret_store", "content_id_roundtrip"], lambda _: None)
    errors = {one.name: one.error for one in found if not one.ok}
    assert errors.keys() == {"object_store"} and "allow s3:AbortMultipartUpload" in errors["object_store"]


@pytest.mark.parametrize("provider", ["aws", "gcp"])
async def test_a_captive_portal_fails_every_check_that_asks(
    aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    async with fault_proxy(aws.endpoint) as proxy:
        proxy.add("", status=200, body=b"<html>log in</html>", headers={"content-type": "text/html"}, times=9999)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", proxy.url)
        monkeypatch.setenv("GCE_METADATA_HOST", proxy.url.removeprefix("http://"))
        if provider == "aws":
            section: dict[str, Any] = {"s3": {"bucket": "bucket"}, "sqs": {"queue_url": f"{proxy.url}/1/q"}}
        else:
            section = {
                "gcs": {"bucket": "bucket"},
                "pubsub": {"subscription": "rows", "topic": "rows"},
                "project": "project",
            }
        cloud = CloudSection.model_validate({"provider": provider, "endpoint_url": proxy.url, **section})
        monkeypatch.setattr(stores, "TIDY_S", 0.1)
        account = account_of(cloud)
        checks = [
            replace(check, limit_s=2.0) for check in checks_of(cloud, account, wanted_of(["secret_store"]), Reached())
        ]
        found = await run_checks(checks, Reached(), lambda _: None)
        await account.close()
    failed = {one.name for one in found if not one.ok}
    assert failed >= {"object_store", "queue", "content_id_roundtrip"}, found
