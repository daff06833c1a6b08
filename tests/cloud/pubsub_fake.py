"""Pub/Sub in a few lines, for what Google's emulator does not do: exactly-once delivery, failures, time that passes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from rollout.config.cloud import CloudSection

PROJECT = "rollout-tests"


@dataclass
class Stored:
    message: dict[str, Any]
    deliveries: int = 0
    until: float = 0.0
    ack_id: str = ""


@dataclass
class FakePubsub:
    """One topic "t" with one subscription "s", `config`.

    `denied`: verbs that are answered with 403. `faults`: verb to answers, used up one a call: a status, or what becomes
    of single ids as in `{"index": 0, "why": "TRANSIENT_FAILURE_X"}`. `twice`: every pull delivers what is held, too.
    """

    endpoint: str = ""
    config: dict[str, Any] = field(default_factory=lambda: {"topic": "t", "ackDeadlineSeconds": 10})
    denied: set[str] = field(default_factory=set)
    faults: dict[str, list[Any]] = field(default_factory=dict)
    twice: bool = False
    hang_s: float = 5.0
    offset_s: float = 0.0
    calls: list[str] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def cloud(self) -> CloudSection:
        given = {"provider": "gcp", "project": PROJECT, "pubsub": {"endpoint_url": self.endpoint}}
        return CloudSection.model_validate(given)

    def now(self) -> float:
        return time.monotonic() + self.offset_s

    async def pass_time(self, seconds: float) -> None:
        self.offset_s += seconds
        async with self.changed:
            self.changed.notify_all()

    async def handle(self, request: web.Request) -> web.Response:
        verb = request.path.rpartition(":")[2] if ":" in request.path.rpartition("/")[2] else "get"
        self.calls.append(verb)
        if verb in self.denied:
            return failure(403, "PERMISSION_DENIED", f"not allowed: {verb}")
        fault = self.faults[verb].pop(0) if self.faults.get(verb) else None
        if isinstance(fault, int):
            return failure(fault, "UNAVAILABLE", "the service is not well")
        if not request.path.split(":")[0].endswith(("/topics/t", "/subscriptions/s")):
            return failure(404, "NOT_FOUND", f"Resource not found (resource={request.path})")
        body = await request.json() if request.can_read_body else {}
        return await getattr(self, verb)(body, fault)

    async def get(self, body: Any, fault: Any) -> web.Response:
        return web.json_response(self.config)

    async def publish(self, body: Any, fault: Any) -> web.Response:
        ids: list[str] = []
        for message in body["messages"]:
            ids.append(str(next(self.numbers)))
            self.stored.append(Stored({**message, "messageId": ids[-1]}))
        async with self.changed:
            self.changed.notify_all()
        return web.json_response({"messageIds": ids})

    async def pull(self, body: Any, fault: Any) -> web.Response:
        until = time.monotonic() + (0.0 if body.get("returnImmediately") else self.hang_s)
        while True:
            ready = [s for s in self.stored if (self.twice or s.until <= self.now()) and not self._blocked(s)]
            if ready or time.monotonic() >= until:
                return web.json_response({"receivedMessages": [self._deliver(s) for s in ready[: body["maxMessages"]]]})
            try:
                async with asyncio.timeout_at(until), self.changed:
                    await self.changed.wait()
            except TimeoutError:
                pass

    def _blocked(self, stored: Stored) -> bool:
        key = stored.message.get("orderingKey")
        before = itertools.takewhile(lambda s: s is not stored, self.stored)
        ordered = key and self.config.get("enableMessageOrdering")
        return bool(ordered) and any(s.until > self.now() and s.message.get("orderingKey") == key for s in before)

    def _deliver(self, stored: Stored) -> dict[str, Any]:
        stored.deliveries += 1
        stored.until = self.now() + self.config["ackDeadlineSeconds"]
        stored.ack_id = f"ack-{next(self.numbers)}"
        told = {"ackId": stored.ack_id, "message": stored.message}
        return {**told, "deliveryAttempt": stored.deliveries} if "deadLetterPolicy" in self.config else told

    async def acknowledge(self, body: Any, fault: Any) -> web.Response:
        return await self._settle(body, fault, self.stored.remove)

    async def modifyAckDeadline(self, body: Any, fault: Any) -> web.Response:
        seconds = body["ackDeadlineSeconds"]
        assert seconds == 0 or 10 <= seconds <= 600

        def extend(stored: Stored) -> None:
            stored.until = self.now() + seconds

        return await self._settle(body, fault, extend)

    async def _settle(self, body: Any, fault: Any, do: Any) -> web.Response:
        failed = {body["ackIds"][fault["index"]]: fault["why"]} if fault else {}
        for ack_id in body["ackIds"]:
            held = next((s for s in self.stored if s.ack_id == ack_id and s.until > self.now()), None)
            if held is None:
                failed.setdefault(ack_id, "PERMANENT_FAILURE_INVALID_ACK_ID")
            elif ack_id not in failed:
                do(held)
        async with self.changed:
            self.changed.notify_all()
        if failed and self.config.get("enableExactlyOnceDelivery"):
            return failure(400, "FAILED_PRECONDITION", "Some acknowledgement ids failed", failed)
        return web.json_response({})


def failure(status: int, reason: str, message: str, metadata: dict[str, str] | None = None) -> web.Response:
    error: dict[str, Any] = {"code": status, "status": reason, "message": message}
    if metadata:
        kind = "type.googleapis.com/google.rpc.ErrorInfo"
        error["details"] = [{"@type": kind, "reason": reason, "metadata": metadata}]
    return web.json_response({"error": error}, status=status)


@asynccontextmanager
async def fake_pubsub() -> AsyncIterator[FakePubsub]:
    fake = FakePubsub()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()
