"""Objects in a bucket of Google Cloud Storage."""

from __future__ import annotations

from rollout.cloud.gcp import Gcp
from rollout.cloud.gcs_bucket import GcsBucket
from rollout.config.cloud import CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.model.errors import ConfigError
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.ledger_pins import ledger_pins


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> BucketObjectStore:
    if cloud.provider != "gcp" or not cloud.gcs.bucket:
        raise ConfigError('objects in GCS need [cloud] provider = "gcp" and [cloud.gcs] bucket')
    return BucketObjectStore(GcsBucket(Gcp(cloud), cloud.gcs.bucket, cloud.gcs), cloud.gcs.prefix, ledger_pins(storage))
