"""Takes output of workers' children, and serves it to users together with events."""

from __future__ import annotations

from typing import Any

from rollout.model.errors import InputError
from rollout.model.ids import check_ulid
from rollout.model.run import ENDED
from rollout.security.roles import Peer, Role
from rollout.wire.v1 import history_pb2 as pb
from rollout.wire.v1 import history_pb2_grpc

from rollout_coordinator.history import History
from rollout_coordinator.leadership import Gate, unary
from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import EventRow, EventsOf, NewOutput
from rollout_coordinator.ledger.reads import SEQ_MAX
from rollout_coordinator.run_views import RunViews

CHUNK_MAX = 64 << 10
PAGE_BYTES = 512 << 10
EVENTS_PAGE = 500
ENDS_MS = 5000
"""Events without a run may concern a run for this long after its end."""


class HistoryService(history_pb2_grpc.HistoryServicer):
    def __init__(self, gate: Gate, history: History, ledger: Ledger, views: RunViews) -> None:
        self._gate = gate
        self._history = history
        self._ledger = ledger
        self._views = views

    @unary(Role.WORKER)
    async def Ship(self, request: pb.ShipRequest, peer: Peer) -> pb.ShipReply:
        check_ulid(request.run_id, "run_id")
        lines = request.output.SerializeToString()
        if len(lines) > CHUNK_MAX:
            raise InputError(f"A chunk of output has at most {CHUNK_MAX} bytes, this has {len(lines)}.")
        await self._history.add(NewOutput(request.run_id, request.incarnation, lines))
        return pb.ShipReply()

    @unary(Role.OPERATOR)
    async def Output(self, request: pb.OutputRequest, peer: Peer) -> pb.OutputReply:
        view = await self._views.get(request.run_id)
        found = await self._ledger.output(request.run_id, min(request.after, SEQ_MAX), PAGE_BYTES)
        return pb.OutputReply(
            chunks=[pb.OutputChunk(**row._asdict()) for row in found],
            end=not found,
            root_log=view.root_log,
            run_ended=view.state in ENDED,
        )

    @unary(Role.OPERATOR)
    async def Events(self, request: pb.EventsRequest, peer: Peer) -> pb.EventsReply:
        of, ended = await self._of(request.run_id)
        if request.newest:
            found = await self._ledger.newest_events(of, min(request.newest, EVENTS_PAGE))
        else:
            found = await self._ledger.events(of, min(request.after, SEQ_MAX), EVENTS_PAGE)
        return pb.EventsReply(
            events=[pb.HappenedEvent(**_encoded(row)) for row in found],
            end=len(found) < EVENTS_PAGE,
            run_ended=ended,
        )

    async def _of(self, run_id: str) -> tuple[EventsOf, bool]:
        """Return the scope of a run's events. Raises NotFoundError."""
        if not run_id:
            return EventsOf(), False
        view = await self._views.get(run_id)
        to_ms = view.ended_ms + ENDS_MS if view.state in ENDED else 1 << 62
        return EventsOf(run_id, view.created_ms, to_ms), view.state in ENDED


def _encoded(row: EventRow) -> dict[str, Any]:
    return {**row._asdict(), "fields": row.fields.encode()}
