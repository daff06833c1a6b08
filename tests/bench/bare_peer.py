"""The least that could move payloads: a bare store behind a bare mTLS stream, in three processes.

A producer streams bytes to the server, which makes them durable in the same object store as the engine uses, and a
consumer reads them back from there as they arrive. No ledger, no items, no assignments.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from blake3 import blake3
from rollout.client.runs import new_ulid
from rollout.config.cloud import CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.objects.fs import open_store
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire.channel import SERVER_OPTIONS, open_channel

CHUNK = 512 << 10  # of a message, as the engine's object service has it
PACK = 8 << 20  # of an object, as the engine packs payloads
SERVICE = "bare.Store"


async def credentials(tls_dir: Path, role: Role) -> Credentials:
    addresses = ["127.0.0.1"] if role is Role.COORDINATOR else []
    return await Credentials.obtain(
        tls_dir=tls_dir, cluster="rollout", role=role, incarnation=new_ulid(), lifetime_s=3600.0, addresses=addresses
    )


class Store:
    """Put: a stream of chunks, durable when it is answered. Get: what is put meanwhile, object by object."""

    def __init__(self, path: Path) -> None:
        self._store = open_store(ObjectsSection(backend="fs", path=str(path)), StorageSection(), CloudSection())
        self._stored: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def open(self) -> None:
        await self._store.open()

    async def put(self, chunks: AsyncIterator[bytes], context: Any) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size >= PACK:
                await self._keep(parts)
                parts, size = [], 0
        if parts:
            await self._keep(parts)
        await self._stored.put(None)
        return b"stored"

    async def _keep(self, parts: list[bytes]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        name = blake3(b"".join(parts)).digest()
        await self._store.put(name, pieces(), sum(map(len, parts)))
        await self._stored.put(name)

    async def get(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        while (name := await self._stored.get()) is not None:
            async for chunk in self._store.get(name):
                yield chunk


async def serve(root: Path) -> None:
    store = Store(root / "objects")
    await store.open()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {
        "Put": grpc.stream_unary_rpc_method_handler(store.put),
        "Get": grpc.unary_stream_rpc_method_handler(store.get),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    owned = await credentials(root / "tls", Role.COORDINATOR)
    port = server.add_secure_port("127.0.0.1:0", owned.server_credentials())
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await server.wait_for_termination()


async def consume(root: Path, address: str) -> None:
    """Prints, for each line on standard input, when the last byte was there."""
    async with open_channel(address, await credentials(root / "tls", Role.WORKER)) as channel:
        get = channel.unary_stream(f"/{SERVICE}/Get")
        print(json.dumps({"ready": 1}), flush=True)
        while (await asyncio.to_thread(sys.stdin.readline)).strip():
            size = 0
            async for chunk in get(b""):
                size += len(chunk)
            print(json.dumps({"at": time.monotonic(), "bytes": size}), flush=True)


class Peer:
    """`run(bytes)` gives seconds from the first byte sent until all are durable and read back."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._server = self._start("serve")
        self._address = f"127.0.0.1:{self._answer(self._server)['port']}"
        self._consumer = self._start("consume", self._address)
        self._answer(self._consumer)

    def _start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, words[0], str(self._root), *words[1:]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"'):  # not what it logs
                return json.loads(line)
        raise RuntimeError(f"the bare peer ended with {process.wait()}")

    async def run(self, size: int, payload: bytes) -> float:
        assert self._consumer.stdin is not None
        self._consumer.stdin.write("go\n")
        self._consumer.stdin.flush()
        async with open_channel(self._address, await credentials(self._root / "tls", Role.OPERATOR)) as channel:
            await channel.channel_ready()
            began = time.monotonic()
            count = size // len(payload)

            async def chunks() -> AsyncIterator[bytes]:
                per = CHUNK // len(payload)
                for at in range(0, count, per):
                    rows = range(at, min(count, at + per))
                    yield b"".join(n.to_bytes(8, "big") + payload[8:] for n in rows)

            await channel.stream_unary(f"/{SERVICE}/Put")(chunks())
            done = time.monotonic()
            answer = await asyncio.to_thread(self._answer, self._consumer)
        if answer["bytes"] != count * len(payload):
            raise RuntimeError(f"the bare peer read {answer['bytes']} bytes of {count * len(payload)}")
        return max(done, answer["at"]) - began

    def close(self) -> None:
        for process in (self._consumer, self._server):
            process.terminate()
            process.wait(timeout=20)


if __name__ == "__main__":
    verb, at = sys.argv[1], Path(sys.argv[2])
    asyncio.run(serve(at) if verb == "serve" else consume(at, sys.argv[3]))
