"""Objects on GCS beside gcloud-aio-storage's own upload and download, on the same emulator."""

from __future__ import annotations

import asyncio
import io
from typing import Any

from bucket_speed import PIECE, Peer, rows_of, server
from measure import Row
from rollout.cloud.gcp import Gcp
from rollout.cloud.gcs_bucket import GcsBucket
from rollout.config.cloud import CloudSection

BUCKET = "bench"
LONG_S = 600


async def measured(endpoint: str, quick: bool) -> list[Row]:
    from gcloud.aio.storage import Storage

    cloud = CloudSection.model_validate(
        {"provider": "gcp", "project": "bench-project", "gcs": {"bucket": BUCKET, "endpoint_url": endpoint}}
    )
    bucket = GcsBucket(Gcp(cloud), BUCKET, cloud.gcs)
    try:
        async with Storage(api_root=endpoint) as storage:
            client: Any = storage

            async def put(key: str, data: bytes) -> None:
                await client.upload(BUCKET, key, io.BytesIO(data), timeout=LONG_S)

            async def get(key: str) -> None:
                stream = await client.download_stream(BUCKET, key, timeout=LONG_S)
                while await stream.read(PIECE):
                    pass

            sizes = ["1 KiB", "1 MiB"] if quick else ["1 KiB", "1 MiB", "256 MiB", "2 GiB"]
            return await rows_of(bucket, Peer("gcloud-aio-storage", put, get), sizes, rounds=2 if quick else 5)
    finally:
        await bucket.close()


def rows(quick: bool) -> list[Row]:
    with server("gcs_emulator.py") as endpoint:
        return asyncio.run(measured(endpoint, quick))


if __name__ == "__main__":
    for row in rows(quick=False):
        print(row.what, row.figure, row.target, row.verdict, sep=" | ")
