"""Which calls to providers were made: each must have a row in deploy/iam.yaml, and each row a call.

Hooked into botocore's one door for calls, and into that of `Gcp`. Programs that a test starts are not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiobotocore.client import AioBaseClient
from iam_page import Table
from rollout.cloud.gcp import Gcp

_OBJECT = r"/storage/v1/b/[^/]+/o"
_SUBSCRIPTION = r"/v1/projects/[^/]+/subscriptions/[^/:]+"
_TOPIC = r"/v1/projects/[^/]+/topics/[^/:]+"
_GCP = [
    ("GET", r"/storage/v1/b/[^/]+", "storage.buckets.get"),
    ("GET", _OBJECT, "storage.objects.list"),
    ("GET", rf"(/download)?{_OBJECT}/[^/]+", "storage.objects.get"),
    ("DELETE", rf"{_OBJECT}/[^/]+", "storage.objects.delete"),
    ("POST|PUT|DELETE", rf"/upload{_OBJECT}", "storage.objects.insert"),
    ("POST", rf"{_OBJECT}/[^/]+/rewriteTo/b/[^/]+/o/[^/]+", "storage.objects.rewrite"),
    ("GET", _SUBSCRIPTION, "pubsub.projects.subscriptions.get"),
    ("GET", _TOPIC, "pubsub.projects.topics.get"),
    ("POST", rf"{_SUBSCRIPTION}:\w+", "pubsub.projects.subscriptions."),
    ("POST", rf"{_TOPIC}:\w+", "pubsub.projects.topics."),
    (
        "GET",
        r"/v1/projects/[^/]+/secrets/[^/]+/versions/[^/]+:access",
        "secretmanager.projects.secrets.versions.access",
    ),
]
"""Paths of the REST interfaces, as Google's references of the methods have them. An upload's session belongs to the
insert that began it."""


def gcp_call(method: str, url: str) -> str:
    """The method's name, or what was sent, which has no row."""
    path = urlsplit(url).path
    for methods, pattern, name in _GCP:
        if method in methods.split("|") and re.fullmatch(pattern, path):
            return name + path.rpartition(":")[2] if name.endswith(".") else name
    return f"{method} {path}"


class Calls:
    """`made`: their names. `lost`: of those the answer is dropped, once each, after the service gave it."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.lost: dict[str, Callable[[], Exception]] = {}
        table = Table()
        self._rows = {row.call for rows in table.rows.values() for row in rows}

    def note(self, call: str) -> None:
        self.made.add(call)
        assert call in self._rows, f"{call} has no row in deploy/iam.yaml: say there what it needs and who makes it"


@contextmanager
def recorded() -> Iterator[Calls]:
    calls = Calls()
    send, stream = AioBaseClient._make_api_call, Gcp.stream

    async def sent(self: Any, operation_name: str, api_params: Any) -> Any:
        call = f"{self.meta.service_model.service_name}.{operation_name}"
        calls.note(call)
        answer = await send(self, operation_name, api_params)
        if call in calls.lost:
            raise calls.lost.pop(call)()
        return answer

    def streamed(self: Gcp, method: str, url: str, **more: Any) -> Any:
        if not urlsplit(url).path.startswith("/computeMetadata"):
            calls.note(gcp_call(method, url))
        return stream(self, method, url, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AioBaseClient, "_make_api_call", sent)
        patch.setattr(Gcp, "stream", streamed)
        yield calls
