"""Provider's account, as far as the checks differ between providers."""

from __future__ import annotations

from typing import Protocol

from rollout.cloud.bucket import Bucket
from rollout.config.cloud import CloudSection


class Account(Protocol):
    """One provider's account. `store`, `queue` and `secrets` are the names of its services in `endpoints`."""

    store: str
    queue: str
    secrets: str
    compute: str

    def endpoints(self, wanted: set[str]) -> dict[str, str]:
        """Return the URLs of the services in `wanted`, and of the one that `authenticate` asks. Raises ConfigError if
        the region is missing."""
        ...

    async def authenticate(self, wanted: set[str]) -> str:
        """Return the owner of the credentials, for people. Raises ConfigError, which says how to get credentials."""
        ...

    def bucket(self) -> Bucket: ...

    async def end_upload(self, key: str) -> None:
        """Begin an upload to `key` and abort it, as is done with a failed upload."""
        ...

    async def advice(self) -> tuple[str, ...]:
        """Return what the bucket lacks although it can be used."""
        ...

    async def close(self) -> None: ...


def account_of(cloud: CloudSection) -> Account:
    if cloud.provider == "aws":
        from rollout.cli.cloud_doctor.aws import AwsAccount

        return AwsAccount(cloud)
    from rollout.cli.cloud_doctor.gcp import GcpAccount

    return GcpAccount(cloud)
