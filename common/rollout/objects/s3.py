"""Objects in a bucket of S3, or of a store like it."""

from __future__ import annotations

from rollout.cloud.aws import Aws
from rollout.cloud.s3_bucket import S3Bucket
from rollout.config.cloud import CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.model.errors import ConfigError
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.ledger_pins import ledger_pins


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> BucketObjectStore:
    if cloud.provider != "aws" or not cloud.s3.bucket:
        raise ConfigError('objects in S3 need [cloud] provider = "aws" and [cloud.s3] bucket')
    bucket = S3Bucket(Aws(cloud), cloud.s3.bucket, cloud.s3, own_session=True)
    return BucketObjectStore(bucket, cloud.s3.prefix, ledger_pins(storage))
