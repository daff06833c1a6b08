"""A bad network between us and GCS: what was sent is not sent twice, and nothing is left behind."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import pytest
from fault_proxy import FaultProxy, fault_proxy
from gcs_emulator import Gcs
from rollout.cloud.gcp import Gcp
from rollout.cloud.gcs_bucket import GcsBucket
from rollout.model.errors import StorageUnavailableError

MIB = 1 << 20
PART = 5 * MIB
BODY = hashlib.shake_128(b"seed").digest(2 * PART + 7)


@dataclass
class Rig:
    bucket: GcsBucket
    gcs: Gcs
    proxy: FaultProxy

    async def write(self) -> None:
        async def body() -> AsyncIterator[bytes]:
            for at in range(0, len(BODY), 300_000):
                yield BODY[at : at + 300_000]

        await self.bucket.write("k", body(), len(BODY))

    async def read(self) -> bytes:
        async with aclosing(self.bucket.read("k")) as pieces:
            return b"".join([piece async for piece in pieces])

    def ranges(self) -> list[str]:
        """Of the requests of a session."""
        return [headers["content-range"] for line, headers in self.proxy.asked if line.startswith("PUT")]


@pytest.fixture
async def rig(gcs: Gcs) -> AsyncIterator[Rig]:
    async with fault_proxy(gcs.endpoint) as proxy:
        cloud = gcs.cloud(proxy.url, resumable_chunk_bytes=PART)
        bucket = GcsBucket(Gcp(cloud), cloud.bucket, cloud.gcs)
        yield Rig(bucket, gcs, proxy)
        await bucket.close()
        assert gcs.unfinished() == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds after which a silent server is given up."""
    monkeypatch.setattr("rollout.cloud.gcp.SILENT_S", 0.5)
    return 0.5


async def test_a_chunk_that_is_cut_goes_on_from_what_was_kept(rig: Rig) -> None:
    rig.proxy.add("^PUT", skip=1, cut_request=3 * MIB + 1000)
    await rig.write()
    assert rig.gcs.content("k") == BODY
    first, cut, asked, *rest = rig.ranges()
    assert (first, asked) == (f"bytes 0-{PART - 1}/{len(BODY)}", f"bytes */{len(BODY)}")
    assert cut == f"bytes {PART}-{2 * PART - 1}/{len(BODY)}"
    kept = int(rest[0].removeprefix("bytes ").split("-")[0])
    assert PART <= kept <= PART + 3 * MIB and kept % (256 * 1024) == 0
    assert rest[1:] == [f"bytes {2 * PART}-{len(BODY) - 1}/{len(BODY)}"]


async def test_a_damaged_object_does_not_stay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.cloud.gcs_upload._base64", lambda digest: "another")
    with pytest.raises(StorageUnavailableError, match="other bytes than those sent"):
        await rig.write()
    assert rig.gcs.names() == []


async def test_a_server_that_takes_nothing_more_is_given_up(rig: Rig, impatient: float) -> None:
    rig.proxy.add("^PUT", stall=1 * MIB)
    began = time.monotonic()
    await rig.write()
    assert time.monotonic() - began >= impatient
    assert rig.gcs.content("k") == BODY


async def test_a_slow_body_is_no_fault(rig: Rig, impatient: float) -> None:
    await rig.write()
    rig.proxy.add("alt=media", bytes_per_s=6 * MIB)
    began = time.monotonic()
    assert await rig.read() == BODY
    assert time.monotonic() - began > 2 * impatient and len(rig.proxy.lines("alt=media")) == 1


async def test_bodies_that_break_and_answers_that_are_lost(rig: Rig) -> None:
    rig.proxy.add("^PUT", skip=2, lose=True)
    await rig.write()
    for after in (0, 1000, 2 * MIB):
        rig.proxy.add("alt=media", cut_answer=after)
    rig.proxy.add("alt=media", status=503)
    assert await rig.read() == BODY


async def test_a_service_that_stays_away_is_told_and_nothing_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.cloud.gcs_upload.STEP_BUDGET_S", 1.0)
    rig.proxy.add("^PUT", skip=1, times=1000, status=503)
    with pytest.raises(StorageUnavailableError, match=r"gs://.*/k cannot be written: 503.*tried \d+ time"):
        await rig.write()
    assert rig.gcs.names() == []
