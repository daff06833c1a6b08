"""The Work stream of a worker: frames become events, in order, and sends of the core go out in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import structlog
from rollout.model.errors import InputError, ProtocolError, RolloutError, UnavailableError
from rollout.model.ids import is_ulid
from rollout.security.roles import Peer, Role
from rollout.wire.frames import frames_of, joined
from rollout.wire.v1 import work_pb2, work_pb2_grpc

from rollout_coordinator.core.events import WorkerGone, WorkerResults, WorkerSpawn
from rollout_coordinator.driver import Driver
from rollout_coordinator.leadership import Gate, address_of, read
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.relay import Relay, ReplicaId
from rollout_coordinator.sessions import Router, Session
from rollout_coordinator.work_codec import down_frames, event_objects, hello_event, up_event

log = structlog.get_logger()

RELAYED = frozenset({"announce", "withdraw", "said"})


class WorkService(work_pb2_grpc.WorkServicer):
    """One coroutine reads (and so feels the driver's backpressure), one writes; the first to end ends the call."""

    def __init__(
        self, gate: Gate, driver: Driver, router: Router, objects: ObjectsGate, relay: Relay, cluster: str
    ) -> None:
        self._gate = gate
        self._driver = driver
        self._router = router
        self._relay = relay
        self._objects = objects
        self._cluster = cluster
        self.objects_addr = ""

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        async with self._gate.answering(context):
            session, peer, first = await self._open(context)
            # Not with the first write: it may be cancelled half-way below, and a status that finds these headers on
            # their way, but not noted as sent, is refused by grpc. The worker would wait for its stream's end for ever.
            await context.send_initial_metadata(())
            self._router.register(session)
            tasks: list[asyncio.Task[None]] = []
            try:
                await self._driver.submit(hello_event(first, peer.host_id, address_of(context.peer())))
                tasks.append(asyncio.create_task(self._read(session, peer, first, context)))
                tasks.append(asyncio.create_task(self._write(session, context)))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if tasks[0] in done and tasks[0].exception() is None:
                    session.outbox.close(UnavailableError("The worker closed its stream."))
                    await tasks[1]  # what is queued still goes out
                    return
                for task in done:
                    task.result()
                raise session.outbox.closed or UnavailableError("The stream ended.")
            finally:
                await self._close(session, tasks)

    async def _open(self, context: Any) -> tuple[Session, Peer, work_pb2.WorkUp]:
        first: work_pb2.WorkUp | None = await read(context)
        if first is None:
            raise ProtocolError("The stream ended before its Hello.")
        self._gate.check(first)
        if first.WhichOneof("body") != "hello":
            raise ProtocolError(f"The first frame must be Hello, not {first.WhichOneof('body')}.")
        if not is_ulid(first.session):
            raise ProtocolError("Hello needs a session: a fresh ULID for each stream.")
        peer = self._gate.peer(context, Role.WORKER, id=first.hello.incarnation)
        return Session(first.session, first.hello.incarnation), peer, first

    async def _close(self, session: Session, tasks: list[asyncio.Task[None]]) -> None:
        self._router.unregister(session)
        self._relay.session_ended(session)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RolloutError):  # not serving: there is nobody to tell
            self._driver.submit_nowait(WorkerGone(session.id))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: Session, peer: Peer, first: work_pb2.WorkUp, context: Any) -> None:
        frames = frames_of(first)[1:]
        while True:
            for frame in frames:
                await self._frame(session, peer, frame)
            message = await read(context)
            if message is None:
                return
            frames = frames_of(message)

    async def _frame(self, session: Session, peer: Peer, frame: work_pb2.WorkUp) -> None:
        self._gate.check(frame)
        if frame.session != session.id:
            raise ProtocolError(f"Frame of session {frame.session!r} on the stream of {session.id}.")
        self._gate.check_host(peer)
        if frame.WhichOneof("body") in RELAYED:
            await self._relayed(session, frame)
            return
        event = up_event(frame)
        if isinstance(event, WorkerResults):
            await self._objects.check_results(event)
        elif isinstance(event, WorkerSpawn):
            try:
                await self._objects.check_payloads(event_objects(event))
            except InputError as error:  # of one item's code: not a reason to end its worker's stream
                event.missing = error.message
        await self._driver.submit(event)

    async def _relayed(self, session: Session, frame: work_pb2.WorkUp) -> None:
        """Relay data. Nothing of it enters the core, but the worker must have the attempt."""
        kind = frame.WhichOneof("body")
        if kind == "said":
            self._relay.from_replica(session, frame.said)
        elif kind == "withdraw":
            self._relay.withdraw(session, ReplicaId.of(frame.withdraw.replica), draining=frame.withdraw.draining)
        else:
            said = frame.announce
            id = ReplicaId.of(said.replica)
            held = await self._driver.query(lambda core, now: core.in_flight(id.log, [id.seq]))
            run_ids = [one.run_id for one in held if (one.worker, one.attempt) == (session.incarnation, id.attempt)]
            if run_ids == [said.run_id]:
                self._relay.announce(session, said.run_id, id, said.engine)
            else:
                log.warning("replica_refused", worker=session.incarnation, run_id=said.run_id, replica=tuple(id))

    async def _write(self, session: Session, context: Any) -> None:
        while (send := await session.outbox.take()) is not None:
            for message in joined(self._frames(session, send)):
                await context.write(message)

    def _frames(self, session: Session, send: Any) -> Iterator[work_pb2.WorkDown]:
        """Yield the frames of `send` and of everything queued behind it."""
        while send is not None:
            relayed = isinstance(send, work_pb2.WorkDown)
            for frame in (send,) if relayed else down_frames(send, self._cluster, self.objects_addr):
                frame.epoch = self._gate.epoch
                frame.session = session.id
                yield frame
            send = session.outbox.take_nowait()
