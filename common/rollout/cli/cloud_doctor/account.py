"""A provider's account, as far as the checks differ between providers."""

from __future__ import annotations

from typing import Protocol

from rollout.cloud.bucket import Bucket
from rollout.config.cloud import CloudSection


class Account(Protocol):
    """`store`, `queue`, `secrets`: how its services are called in `endpoints`."""

    store: str
    queue: str
    secrets: str
    compute: str

    def endpoints(self, wanted: set[str]) -> dict[str, str]:
        """URLs of the services among `wanted`, and of the one that `authenticate` asks. ConfigError: no region."""
        ...

    async def authenticate(self, wanted: set[str]) -> str:
        """Whose credentials they are, for people. ConfigError with how to get some."""
        ...

    def bucket(self) -> Bucket: ...

    async def end_upload(self, key: str) -> None:
        """Begins an upload to `key` and ends it, as is done with one that fails."""
        ...

    async def advice(self) -> tuple[str, ...]:
        """What the bucket lacks, once it can be used."""
        ...

    async def close(self) -> None: ...


def account_of(cloud: CloudSection) -> Account:
    if cloud.provider == "aws":
        from rollout.cli.cloud_doctor.aws import AwsAccount

        return AwsAccount(cloud)
    from rollout.cli.cloud_doctor.gcp import GcpAccount

    return GcpAccount(cloud)
