"""The bucket of a campaign in the cloud: moto, which answers one request at a time, behind a link that faults strike.

What is judged is read from moto itself, by boto3, which shares no code with the engine.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import Any

from blake3 import blake3
from moto_locked import REGION, aws_emulator

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
        self._emulator = self._stack.enter_context(aws_emulator())
        self._name = self._emulator.bucket()
        host, _, port = self._emulator.endpoint.removeprefix("http://").rpartition(":")
        self._front = await Front("bucket", (host, int(port)), lambda *_: "coordinators", self._dice).open()

    @property
    def links(self) -> list[Link]:
        assert self._front is not None, "open() first"
        return list(self._front.links.values())

    def sections(self) -> dict[str, dict[str, Any]]:
        assert self._front is not None, "open() first"
        cloud = {"provider": "aws", "region": REGION, "endpoint_url": f"http://{self._front.address}"}
        return {"cloud": cloud, "cloud.s3": {"bucket": self._name, "prefix": PREFIX}}

    async def judge(self) -> list[str]:
        """Objections: uploads that nobody ended, keys that are none of ours, bytes that are not what their key says."""
        return await asyncio.to_thread(self._judge)

    def _judge(self) -> list[str]:
        found = [f"the upload of {key} was not ended" for key in self._emulator.unfinished(self._name)]
        for key in self._emulator.keys(self._name):
            if key.startswith(f"{PREFIX}temp/"):
                continue  # of a coordinator that was killed; swept when it is a day old
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
