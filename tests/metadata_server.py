"""Metadata services of EC2 and Compute Engine as small local servers, whose answers a test changes as it goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, dict[str, str], str]


@dataclass
class Served:
    """`silent`: takes connections and says nothing; `drips`: its answers never end; `broken`: the next so many requests
    are cut."""

    address: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list[Any])
    silent: bool = False
    drips: bool = False
    broken: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    async def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        raise NotImplementedError


@asynccontextmanager
async def serving(served: Served) -> AsyncIterator[Served]:
    tasks: set[asyncio.Task[Any]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await one(head.decode(), writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    async def one(head: str, writer: asyncio.StreamWriter) -> bool:
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        served.requests.append((method, path, headers))
        if served.silent:
            await asyncio.Event().wait()
        while served.drips:
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.02)
        if served.broken > 0:
            served.broken -= 1
            return False
        status, more, text = await served.answer(method, path, headers)
        more = {"Content-Length": str(len(text)), **more}
        writer.write("\r\n".join([f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in more.items()), "", text]).encode())
        await writer.drain()
        return True

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    served.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@dataclass
class Ec2(Served):
    token: str = "token-1"
    token_status: int = 200
    paths: dict[str, str] = field(
        default_factory=lambda: {
            "/latest/meta-data/instance-id": "i-1",
            "/latest/meta-data/instance-life-cycle": "spot",
            "/latest/dynamic/instance-identity/document": json.dumps(
                {"region": "us-west-2", "availabilityZone": "us-west-2b", "instanceType": "p5.48xlarge"}
            ),
        }
    )
    now: datetime = datetime(2030, 1, 1, 12, tzinfo=UTC)  # its clock, which is not this machine's

    def interrupt(self, in_s: float, action: str = "terminate") -> None:
        at = (self.now + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.paths["/latest/meta-data/spot/instance-action"] = json.dumps({"action": action, "time": at})

    async def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        date = {"Date": format_datetime(self.now, usegmt=True)}
        if (method, path) == ("PUT", "/latest/api/token"):
            return self.token_status, date, self.token
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, date, "Unauthorized"
        return (200, date, self.paths[path]) if path in self.paths else (404, date, "not found")


@dataclass
class Gce(Served):
    values: dict[str, str] = field(
        default_factory=lambda: {
            "instance/id": "7",
            "instance/zone": "projects/1/zones/us-central1-a",
            "instance/machine-type": "projects/1/machineTypes/a3-highgpu-8g",
            "instance/scheduling/preemptible": "TRUE",
            "instance/preempted": "FALSE",
            "instance/maintenance-event": "NONE",
        }
    )
    flavor: str = "Google"

    def set(self, path: str, value: str) -> None:
        self.values[path] = value
        self.change()

    async def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        assert headers.get("metadata-flavor") == "Google"
        parts = urlsplit(path)
        name = parts.path.removeprefix("/computeMetadata/v1/")
        query = parse_qs(parts.query)
        if "wait_for_change" in query:
            loop = asyncio.get_running_loop()
            ends = loop.time() + float(query["timeout_sec"][0])
            while self._etag(name) == query["last_etag"][0] and loop.time() < ends:
                event = self.changed
                try:
                    await asyncio.wait_for(event.wait(), ends - loop.time())
                except TimeoutError:
                    break
        more = {"Metadata-Flavor": self.flavor, "ETag": self._etag(name)}
        return (200, more, self.values[name]) if name in self.values else (404, more, "")

    def _etag(self, name: str) -> str:
        return self.values.get(name, "").encode().hex()
