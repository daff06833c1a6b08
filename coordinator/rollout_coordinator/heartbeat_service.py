"""Heartbeats of workers, and commands for a whole worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.security.roles import Peer, Role
from rollout.wire.v1 import control_pb2, control_pb2_grpc, heartbeat_pb2, heartbeat_pb2_grpc

from rollout_coordinator.clock import Clock
from rollout_coordinator.core.events import WorkerBeat
from rollout_coordinator.core.step import SendControl
from rollout_coordinator.driver import Driver
from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.leadership import Gate, read
from rollout_coordinator.sessions import Outbox, Router

ACK_INTERVAL_S = 1.25
"""Every third beat at the default interval, and before a worker with default settings asks. A whole number of intervals
would sometimes miss its beat by a millisecond."""

Told = Callable[[], Sequence[str]]
"""Returns the addresses of all coordinators, for callers that may need another one."""

_STATES = {
    heartbeat_pb2.WORKER_STATE_INIT: "joining",
    heartbeat_pb2.WORKER_STATE_READY: "ready",
    heartbeat_pb2.WORKER_STATE_DRAINING: "draining",
    heartbeat_pb2.WORKER_STATE_FENCED: "fenced",
}


class HeartbeatService(heartbeat_pb2_grpc.HeartbeatServicer):
    """A beat costs a read and a dict entry; the core gets the newest beat of each worker, all at once."""

    def __init__(
        self, gate: Gate, driver: Driver, router: Router, clock: Clock, metrics: Metrics, told: Told = tuple
    ) -> None:
        self._gate = gate
        self._driver = driver
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._told = told

    async def Beats(self, request_iterator: Any, context: Any) -> None:
        async with self._gate.answering(context):
            peer: Peer | None = None
            acked_at = 0.0
            while (beat := await read(context)) is not None:
                now = self._clock.now().mono
                self._gate.check(beat)
                if peer is None or peer.id != beat.incarnation:
                    peer = self._gate.peer(context, Role.WORKER, id=beat.incarnation)
                self._feed(beat, peer, now)
                if now - acked_at >= ACK_INTERVAL_S:
                    acked_at = now
                    self._gate.check_host(peer)
                    self._check_standing(beat)
                    await context.write(self._ack(beat))

    async def Beat(self, request: heartbeat_pb2.BeatUp, context: Any) -> heartbeat_pb2.BeatAck:
        async with self._gate.answering(context):
            now = self._clock.now().mono
            self._gate.check(request)
            peer = self._gate.peer(context, Role.WORKER, id=request.incarnation)
            self._feed(request, peer, now)
            self._check_standing(request)
        return self._ack(request)

    def _feed(self, beat: heartbeat_pb2.BeatUp, peer: Peer, read_at: float) -> None:
        self._metrics.beats.inc()
        state = _STATES.get(beat.state, "ready")
        self._driver.beat(
            WorkerBeat(
                beat.incarnation, peer.host_id, read_at, state, beat.load, beat.running, beat.cpu_percent,
                beat.memory_mib,
            )
        )  # fmt: skip

    def _check_standing(self, beat: heartbeat_pb2.BeatUp) -> None:
        """Raise an error for a quarantined worker: an answer would extend its fence, which it must reach."""
        error = self._driver.quarantine_error(beat.incarnation)
        if error is not None:
            raise error

    def _ack(self, beat: heartbeat_pb2.BeatUp) -> heartbeat_pb2.BeatAck:
        known = self._router.has_worker(beat.incarnation)
        epoch, told = self._gate.epoch, self._told()
        return heartbeat_pb2.BeatAck(epoch=epoch, number=beat.number, known=known, coordinators=told)


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(self, gate: Gate, router: Router) -> None:
        self._gate = gate
        self._router = router

    async def Subscribe(self, request: control_pb2.SubscribeRequest, context: Any) -> None:
        async with self._gate.answering(context):
            self._gate.check(request)
            self._gate.peer(context, Role.WORKER, id=request.incarnation)
            outbox = Outbox()
            self._router.subscribe(request.incarnation, outbox)
            try:
                await context.send_initial_metadata(())
                while (send := await outbox.take()) is not None:
                    await context.write(self._command(send))
                if outbox.closed is not None:
                    raise outbox.closed
            finally:
                self._router.unsubscribe(request.incarnation, outbox)

    def _command(self, send: SendControl) -> control_pb2.ControlCommand:
        command = control_pb2.ControlCommand(epoch=self._gate.epoch)
        if send.verb == "drain":
            budget = int(send.argument) if send.argument.isdecimal() else 0
            command.drain.CopyFrom(control_pb2.Drain(budget_ms=budget, reason=send.reason))
        elif send.verb == "reload":
            command.reload.CopyFrom(control_pb2.ReloadPlugins(names=[n for n in send.argument.split(",") if n]))
        else:
            command.log_level.CopyFrom(control_pb2.SetLogLevel(level=send.argument))
        return command
