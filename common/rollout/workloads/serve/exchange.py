"""Requests in flight of one generation of replicas. Each has a replica, waits for one, or moves to another.

It runs on one event loop and never blocks. It sends through `send`, and is told what replicas do through `up`, `drain`,
`down`, `broken` and `said`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from rollout.model.errors import ProtocolError
from rollout.workloads.infer.honoured import FORWARDS
from rollout.workloads.serve.asks import Asked
from rollout.workloads.serve.errors import ApiError
from rollout.workloads.serve.frames import (
    CANNOT_CONTINUE,
    EMPTY,
    FRAME_BYTES,
    Ask,
    Begin,
    ChoiceDelta,
    Coalescer,
    Deltas,
    End,
    Fault,
    FromReplica,
    Stop,
    Vectors,
    from_replica,
)
from rollout.workloads.serve.routing import Replica, Router

REPLAYS_MAX = 4
"""Retries of a request. The limit ends a request that keeps killing engines."""
PAUSE_S = 0.2
"""Each further retry waits this much longer after an engine returned the request."""
SILENT_BEATS = 6
"""A replica that stays silent for this many beats gets no requests until it speaks: its process is stopped or hangs,
which its worker cannot see."""
RETRY_AFTER_S = 5
"""Retry-After in seconds while there is no engine; engines need some time to start."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer, in order. The first one has the number of prompt tokens, or 0 if only the end reports it.
    `end` marks the last piece. `again` means that the answer restarts and earlier pieces are void."""

    deltas: tuple[ChoiceDelta, ...] = ()
    vectors: tuple[tuple[float, ...], ...] = ()
    prompt_tokens: int = 0
    end: End | None = None
    again: bool = False


class RetiredError(Exception):
    """The request waited for a replica while a newer generation took over."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica is gone or returned the request. `why` is text for users."""

    why: str


@dataclass(slots=True)
class Limits:
    """Limits of [serve]: `queue_s`, `max_queued` and `replay`."""

    queue_s: float
    max_queued: int
    replay: bool


@dataclass(slots=True)
class _Flight:
    """A request in flight. Each try has its own `id`, so that late messages of an earlier try are never taken for its
    own."""

    id: int
    asked: Asked
    inbox: asyncio.Queue[Piece | Fault | Lost] = field(default_factory=lambda: asyncio.Queue[Piece | Fault | Lost]())
    replica: Replica | None = None
    avoid: Replica | None = None
    ids: list[int] = field(default_factory=list[int])
    got: bool = False  # something of the answer
    anew: bool = False  # an engine could not go on behind `ids`
    began: bool = False

    def goes_on(self, kind: str) -> bool:
        """Return whether another replica can continue after `ids`."""
        return not self.anew and self.asked.choices == 1 and kind not in FORWARDS and not self.asked.request.embeds

    def note(self, piece: Piece) -> None:
        self.got = self.got or bool(piece.deltas or piece.vectors)
        if self.asked.choices == 1:
            self.ids.extend(number for delta in piece.deltas for number in delta.ids)


