"""Opens the bucket of a URL's scheme and name."""

from __future__ import annotations

from typing import Literal

from rollout.cloud.bucket import Bucket
from rollout.config.cloud import CloudSection


def open_bucket(cloud: CloudSection, scheme: Literal["s3", "gs"], name: str) -> Bucket:
    """Return the bucket, not opened yet. Without a `[cloud]` of this provider the default chain of credentials is
    used."""
    if scheme == "s3":
        from rollout.cloud.aws import Aws
        from rollout.cloud.s3_bucket import S3Bucket

        return S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
    from rollout.cloud.gcp import Gcp
    from rollout.cloud.gcs_bucket import GcsBucket

    return GcsBucket(Gcp(cloud), name, cloud.gcs)
