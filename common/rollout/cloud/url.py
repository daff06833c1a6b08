"""`s3://bucket/key` and `gs://bucket/key`, as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from rollout.model.errors import ConfigError

Scheme = Literal["s3", "gs"]
_URL = re.compile(r"([A-Za-z][A-Za-z0-9]*)://([^/]*)(?:/(.*))?", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
_MEANT = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """URL of a bucket or an object. `key` may be empty (the whole bucket) and may end with a slash."""

    scheme: Scheme
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def at(self, key: str) -> BucketUrl:
        return BucketUrl(self.scheme, self.bucket, key)

    @property
    def directory(self) -> BucketUrl:
        """URL with one slash at its end, unless it is the bucket itself; keys below it begin with its key."""
        key = self.key.rstrip("/")
        return self.at(f"{key}/" if key else "")

    @property
    def name(self) -> str:
        """Last part of its key, or the bucket's name."""
        return self.key.rstrip("/").rpartition("/")[2] or self.bucket


def has_wildcard(key: str) -> bool:
    return any(letter in key for letter in "*?[")


def parse_url(text: str) -> BucketUrl | None:
    """Parse a URL. Returns None if it names no bucket. Raises ConfigError, with the correct form, if it only looks like
    one."""
    found = _URL.fullmatch(text)
    if found is None:
        return None
    scheme, bucket, key = found[1], found[2], found[3] or ""
    meant = _MEANT.get(scheme.lower(), scheme.lower())
    if meant not in ("s3", "gs"):
        return None
    if meant != scheme:
        raise ConfigError(f"{text}: write {meant}://{bucket}/{key}")
    if not bucket:
        raise ConfigError(f"{text} names no bucket: write {scheme}://BUCKET/KEY")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{text}: {bucket!r} is no name of a bucket: write {scheme}://BUCKET/KEY")
    return BucketUrl(cast(Scheme, scheme), bucket, key)
