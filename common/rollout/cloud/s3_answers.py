"""What the answers of S3 say of an object."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from rollout.cloud.aws_errors import headers_of
from rollout.cloud.bucket import Blob


def etag(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def written_blob(key: str, size: int, answer: dict[str, Any]) -> Blob:
    """Of the answer to a write, which has no date of the object."""
    return Blob(key, size, etag(answer), answered_ms(answer))


def answered_ms(answer: dict[str, Any]) -> int:
    """The service's clock, not this machine's."""
    date = headers_of(answer).get("date", "")
    return ms(parsedate_to_datetime(date) if date else datetime.now().astimezone())


def ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)
