"""An attempt as a replica: the child's side of executors/port.py's Replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from rollout.wire.pieces import Assembly, pieces
from rollout.wire.v1 import common_pb2, work_pb2

from rollout_worker.executors.port import Attempt
from rollout_worker.processes.kinds import Kind


class RelayedReplica:
    """Replica over the pipe to the daemon. `send` writes a frame; `ended` is called when it is no longer a replica."""

    def __init__(self, send: Callable[[int, bytes], None], attempt: Attempt, ended: Callable[[], None]) -> None:
        self._send = send
        self._key = common_pb2.ReplicaKey(log=attempt.key.log, seq=attempt.key.seq, attempt=attempt.attempt)
        self._ended = ended
        self._channels: set[int] = set()
        self._assembly = Assembly[int]()
        self._arrived: asyncio.Queue[tuple[int, bytes | None]] = asyncio.Queue()
        self._takes = False

    async def __aenter__(self) -> RelayedReplica:
        self._takes = True
        self._announce()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._takes = False
        self._channels.clear()
        self._say(work_pb2.WorkUp(withdraw=work_pb2.Withdraw(replica=self._key)))
        self._ended()

    async def frames(self) -> AsyncIterator[tuple[int, bytes | None]]:
        while True:
            yield await self._arrived.get()

    def send(self, channel: int, data: bytes) -> None:
        cut = list(pieces(data))
        if channel in self._channels:
            for piece, more in cut:
                said = work_pb2.RelayData(replica=self._key, channel=channel, data=piece, more=more)
                self._say(work_pb2.WorkUp(said=said))

    def withdraw(self) -> None:
        if self._takes:
            self._takes = False
            self._say(work_pb2.WorkUp(withdraw=work_pb2.Withdraw(replica=self._key, draining=True)))

    def relayed(self, frame: work_pb2.WorkDown) -> None:
        """Take a frame of the daemon."""
        if frame.WhichOneof("body") == "heard":
            heard = frame.heard
            self._channels.add(heard.channel)
            whole = self._assembly.add(heard.channel, heard.data, heard.more)
            if whole is not None:
                self._arrived.put_nowait((heard.channel, whole))
            return
        channel = frame.hung_up.channel
        for gone in [channel] if channel else sorted(self._channels):
            if gone in self._channels:
                self._channels.discard(gone)
                self._assembly.forget(gone)
                self._arrived.put_nowait((gone, None))
        if not channel and self._takes:
            self._announce()

    def _announce(self) -> None:
        self._say(work_pb2.WorkUp(announce=work_pb2.Announce(replica=self._key)))

    def _say(self, frame: work_pb2.WorkUp) -> None:
        self._send(Kind.RELAY, frame.SerializeToString())
