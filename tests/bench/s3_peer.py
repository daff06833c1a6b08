"""One client of S3 in a process of its own: puts and gets a file so and so often, and tells how fast, and with how much
memory. Started by bench_s3.py: s3_peer.py NAME ENDPOINT BUCKET FILE TIMES"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

PIECE = 512 << 10
REGION = "eu-central-1"


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Peer(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def put(self, file: Path, key: str) -> None: ...
    async def get(self, key: str, file: Path) -> None: ...


async def pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb", buffering=0) as source:
        while piece := await asyncio.to_thread(source.read, PIECE):
            yield piece


async def keep(found: Any, file: Path) -> None:
    async with aclosing(found) as source:
        with file.open("wb") as target:
            async for piece in source:
                target.write(piece)


class Bucket:
    """Ours, the bucket alone."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        from rollout.cloud.aws import Aws
        from rollout.cloud.s3_bucket import S3Bucket
        from rollout.config.cloud import CloudSection

        given = {"provider": "aws", "region": REGION, "endpoint_url": endpoint, "s3": {"bucket": bucket}}
        cloud = CloudSection.model_validate(given)
        self.bucket = S3Bucket(Aws(cloud), bucket, cloud.s3, own_session=True)

    async def open(self) -> None:
        await self.bucket.open()

    async def close(self) -> None:
        await self.bucket.close()

    async def put(self, file: Path, key: str) -> None:
        await self.bucket.write(key, pieces(file), file.stat().st_size)

    async def get(self, key: str, file: Path) -> None:
        await keep(self.bucket.read(key), file)


class Store(Bucket):
    """Ours, the object store: hashed, looked up before, verified on read."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        from rollout.objects.bucket_store import BucketObjectStore
        from rollout.objects.claims import FilePins

        super().__init__(endpoint, bucket)
        self.pins = Path(f"pins-{uuid.uuid4().hex}.db")
        self.store = BucketObjectStore(self.bucket, "", FilePins(self.pins.absolute()))
        self.names: dict[str, bytes] = {}

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.store.close()

    async def put(self, file: Path, key: str) -> None:
        from rollout.objects.digest import hash_file

        name, size = await asyncio.to_thread(hash_file, file)
        self.names[key] = name
        assert await self.store.put(name, pieces(file), size)

    async def get(self, key: str, file: Path) -> None:
        await keep(self.store.get(self.names[key]), file)


class Boto3:
    """Its transfer manager, with as large parts as ours."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig

        self.name = bucket
        self.client: Any = boto3.client("s3", endpoint_url=endpoint, region_name=REGION)  # type: ignore[call-overload]
        self.config = TransferConfig(multipart_threshold=(16 << 20) + 1, multipart_chunksize=16 << 20)

    async def open(self) -> None:
        self.client.head_bucket(Bucket=self.name)

    async def close(self) -> None:
        self.client.close()

    async def put(self, file: Path, key: str) -> None:
        self.client.upload_file(str(file), self.name, key, Config=self.config)

    async def get(self, key: str, file: Path) -> None:
        self.client.download_file(self.name, key, str(file), Config=self.config)


class Obstore:
    """A library in Rust, for the decision of ADR 0029; measured where it is installed."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        from obstore.store import S3Store  # type: ignore[import-not-found]

        self.store: Any = S3Store(
            bucket, endpoint=endpoint, region=REGION, client_options={"allow_http": True}, virtual_hosted_style_request=False
        )  # fmt: skip

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def put(self, file: Path, key: str) -> None:
        import obstore  # type: ignore[import-not-found]

        await obstore.put_async(self.store, key, file, chunk_size=16 << 20, max_concurrency=2)

    async def get(self, key: str, file: Path) -> None:
        import obstore  # type: ignore[import-not-found]

        found = await obstore.get_async(self.store, key)
        with file.open("wb") as target:
            async for piece in found.stream(min_chunk_size=PIECE):
                target.write(piece)


PEERS: dict[str, type[Any]] = {"bucket": Bucket, "store": Store, "boto3": Boto3, "obstore": Obstore}


async def run(name: str, endpoint: str, bucket: str, file: Path, times: int) -> dict[str, Any]:
    peer: Peer = PEERS[name](endpoint, bucket)
    await peer.open()
    small = file.with_name("small")
    small.write_bytes(uuid.uuid4().bytes)
    await peer.put(small, f"{name}-warm")
    before = peak_mib()
    puts: list[float] = []
    gets: list[float] = []
    out = file.with_name(f"out-{name}")
    for n in range(times):
        with file.open("r+b") as target:  # other bytes each time, or the store has them
            target.write(uuid.uuid4().bytes)
        key = f"{name}-{file.name}-{n}"
        began = time.perf_counter()
        await peer.put(file, key)
        puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        await peer.get(key, out)
        gets.append(time.perf_counter() - began)
        assert out.stat().st_size == file.stat().st_size
    await peer.close()
    return {"put": puts, "get": gets, "grown_mib": peak_mib() - before}


if __name__ == "__main__":
    peer_name, at, into, path, count = sys.argv[1:]
    print(json.dumps(asyncio.run(run(peer_name, at, into, Path(path), int(count)))))
