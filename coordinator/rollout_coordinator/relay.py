"""Relays requests of gateways to replicas, and their answers, in memory. Pure except for the outboxes it fills.

A replica is an attempt that its worker announced, and belongs to the Work stream of that announcement. A channel is an
open stream of a gateway, which reaches the replicas of one run. Nothing is kept of either when its stream ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rollout.model.errors import ProtocolError, RolloutError, UnavailableError
from rollout.wire.pieces import PIECE_MAX
from rollout.wire.v1 import common_pb2, serve_pb2, work_pb2

from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.sessions import Outbox, Session

UNREAD_MAX = 16 << 20
"""Bytes that a gateway may leave unread before its stream is closed."""
FRAME_COST = 64
"""Bytes charged for a frame besides its data."""
EPOCH_SHIFT = 32


class ReplicaId(NamedTuple):
    log: int
    seq: int
    attempt: int

    @classmethod
    def of(cls, wire: common_pb2.ReplicaKey) -> ReplicaId:
        return cls(wire.log, wire.seq, wire.attempt)

    def to_wire(self) -> common_pb2.ReplicaKey:
        return common_pb2.ReplicaKey(log=self.log, seq=self.seq, attempt=self.attempt)


@dataclass(eq=False, slots=True)
class Gateway:
    """One open stream of a gateway."""

    channel: int
    run_id: str
    outbox: Outbox = field(default_factory=Outbox)


@dataclass(slots=True)
class _Replica:
    run_id: str
    session: Session
    engine: str
    draining: bool = False


class Relay:
    """The open channels and replicas. Every method fills outboxes without waiting."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._gateways: dict[int, Gateway] = {}
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._opened = 0

    # ---- gateways

    def open(self, run_id: str, epoch: int) -> Gateway:
        """Open a channel to the replicas of a run. Its number is unique, also among those of earlier coordinators."""
        self._opened += 1
        gateway = self._gateways[epoch << EPOCH_SHIFT | self._opened] = Gateway(
            epoch << EPOCH_SHIFT | self._opened, run_id
        )
        self._metrics.gateways.set(len(self._gateways))
        self._put(gateway, serve_pb2.GatewayDown(opened=serve_pb2.GatewayOpened()))
        for id, replica in self._replicas.items():
            if replica.run_id == run_id:
                self._put(gateway, _up(id, replica))
                if replica.draining:
                    self._put(gateway, _down(id, draining=True))
        return gateway

    def close(self, gateway: Gateway) -> None:
        """Close a channel whose stream has ended: nobody waits for answers."""
        if self._gateways.pop(gateway.channel, None) is None:
            return
        self._metrics.gateways.set(len(self._gateways))
        for id, replica in self._replicas.items():
            if replica.run_id == gateway.run_id:
                hung_up = work_pb2.HungUp(replica=id.to_wire(), channel=gateway.channel)
                replica.session.outbox.put_data(work_pb2.WorkDown(hung_up=hung_up), FRAME_COST)

    def to_replica(self, gateway: Gateway, said: serve_pb2.ReplicaData) -> Outbox | None:
        """Return the outbox that it went to, or None if the replica is gone, which the gateway is told, or has not
        come.

        Raises ProtocolError if it is too large.
        """
        _check_size(said.data)
        replica = self._replicas.get(ReplicaId.of(said.replica))
        if replica is None or replica.run_id != gateway.run_id:
            return None
        heard = work_pb2.RelayData(replica=said.replica, channel=gateway.channel, data=said.data, more=said.more)
        replica.session.outbox.put_data(work_pb2.WorkDown(heard=heard), FRAME_COST + len(said.data))
        self._metrics.relayed.labels("down").inc(len(said.data))
        return replica.session.outbox

    # ---- workers

    def announce(self, session: Session, run_id: str, id: ReplicaId, engine: str) -> None:
        """Add a replica. One that was up before, on this stream or another, went down in between and closed all
        channels."""
        self._remove(id)
        replica = self._replicas[id] = _Replica(run_id, session, engine)
        self._tell(run_id, _up(id, replica))

    def withdraw(self, session: Session, id: ReplicaId, *, draining: bool) -> None:
        replica = self._of(session, id)
        if replica is None:
            return
        if not draining:
            self._remove(id)
        elif not replica.draining:
            replica.draining = True
            self._tell(replica.run_id, _down(id, draining=True))

    def from_replica(self, session: Session, said: work_pb2.RelayData) -> None:
        """Pass data to a gateway. It is dropped if the replica is not this stream's, or the channel not its run's.
        Raises ProtocolError if it is too large."""
        _check_size(said.data)
        replica = self._of(session, ReplicaId.of(said.replica))
        gateway = self._gateways.get(said.channel)
        if replica is None or gateway is None or gateway.run_id != replica.run_id:
            return
        data = serve_pb2.ReplicaData(replica=said.replica, data=said.data, more=said.more)
        self._put(gateway, serve_pb2.GatewayDown(data=data), len(said.data))
        self._metrics.relayed.labels("up").inc(len(said.data))

    def session_ended(self, session: Session) -> None:
        for id in [id for id, replica in self._replicas.items() if replica.session is session]:
            self._remove(id)

    def close_all(self, error: RolloutError) -> None:
        """Close all channels, because this coordinator no longer leads: every gateway looks for the next leader."""
        for gateway in list(self._gateways.values()):
            gateway.outbox.fail(error)

    # ----

    def _of(self, session: Session, id: ReplicaId) -> _Replica | None:
        replica = self._replicas.get(id)
        return replica if replica is not None and replica.session is session else None

    def _remove(self, id: ReplicaId) -> None:
        replica = self._replicas.pop(id, None)
        if replica is not None:
            self._tell(replica.run_id, _down(id, draining=False))

    def _tell(self, run_id: str, frame: serve_pb2.GatewayDown) -> None:
        for gateway in self._gateways.values():
            if gateway.run_id == run_id:
                self._put(gateway, frame)

    def _put(self, gateway: Gateway, frame: serve_pb2.GatewayDown, size: int = 0) -> None:
        gateway.outbox.put_data(frame, FRAME_COST + size)
        if gateway.outbox.data_bytes > UNREAD_MAX:
            gateway.outbox.fail(UnavailableError("This gateway does not read its stream; open a new one."))


def _up(id: ReplicaId, replica: _Replica) -> serve_pb2.GatewayDown:
    up = serve_pb2.ReplicaUp(replica=id.to_wire(), worker=replica.session.incarnation, engine=replica.engine)
    return serve_pb2.GatewayDown(up=up)


def _down(id: ReplicaId, *, draining: bool) -> serve_pb2.GatewayDown:
    return serve_pb2.GatewayDown(down=serve_pb2.ReplicaDown(replica=id.to_wire(), draining=draining))


def _check_size(data: bytes) -> None:
    if len(data) > PIECE_MAX:
        raise ProtocolError(f"A piece of {len(data)} bytes; larger ones than {PIECE_MAX} must be cut.")
