"""Worker services for an attempt: the child's side of executors/port.py's Context."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.config.logging import redact_text
from rollout.model.errors import AttemptError, StateError
from rollout.model.item import INLINE_MAX, Blob, Failure, NewItem, ObjectSlice, Outcome
from rollout.wire.codec import failures_from_wire, item_batch_to_wire, unpack_blobs
from rollout.wire.v1 import work_pb2

from rollout_worker.executors.port import Attempt, Child
from rollout_worker.processes.kinds import Kind
from rollout_worker.processes.replica import RelayedReplica
from rollout_worker.sandboxes import trees

SPAWN_BYTES = 800 << 10
SPAWN_ITEMS = 2048
PROGRESS_EVERY_S = 0.5


class Requests:
    """Questions to the daemon, which does all I/O with other machines."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self.send = send
        self._next = 0
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, op: str, **arguments: Any) -> Any:
        """Ask the daemon. Raises AttemptError with the daemon's reason."""
        self._next += 1
        number = self._next
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            self.send(Kind.REQUEST, json.dumps({"id": number, "op": op, **arguments}).encode())
            return await future
        finally:
            self._open.pop(number, None)

    def answered(self, body: bytes) -> None:
        reply = json.loads(body)
        future = self._open.get(reply["id"])
        if future is None or future.done():
            return
        error = reply.get("error")
        if error is None:
            future.set_result(reply.get("value"))
        else:
            future.set_exception(AttemptError(error["message"], code=error["code"], retry=error["retryable"]))


