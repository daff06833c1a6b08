"""What is GCS's own: sessions with an offset, lost answers, refusals with remedies, tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from gcs_emulator import Answered, Gcs, failure
from rollout.cloud import gcp, gcs_bucket
from rollout.cloud.bucket import ABSENT, StartOverError
from rollout.cloud.gcs_bucket import GcsBucket
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, ConflictError, StorageUnavailableError

MIB = 1 << 20
PART = 5 * MIB
BODY = bytes(range(256)) * (3 * PART // 256) + b"the rest"


async def body(data: bytes = BODY) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 700_000):
        yield data[at : at + 700_000]


@pytest.fixture
async def bucket(gcs: Gcs) -> AsyncIterator[GcsBucket]:
    bucket = opened(gcs.cloud(resumable_chunk_bytes=PART))
    yield bucket
    await bucket.close()
    assert gcs.unfinished() == []


def opened(cloud: CloudSection) -> GcsBucket:
    return GcsBucket(gcp.Gcp(cloud), cloud.bucket, cloud.gcs)


def chunk(method: str, path: str) -> bool:
    return method == "PUT"


def multipart(method: str, path: str) -> bool:
    return "uploadType=multipart" in path


def nth(number: int) -> Any:
    """A request of a session, the `number`-th."""
    seen = 0

    def is_it(method: str, path: str) -> bool:
        nonlocal seen
        seen += method == "PUT"
        return method == "PUT" and seen == number

    return is_it


@pytest.mark.parametrize("number", [1, 2, 4])
async def test_a_503_in_a_session_sends_nothing_twice(bucket: GcsBucket, gcs: Gcs, number: int) -> None:
    gcs.refuse.append((nth(number), Answered(503, failure(503, "slow down", "backendError"))))
    await bucket.write("k", body(), len(BODY), when=ABSENT)
    assert gcs.content("k") == BODY
    assert sum(call.startswith("PUT") for call in gcs.calls) == 4 + 2  # refused, asked for the offset


@pytest.mark.parametrize("number", [1, 3, 4])
async def test_a_lost_answer_in_a_session(bucket: GcsBucket, gcs: Gcs, number: int) -> None:
    gcs.lose.append(nth(number))
    await bucket.write("k", body(), len(BODY), when=ABSENT)
    assert gcs.content("k") == BODY
    assert sum(call.startswith("PUT") for call in gcs.calls) == 4 + 1  # asked for the offset


async def test_the_lost_answer_of_a_write_is_told_from_another_writer(bucket: GcsBucket, gcs: Gcs) -> None:
    gcs.lose.append(multipart)
    blob = await bucket.write("k", body(b"mine"), 4, when=ABSENT)
    assert blob == await bucket.head("k")
    with pytest.raises(ConflictError, match=r"gs://.*/k cannot be written"):
        await bucket.write("k", body(b"mine"), 4, when=ABSENT)


LOST = [
    Answered(410, failure(410, "gone", "gone")),
    Answered(404, failure(404, "no such session", "notFound")),
    Answered(308, headers={"Range": f"bytes=0-{len(BODY) + 5}"}),
    Answered(308, headers={"Range": "bytes=0-x"}),
]


@pytest.mark.parametrize("answer", LOST, ids=lambda answer: f"{answer.status}{answer.headers.get('Range', '')}")
async def test_a_session_that_is_lost_is_begun_anew_while_nothing_of_the_body_has_gone(
    bucket: GcsBucket, gcs: Gcs, answer: Answered
) -> None:
    gcs.refuse.append((nth(1), answer))
    await bucket.write("k", body(), len(BODY))
    assert gcs.content("k") == BODY
    gcs.refuse.append((nth(2), answer))
    with pytest.raises(StartOverError):
        await bucket.write("l", body(), len(BODY))
    gcs.refuse += [(chunk, answer) for _ in range(3)]
    with pytest.raises(StartOverError):
        await bucket.write("l", body(), len(BODY))
    assert gcs.names() == ["k"]


@pytest.mark.parametrize("held", [0, len(BODY)])
async def test_a_session_that_does_not_get_on_has_an_end(
    bucket: GcsBucket, gcs: Gcs, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr("rollout.cloud.gcs_upload.STEP_BUDGET_S", 0.3)
    answer = Answered(308, headers={"Range": f"bytes=0-{held - 1}"} if held else {})

    def late(method: str, path: str) -> bool:
        return method == "PUT" and sum(call.startswith("PUT") for call in gcs.calls) >= (4 if held else 1)

    gcs.refuse += [(late, answer) for _ in range(50)]
    with pytest.raises(StorageUnavailableError, match=f"stays at {held}"):
        await bucket.write("k", body(), len(BODY))


@pytest.mark.parametrize("where", ["head", "body"])
async def test_an_answer_that_drips_has_an_end(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(gcp, "CONNECT_S", 0.1)
    monkeypatch.setattr(gcp, "ANSWER_S", 0.2)
    ended = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 308 X\r\n" + (b"" if where == "head" else b"Content-Length: 9999\r\n\r\n"))
        with suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        ended.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        client = gcp.Gcp(CloudSection())
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/upload/storage/v1/b/b/o?upload_id=1"
        async with asyncio.timeout(20):
            with pytest.raises(TimeoutError):
                await client.once("PUT", url, data=b"1", expect=(308,), silent_s=0.1)
        await client.close()
        await ended.wait()


async def test_a_page_with_200_in_place_of_an_answer_is_none(bucket: GcsBucket, gcs: Gcs) -> None:
    """As a captive portal gives it."""
    page = Answered(200)
    page.body = b"<html>log in</html>"
    gcs.refuse.append((multipart, page))
    await bucket.write("k", body(b"x"), 1)
    assert gcs.content("k") == b"x"


async def test_a_broken_body_goes_on_where_it_broke(bucket: GcsBucket, gcs: Gcs) -> None:
    await bucket.write("k", body(), len(BODY))
    gcs.cut += [2 * MIB, 1000, 100, 3 * MIB]
    async with aclosing(bucket.read("k", 7, len(BODY) - 9)) as pieces:
        assert b"".join([piece async for piece in pieces]) == BODY[7:-2]
    assert gcs.cut == []


async def test_an_object_that_changes_while_it_is_read(bucket: GcsBucket, gcs: Gcs) -> None:
    await bucket.write("k", body(), len(BODY))
    gcs.cut.append(4 * MIB)
    async with aclosing(bucket.read("k")) as pieces:
        await anext(pieces)
        await bucket.write("k", body(bytes(len(BODY))), len(BODY))
        with pytest.raises(ConflictError, match="another"):
            async for _ in pieces:
                pass


async def test_a_copy_in_steps(bucket: GcsBucket, gcs: Gcs) -> None:
    gcs.steps = 3
    source = await bucket.write("k", body(b"data"), 4)
    assert (await bucket.copy(source, "l", when=ABSENT)).size == 4
    assert sum("rewriteTo" in call for call in gcs.calls) == 3


async def test_lists_in_pages(bucket: GcsBucket, gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_bucket, "PAGE", 2)
    for n in range(5):
        await bucket.write(f"p/{n}/x", body(b"x"), 1)
    assert [blob.key async for blob in bucket.list("p/", after="p/0/x")] == [f"p/{n}/x" for n in range(1, 5)]
    assert [blob.key async for blob in bucket.list("p/", delimiter="/")] == [f"p/{n}/" for n in range(5)]


REFUSALS = [
    (403, failure(403, "x@y lacks storage.objects.create", "forbidden"), "grant storage.objects.create.*objectAdmin"),
    (403, failure(403, "not enabled", "accessNotConfigured"), "gcloud services enable"),
    (401, failure(401, "Invalid Credentials", "authError"), "gcloud auth application-default login.*clock"),
    (400, failure(400, "Invalid bucket name", "invalid"), "look at .cloud.gcs. bucket"),
]


@pytest.mark.parametrize(("status", "answer", "remedy"), REFUSALS)
async def test_a_refusal_names_the_remedy(
    bucket: GcsBucket, gcs: Gcs, status: int, answer: dict[str, Any], remedy: str
) -> None:
    gcs.refuse.append((multipart, Answered(status, answer)))
    with pytest.raises((ConfigError, Exception), match=remedy) as e:
        await bucket.write("k", body(b"x"), 1)
    assert answer["error"]["message"] in str(e.value)


async def test_a_throttled_request_waits_as_it_is_told(bucket: GcsBucket, gcs: Gcs) -> None:
    gcs.refuse.append((multipart, Answered(429, failure(429, "slow", "rateLimitExceeded"), {"Retry-After": "1"})))
    began = time.monotonic()
    await bucket.write("k", body(b"x"), 1)
    assert time.monotonic() - began >= 1


# Tokens


@pytest.fixture
def key_file(gcs: Gcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a service account whose tokens the emulator gives out; Google's hosts are the emulator's."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "client_email": "a@b", "project_id": "of-the-key"}
    path = tmp_path / "key.json"
    path.write_text(json.dumps({**account, "private_key": key.decode(), "token_uri": f"{gcs.endpoint}/token"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setattr(gcp, "_is_google", lambda url: True)  # type: ignore[misc]
    return path


def token(gcs: Gcs, status: int = 200, **answer: Any) -> None:
    gcs.refuse.append((lambda method, path: path == "/token", Answered(status, answer)))


async def test_a_token_is_asked_for_once_and_again_where_it_is_refused(
    bucket: GcsBucket, gcs: Gcs, key_file: Path
) -> None:
    token(gcs, access_token="one", expires_in=3600)
    await asyncio.gather(*(bucket.head(f"{n}") for n in range(5)))
    assert gcs.calls.count("POST /token") == 1
    token(gcs, access_token="two", expires_in=3600)
    gcs.refuse.append((lambda method, path: path.endswith("/k"), Answered(401, failure(401, "expired", "authError"))))
    await bucket.head("k")
    assert gcs.calls.count("POST /token") == 2


async def test_a_good_token_is_kept_while_no_other_can_be_had(
    bucket: GcsBucket, gcs: Gcs, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.cloud.gcp_token.BUDGET_S", 0.2)
    token(gcs, access_token="one", expires_in=3600)
    await bucket.head("k")
    credentials: Any = bucket._gcp._credentials()  # type: ignore[attr-defined]
    credentials._renew_at = 0.0
    for _ in range(50):
        token(gcs, 503)
    await bucket.head("k")
    assert gcs.calls.count("POST /token") > 1
    credentials._renew_at = credentials._ends_at = 0.0
    with pytest.raises(StorageUnavailableError, match="a token of Google"):
        await bucket.head("k")


async def test_credentials_that_are_not_taken(bucket: GcsBucket, gcs: Gcs, key_file: Path) -> None:
    said = "Invalid JWT: Token must be a short-lived token and in a reasonable timeframe. Check your iat and exp values"
    token(gcs, 400, error="invalid_grant", error_description=said)
    with pytest.raises(ConfigError, match=r"Check your iat.*application-default login.*clock"):
        await bucket.head("k")


@pytest.mark.parametrize(("content", "fault"), [(None, "cannot be read"), ("{", "not the JSON of a key")])
async def test_a_key_file_that_is_none(bucket: GcsBucket, key_file: Path, content: str | None, fault: str) -> None:
    if content is None:
        key_file.unlink()
    else:
        key_file.write_text(content)
    with pytest.raises(ConfigError, match=fault):
        await bucket.head("k")


async def test_no_credentials_at_all(bucket: GcsBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setattr("gcloud.aio.auth.token.GCE_ENDPOINT_TOKEN", "http://metadata.invalid/token")
    monkeypatch.setattr(gcp, "_is_google", lambda url: True)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"no Google credentials.*application-default login"):
        await bucket.head("k")


def test_a_token_goes_to_google_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gcp._is_google("https://storage.googleapis.com/x")  # type: ignore[attr-defined]
    for url in ("http://127.0.0.1:1/x", "https://googleapis.com.example/x", "http://storage.googleapis.com/x"):
        assert not gcp._is_google(url)  # type: ignore[attr-defined]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    assert gcp.Gcp(CloudSection()).endpoint("storage") == "http://localhost:4443"