class Exchange:
    """The requests of one generation. `kind` is that of the backend; `on_replay` is called for each request that
    moves."""

    def __init__(
        self,
        send: Callable[[Replica, bytes], bool],
        router: Router,
        limits: Limits,
        kind: str,
        on_replay: Callable[[], None] = lambda: None,
    ) -> None:
        self.router = router
        self.limits = limits
        self._send = send
        self._kind = kind
        self._on_replay = on_replay
        self._flights: dict[int, _Flight] = {}
        self._coalescers: dict[Replica, Coalescer] = {}
        self._quiet: dict[Replica, int] = {}  # beats since its last frame
        self._silent: dict[Replica, str] = {}  # given up for that: its engine
        self._waiting: deque[tuple[_Flight, asyncio.Future[Replica]]] = deque()
        self._next = 0
        self._retired = False
        self.appeared = asyncio.Event()
        """Set once any replica has been up."""
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def holding(self) -> int:
        """Number of replicas with an engine, whether or not they accept requests or respond."""
        return self.router.up_count + len(self._silent)

    # ---- what the stream brings

    def up(self, replica: Replica, engine: str) -> None:
        self.router.up(replica, engine)
        self._quiet[replica] = 0
        self._coalescers[replica] = Coalescer(lambda frame: self._deliver(replica, frame), asyncio.get_running_loop())
        self._deliver(replica, EMPTY)
        self.appeared.set()
        self._serve_waiting()

    def drain(self, replica: Replica) -> None:
        self.router.drain(replica)
        self._silent.pop(replica, None)

    def down(self, replica: Replica, why: str = "the engine was lost") -> None:
        self.router.down(replica)
        self._quiet.pop(replica, None)
        self._silent.pop(replica, None)
        if (gone := self._coalescers.pop(replica, None)) is not None:
            gone.send = lambda frame: None  # what waits there must not reach it when it comes again
        for flight in self._flights.values():
            if flight.replica == replica:
                flight.replica = None
                flight.inbox.put_nowait(Lost(why))

    def broken(self) -> None:
        """Mark every replica as down, because the stream broke."""
        for replica in [*self._coalescers, *self._silent]:
            self.down(replica, "the coordinator was lost")

    def beat(self) -> None:
        """Give up replicas that have been silent for long. Call this every BEAT_S. It counts calls rather than time, so
        a gateway that was itself stopped gives none up."""
        for replica in list(self._quiet):
            self._quiet[replica] += 1
            if self._quiet[replica] > SILENT_BEATS:
                self._give_up(replica)

    def _give_up(self, replica: Replica) -> None:
        engine = self.router.takes(replica)
        stops = [Stop(flight.id) for flight in self._flights.values() if flight.replica == replica]
        self._coalescers[replica].add(*stops)
        self._coalescers[replica].flush()
        self.down(replica, "the engine does not answer")
        if engine is not None:
            self._silent[replica] = engine

    def said(self, replica: Replica, data: bytes) -> None:
        if (engine := self._silent.pop(replica, None)) is not None:
            self.up(replica, engine)
        if replica in self._quiet:
            self._quiet[replica] = 0
        try:
            messages = from_replica(data)
        except ProtocolError as error:
            self.down(replica, f"the engine broke the protocol: {error.message}")
            return
        pieces: dict[int, Piece] = {}
        for message in messages:
            flight = self._flights.get(message.id)
            if flight is None or flight.replica != replica:
                continue
            if isinstance(message, Fault):
                if (piece := pieces.pop(message.id, None)) is not None:
                    flight.inbox.put_nowait(piece)
                flight.inbox.put_nowait(message)
            else:
                pieces[message.id] = _with(pieces.get(message.id, Piece()), message)
        for number, piece in pieces.items():
            self._flights[number].inbox.put_nowait(piece)

    # ---- requests

    async def converse(self, asked: Asked) -> AsyncGenerator[Piece]:
        """Yield the answer as it arrives; close the generator to cancel. Raises ApiError, or RetiredError before the
        first piece."""
        flight = _Flight(self._number(), asked)
        self._flights[flight.id] = flight
        self.idle.clear()
        replays = 0
        try:
            while True:
                await self._place(flight, first=not flight.began)
                flight.began = True
                self._ask(flight)
                lost = ""
                while not lost:
                    match await flight.inbox.get():
                        case Lost(why):
                            lost = why
                        case Fault() as fault if fault.retry:
                            lost, flight.avoid = fault.message, flight.replica
                            self._free(flight)
                            await asyncio.sleep(PAUSE_S * replays)
                        case Fault() as fault if fault.code == CANNOT_CONTINUE:
                            lost, flight.anew = fault.message, True
                            self._free(flight)
                        case Fault() as fault:
                            raise ApiError(fault.message, status=fault.status)
                        case Piece() as piece:
                            flight.note(piece)
                            if piece.end is not None:
                                self._free(flight)
                            yield piece
                            if piece.end is not None:
                                return
                if not self.limits.replay or replays == REPLAYS_MAX:
                    raise ApiError(f"{lost}, and the answer is not complete", status=503, retry_after_s=1)
                if flight.got and not flight.goes_on(self._kind):
                    if asked.stream:
                        raise ApiError(f"{lost}, and the client has a part of the answer", status=503, retry_after_s=1)
                    flight.got = False
                    flight.ids.clear()
                    yield Piece(again=True)
                replays += 1
                self._on_replay()
                del self._flights[flight.id]
                flight.id = self._number()
                self._flights[flight.id] = flight
        finally:
            self._forget(flight)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def retire(self) -> None:
        """Retire this generation: requests that still wait for a first replica raise RetiredError."""
        self._retired = True
        for flight, future in list(self._waiting):
            if not flight.began and not future.done():
                future.set_exception(RetiredError())

    async def _place(self, flight: _Flight, *, first: bool) -> None:
        if self._retired and first:
            raise RetiredError
        replica = None if self._waiting and first else self.router.choose(flight.asked.blocks, flight.avoid)
        if replica is None:
            replica = await self._wait(flight, first=first)
        else:
            self.router.begin(replica, flight.asked.blocks)
        flight.replica = replica

    async def _wait(self, flight: _Flight, *, first: bool) -> Replica:
        """Wait for a replica. Raises ApiError 429 if all engines are full, 503 if there is none."""
        if first and len(self._waiting) >= self.limits.max_queued:
            raise self._no_room("too many requests wait already")
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        entry = (flight, future)
        if first:
            self._waiting.append(entry)
        else:
            self._waiting.appendleft(entry)
        try:
            async with asyncio.timeout(self.limits.queue_s):
                return await future
        except TimeoutError:
            raise self._no_room(f"none had room within {self.limits.queue_s:g} s") from None
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def _no_room(self, why: str) -> ApiError:
        if not self.router.replicas:
            return ApiError(f"no engine is ready: {why}", status=503, retry_after_s=RETRY_AFTER_S)
        return ApiError(f"every engine is busy: {why}", status=429, retry_after_s=1)

    def _serve_waiting(self) -> None:
        while self._waiting:
            flight, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            replica = self.router.choose(flight.asked.blocks, flight.avoid)
            if replica is None:
                return
            self._waiting.popleft()
            self.router.begin(replica, flight.asked.blocks)
            flight.replica = replica  # also where the request is given up meanwhile: `_forget` gives it back
            future.set_result(replica)

    def _ask(self, flight: _Flight) -> None:
        replica, so_far = flight.replica, (tuple(flight.ids),) if flight.ids and flight.goes_on(self._kind) else ()
        coalescer = self._coalescers.get(replica) if replica is not None else None
        if coalescer is None:
            return  # it went down since: Lost is in the inbox
        try:
            coalescer.add(Ask(flight.id, flight.asked.url, flight.asked.body, so_far))
        except ProtocolError:
            raise ApiError(f"the request is larger than {FRAME_BYTES >> 20} MiB", status=413) from None

    def _deliver(self, replica: Replica, frame: bytes) -> None:
        if not self._send(replica, frame) and replica in self._coalescers:
            # Not within `add`: who asks is not yet ready to hear of it.
            asyncio.get_running_loop().call_soon(self.down, replica, "the engine cannot be reached")

    def _free(self, flight: _Flight) -> None:
        if flight.replica is not None:
            self.router.end(flight.replica)
            flight.replica = None
            self._serve_waiting()

    def _forget(self, flight: _Flight) -> None:
        """Drop a request. If its replica has not finished it, stop it there."""
        del self._flights[flight.id]
        replica = flight.replica
        if replica is not None and (coalescer := self._coalescers.get(replica)) is not None:
            coalescer.add(Stop(flight.id))
        self._free(flight)
        if not self._flights:
            self.idle.set()


def _with(piece: Piece, message: FromReplica) -> Piece:
    match message:
        case Begin():
            return replace(piece, prompt_tokens=message.prompt_tokens)
        case Deltas():
            return replace(piece, deltas=(*piece.deltas, *message.choices))
        case Vectors():
            return replace(piece, vectors=(*piece.vectors, *message.vectors))
        case End():
            return replace(piece, end=message)
        case Fault():
            return piece