class AttemptContext:
    """Context of an attempt; `attempt` is None during an executor's start."""

    def __init__(
        self, requests: Requests, scratch: Path, attempt: Attempt | None, waits: Callable[[int], None]
    ) -> None:
        self._requests = requests
        self._scratch = scratch
        self._made = False
        self._attempt = attempt
        self._waits = waits  # +1: this attempt waits, its slot is free; -1: it goes on
        self._spawned = False
        self._children: dict[int, Child] = {}
        self._complete = False
        self._resumed: asyncio.Event | None = None
        self._arrived = asyncio.Event()
        self._hindered = False
        self._told = 0.0
        self._said: work_pb2.Progress | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._uploads = 0
        self._replica: RelayedReplica | None = None

    @property
    def number(self) -> int:
        """Number of the attempt, 0 during a start."""
        return self._attempt.attempt if self._attempt is not None else 0

    @property
    def scratch(self) -> Path:
        if not self._made:
            self._scratch.mkdir(parents=True, exist_ok=True)
            self._made = True
        return self._scratch

    async def close(self) -> None:
        """Remove the scratch directory. Raises OSError if something remains."""
        self.hindered("")
        if self._telling is not None:
            self._telling.cancel()
            self._tell()
        if self._made:
            await asyncio.to_thread(trees.remove, str(self._scratch))

    def progress(self, note: str, **figures: float | str | None) -> None:
        if self._attempt is None:
            return
        self._said = work_pb2.Progress(
            note=note[:1000], figures=json.dumps(figures, allow_nan=False).encode() if figures else b""
        )
        if self._telling is None:
            wait = max(0.0, self._told + PROGRESS_EVERY_S - time.monotonic())
            self._telling = asyncio.get_running_loop().call_later(wait, self._tell)

    def _tell(self) -> None:
        """Send the last progress since the previous call."""
        self._telling = None
        message, attempt = self._said, self._attempt
        if message is None or attempt is None:
            return
        self._said, self._told = None, time.monotonic()
        message.keys.add(log=attempt.key.log, seq=[attempt.key.seq], attempt=[attempt.attempt])
        self._requests.send(Kind.PROGRESS, message.SerializeToString())

    def hindered(self, message: str, *, code: str = "") -> None:
        if self._attempt is not None and (message or self._hindered):
            self._hindered = bool(message)
            self._requests.send(Kind.HINDERED, hindrance(self._attempt, Failure(code, message, True), returned=False))

    # ---- objects

    async def put_object(self, data: bytes | Path) -> bytes:
        if isinstance(data, Path):
            return bytes.fromhex(await self._requests.ask("put", path=str(Path.cwd() / data)))
        self._uploads += 1
        path = (self.scratch / f".upload-{self._uploads}").absolute()
        await asyncio.to_thread(path.write_bytes, data)
        try:
            return bytes.fromhex(await self._requests.ask("put", path=str(path)))
        finally:
            path.unlink(missing_ok=True)

    async def object_path(self, object_id: bytes) -> Path:
        return Path(await self._requests.ask("path", object_id=object_id.hex()))

    async def get_object(self, blob: Blob) -> bytes:
        if isinstance(blob, bytes):
            return blob
        path = await self.object_path(blob.object_id)
        return await asyncio.to_thread(_read, path, blob.offset, blob.length)

    # ---- plugins

    async def call_plugin(
        self, name: str, method: str, payload: dict[str, Any] | bytes, timeout_s: float = 60.0
    ) -> Any:
        body = {"b64": base64.b64encode(payload).decode()} if isinstance(payload, bytes) else {"json": payload}
        value = await self._requests.ask("plugin", name=name, method=method, payload=body, timeout_s=timeout_s)
        return base64.b64decode(value["b64"]) if "b64" in value else value["json"]

    # ---- children

    async def spawn(
        self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, keeps: Sequence[bytes] = (),
        lets_go: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        attempt = self._running("spawn")
        if keeps or lets_go:  # before the children: what they need is there as long as they are
            self._spawn(attempt, first_ordinal, [], seal=False, keeps=keeps, lets_go=lets_go)
        ready: list[NewItem] = []
        size = 0
        ordinal = first_ordinal
        for item in items:
            payload = item.payload
            if isinstance(payload, bytes) and len(payload) > INLINE_MAX:
                payload = ObjectSlice(await self.put_object(payload), 0, len(payload))
            cost = 128 + (len(payload) if isinstance(payload, bytes) else 0)
            if ready and (size + cost > SPAWN_BYTES or len(ready) >= SPAWN_ITEMS):
                self._spawn(attempt, ordinal, ready, seal=False)
                ordinal += len(ready)
                ready, size = [], 0
            ready.append(NewItem(item.id, payload, item.spec))
            size += cost
        if ready or seal:
            self._spawn(attempt, ordinal, ready, seal=seal)

    def _spawn(
        self, attempt: Attempt, ordinal: int, items: list[NewItem], *, seal: bool, keeps: Sequence[bytes] = (),
        lets_go: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        message = work_pb2.Spawn(
            log=attempt.key.log,
            seq=attempt.key.seq,
            attempt=attempt.attempt,
            items=item_batch_to_wire(ordinal, items),
            seal=seal,
            keeps=keeps,
            lets_go=lets_go,
        )
        self._requests.send(Kind.SPAWN, message.SerializeToString())

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        attempt = self._running("children")
        at = from_child
        while True:
            while (child := self._children.pop(at, None)) is not None:
                at += 1
                yield child
            if self._complete:
                return
            key = attempt.key
            waiting = work_pb2.Waiting(
                log=key.log, seq=key.seq, attempt=attempt.attempt, from_child=at, holds=holds_slot
            )  # fmt: skip
            if holds_slot:
                self._arrived.clear()
                self._requests.send(Kind.WAITING, waiting.SerializeToString())
                await self._arrived.wait()
                continue
            self._resumed = asyncio.Event()
            self._requests.send(Kind.WAITING, waiting.SerializeToString())
            self._waits(1)
            try:
                await self._resumed.wait()
            finally:
                self._waits(-1)

    def resumed(self) -> None:
        if self._resumed is not None:
            self._resumed.set()

    async def take_children(self, message: work_pb2.ChildResults) -> None:
        """Take results of children as they come from the coordinator; large ones are read first."""
        blobs = unpack_blobs(message.length, message.data, message.refs)
        failures = failures_from_wire(message.errors)
        for i, (outcome, blob) in enumerate(zip(message.outcome, blobs, strict=True)):
            ordinal = message.from_child + i
            data = await self.get_object(blob)
            self._children[ordinal] = Child(ordinal, Outcome(outcome), data, failures.get(i))
        self._complete = self._complete or message.complete
        self._arrived.set()

    # ---- replicas

    def replica(self) -> RelayedReplica:
        attempt = self._running("be a replica")
        if self._replica is not None:
            raise StateError("this attempt is a replica already")
        self._replica = RelayedReplica(self._requests.send, attempt, self._replica_ended)
        return self._replica

    def _replica_ended(self) -> None:
        self._replica = None

    def relayed(self, frame: work_pb2.WorkDown) -> None:
        """Pass a gateway's frame to the replica."""
        if self._replica is not None:
            self._replica.relayed(frame)

    def _running(self, what: str) -> Attempt:
        if self._attempt is None:
            raise StateError(f"an executor's start has no item, so it cannot {what}")
        return self._attempt


def hindrance(attempt: Attempt, failure: Failure, *, returned: bool) -> bytes:
    said = {"log": attempt.key.log, "seq": attempt.key.seq, "attempt": attempt.attempt, "returned": returned}
    why = {"code": failure.code, "message": redact_text(failure.message), "retryable": failure.retryable}
    return json.dumps(said | why).encode()


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise AttemptError(f"object {path.name} is shorter than the slice that refers to it", code="object_corrupt")
    return data
