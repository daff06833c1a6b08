"""Facts about an object in S3's answers."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from rollout.cloud.aws_errors import headers_of
from rollout.cloud.bucket import Blob


def etag(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def written_blob(key: str, size: int, answer: dict[str, Any]) -> Blob:
    """Return the blob of a write's answer, which lacks the object's date."""
    return Blob(key, size, etag(answer), answered_ms(answer))


def answered_ms(answer: dict[str, Any]) -> int:
    """Return the time by the service's clock."""
    date = headers_of(answer).get("date", "")
    return ms(parsedate_to_datetime(date) if date else datetime.now().astimezone())


def ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)
