"""The bucket and the queues of a campaign in the cloud: moto, one request at a time, behind a link that faults strike.

What is judged is read from moto itself, by boto3, which shares no code with the engine.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import ExitStack
from typing import Any

from blake3 import blake3
from moto_locked import REGION, aws_emulator
from moto_sqs import strict_sqs
from rollout.objects.place import MARKER

from chaos.links import Front, Link

PREFIX = "chaos/"


class BucketUnderTest:
    """`open`, then `sections` for coordinators; `close` always."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._stack = ExitStack()
        self._front: Front | None = None
        self.objects = 0

    async def open(self) -> None:
        self._stack.enter_context(strict_sqs())
        self._emulator = self._stack.enter_context(aws_emulator())
        self._name = self._emulator.bucket()
        host, _, port = self._emulator.endpoint.removeprefix("http://").rpartition(":")
        self._front = await Front("bucket", (host, int(port)), lambda *_: "everyone", self._dice).open()

    @property
    def links(self) -> list[Link]:
        assert self._front is not None, "open() first"
        return list(self._front.links.values())

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of a coordinator."""
        return {"cloud": self._cloud(), "cloud.s3": {"bucket": self._name, "prefix": PREFIX}}

    def _cloud(self) -> dict[str, Any]:
        assert self._front is not None, "open() first"
        return {"provider": "aws", "region": REGION, "endpoint_url": f"http://{self._front.address}"}

    def queue_of(self, rows: list[dict[str, Any]]) -> str:
        """The URL of a new queue that holds `rows`, a message each."""
        url = self._emulator.queue(VisibilityTimeout="30")
        for start in range(0, len(rows), 10):
            entries = [{"Id": str(row["n"]), "MessageBody": json.dumps(row)} for row in rows[start : start + 10]]
            assert not self._emulator.sqs.send_message_batch(QueueUrl=url, Entries=entries).get("Failed")
        return url

    def intake(self, queue_url: str, lease_s: int) -> dict[str, dict[str, Any]]:
        """Sections of a batch that takes its rows from there."""
        return {"cloud": self._cloud(), "cloud.sqs": {"queue_url": queue_url, "visibility_timeout_secs": lease_s}}

    def left(self, queue_url: str) -> int:
        """Messages that wait or are leased."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self._emulator.sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    async def judge(self) -> list[str]:
        """Objections: uploads that nobody ended, keys that are none of ours, bytes that are not what their key says."""
        return await asyncio.to_thread(self._judge)

    def _judge(self) -> list[str]:
        found = [f"the upload of {key} was not ended" for key in self._emulator.unfinished(self._name)]
        for key in self._emulator.keys(self._name):
            if key.startswith(f"{PREFIX}temp/") or key == PREFIX + MARKER:
                continue  # temp/: of a coordinator that was killed; swept when it is a day old
            digest = blake3(self._emulator.body(self._name, key)).hexdigest()
            self.objects += 1
            if key != f"{PREFIX}cas/{digest[:2]}/{digest[2:4]}/{digest}":
                found.append(f"the object {key} has the digest {digest}")
        if not self.objects:
            found.append("no object was kept in the bucket")
        return found

    async def close(self) -> None:
        if self._front is not None:
            await self._front.close()
        await asyncio.to_thread(self._stack.close)
