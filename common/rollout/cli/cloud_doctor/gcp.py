"""Checks of a Google Cloud account."""

from __future__ import annotations

from rollout.cloud.bucket import Bucket
from rollout.cloud.gcp import Gcp, Service
from rollout.cloud.gcs_bucket import GcsBucket
from rollout.config.cloud import CloudSection

CHUNK = 16 << 20
"""Chunk size of the large object, in bytes; it is uploaded in chunks whatever the configuration says."""
_SERVICES: tuple[Service, ...] = ("storage", "pubsub", "secretmanager")


class GcpAccount:
    store, queue, secrets, compute = "storage", "pubsub", "secretmanager", "gce"

    def __init__(self, cloud: CloudSection) -> None:
        self._cloud = cloud
        self._gcp = Gcp(cloud)

    def endpoints(self, wanted: set[str]) -> dict[str, str]:
        return {service: self._gcp.endpoint(service) for service in _SERVICES if service in wanted}

    async def authenticate(self, wanted: set[str]) -> str:
        if all("googleapis.com" not in url for url in self.endpoints(wanted).values()):
            return "emulators, which ask for none"
        return await self._gcp.log_in()

    def bucket(self) -> Bucket:
        section = self._cloud.gcs
        section = section.model_copy(update={"resumable_chunk_bytes": min(CHUNK, section.resumable_chunk_bytes)})
        return GcsBucket(Gcp(self._cloud), self._cloud.bucket, section)

    async def end_upload(self, key: str) -> None:
        return  # takes no permission of its own

    async def advice(self) -> tuple[str, ...]:
        return ()  # sessions of uploads end by themselves after a week

    async def close(self) -> None:
        await self._gcp.close()
