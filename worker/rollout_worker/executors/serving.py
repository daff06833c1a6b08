"""Replica: an attempt that answers requests of gateways with the executor's engine until its run ends."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import structlog
from pydantic import ValidationError
from rollout.model.errors import AttemptError, InputError, ProtocolError
from rollout.workloads.infer.bodies import CHAT, EMBED
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.honoured import FORWARDS
from rollout.workloads.infer.images import check_image
from rollout.workloads.infer.request import RowRequest, adapter_of, parse_row, row_seed
from rollout.workloads.json_form import JsonObject
from rollout.workloads.serve.frames import (
    BEAT_S,
    CANNOT_CONTINUE,
    EMPTY,
    FRAME_BYTES,
    Ask,
    Begin,
    ChoiceDelta,
    ChoiceEnd,
    Coalescer,
    Deltas,
    End,
    Fault,
    FromReplica,
    Stop,
    Vectors,
    to_replica,
)

from rollout_worker.backends.answers import PartedStream, cut_off_call
from rollout_worker.backends.port import (
    Backend,
    Begun,
    Choice,
    Completion,
    Delta,
    EngineFaultError,
    Request,
    cannot_continue,
)
from rollout_worker.executors.infer_requests import (
    answer,
    engine_requests,
    finite,
    has_reasoning,
    read_answers,
    with_all_images,
)
from rollout_worker.executors.port import Attempt, Context, Done, HandOverError, Replica

_log = structlog.get_logger()
SERVE = "serve"
"""Workload whose items are replicas."""
UNLIMITED = 1 << 24
"""`max_tokens` of a chat that sets none: up to the end of the model's context."""
TEXT_TOKENS = 16
"""`max_tokens` of a text completion that sets none, as in OpenAI's API."""
GIVE_UP_S = 0.5
"""Seconds before the worker leaves that are reserved to answer unfinished requests."""
LEAVING = "replica_leaving"
ORPHANED = "orphaned"
"""Failure code of a replica that no gateway reaches any more; it ends the run."""
VECTOR_NUMBERS = FRAME_BYTES // 32
"""Numbers of vectors in one message; a number takes some 20 characters."""


class Room:
    """Admission to an engine: requests run at once, rows only if `room` exceeds the number of all that run.

    Without a replica the engine queues rows itself.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._replicas = self._requests = self._rows = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def row(self) -> AsyncGenerator[None]:
        if self._waiting or self._full:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._rows -= 1
                    self._admit()
                raise
        else:
            self._rows += 1
        try:
            yield
        finally:
            self._rows -= 1
            self._admit()

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[None]:
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._admit()

    @asynccontextmanager
    async def replica(self) -> AsyncGenerator[None]:
        self._replicas += 1
        try:
            yield
        finally:
            self._replicas -= 1
            self._admit()

    @property
    def _full(self) -> bool:
        return self._replicas > 0 and self._rows + self._requests >= self._room()

    def _admit(self) -> None:
        while self._waiting and not self._full:
            turn = self._waiting.popleft()
            if not turn.done():
                self._rows += 1
                turn.set_result(None)


class Engine:
    """Engine as one run's requests see it.

    `config` is the run's {model, backend, sampling, allow_http_images}; `sampling` has only the keys that were set,
    which take precedence over the model's suggestions. Raises AttemptError for invalid sampling.
    """

    def __init__(self, backend: Backend, config: JsonObject, suggested: JsonObject, room: Room) -> None:
        self.backend = backend
        self.room = room
        self.kind = str(config["backend"]["kind"])
        sampling: JsonObject = config.get("sampling") or {}
        given = {key: value for key, value in sampling.items() if value is not None}
        try:
            self.sampling = SamplingSection.model_validate({**suggested, **given})
        except ValidationError as error:
            message = f"the sampling of the run, or of the model's generation_config.json, cannot be used: {error}"
            raise AttemptError(message, code="bad_run_config", retry=False) from None
        self._text_tokens = int(given.get("max_tokens", TEXT_TOKENS))
        self._chat_tokens = int(given.get("max_tokens", suggested.get("max_tokens", UNLIMITED)))
        self._adapters: tuple[str, ...] = tuple(config["model"].get("loras") or ())
        self._fetches = bool(config.get("allow_http_images"))

    async def read(self, ask: Ask) -> tuple[RowRequest, str]:
        """Return the request and its adapter. Raises InputError and AttemptError."""
        body = {key: value for key, value in ask.body.items() if key not in ("stream", "stream_options")}
        forwards = self.kind in FORWARDS
        limits = body.get("max_tokens"), body.get("max_completion_tokens")
        if ask.url != EMBED and not forwards and limits == (None, None):
            body["max_tokens"] = self._chat_tokens if ask.url == CHAT else self._text_tokens
        row: JsonObject = {"custom_id": "", "url": ask.url, "body": body}
        request = parse_row(row, self.sampling, self.kind)
        if not forwards:
            for url in request.images:
                check_image(url, None, http=self._fetches)
            request = await with_all_images(request, {}, fetch=True)
        return request, adapter_of(row, self._adapters)


@dataclass(slots=True)
class Figures:
    """Statistics of a replica."""

    requests: int = 0
    running: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failures: int = 0


class Serving:
    """Answers requests of gateways. `waits` is called with what requests wait for outside the engine."""

    def __init__(self, engine: Engine, attempt: Attempt, context: Context, waits: Callable[[str], None]) -> None:
        self._engine = engine
        self._context = context
        self._waits = waits
        self._prefix = f"{attempt.id.hex()}-{attempt.attempt}"
        self._number = count(1)
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._channels: dict[int, Coalescer] = {}
        self._figures = Figures()
        self._leaves_at: float | None = None
        self._told_to_leave = asyncio.Event()
        self._orphan_s = float(json.loads(attempt.payload).get("orphan_s", 0))
        self._orphaned = asyncio.Event()
        self._orphans: asyncio.TimerHandle | None = None

    def leave(self, budget_s: float) -> None:
        """Accept no more requests, finish the running ones, and leave within `budget_s` seconds."""
        at = asyncio.get_running_loop().time() + max(0.0, budget_s - GIVE_UP_S)
        self._leaves_at = at if self._leaves_at is None else min(at, self._leaves_at)
        self._told_to_leave.set()

    async def run(self) -> Done:
        """Answer requests until cancelled.

        Raises HandOverError if the worker leaves, and AttemptError if there was no gateway for long.
        """
        async with self._engine.room.replica(), self._context.replica() as replica:
            self._tell()
            self._watch_channels()
            reader = asyncio.create_task(self._read(replica))
            beats = asyncio.create_task(self._beat())
            told = asyncio.create_task(self._told_to_leave.wait())
            orphaned = asyncio.create_task(self._orphaned.wait())
            try:
                await asyncio.wait((reader, told, orphaned), return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    reader.result()
                if orphaned.done():
                    message = f"no server was connected for {self._orphan_s:g} s"
                    raise AttemptError(message, code=ORPHANED, retry=False)
                replica.withdraw()
                await self._drain()
            finally:
                reader.cancel()
                beats.cancel()
                told.cancel()
                orphaned.cancel()
                if self._orphans is not None:
                    self._orphans.cancel()
                self._give_up()
                await asyncio.gather(reader, beats, told, orphaned, *self._tasks.values(), return_exceptions=True)
        raise HandOverError

    async def _drain(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._tasks and self._leaves_at is not None and (left := self._leaves_at - clock()) > 0:
            self._told_to_leave.clear()
            sooner = asyncio.create_task(self._told_to_leave.wait())
            await asyncio.wait((sooner, *self._tasks.values()), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            sooner.cancel()

    def _give_up(self) -> None:
        """Give up what still runs, which must run elsewhere."""
        for (channel, number), task in list(self._tasks.items()):
            if task.cancel():
                self._say(channel, _leaving(number))
        for out in self._channels.values():
            out.flush()

    # ---- frames

    async def _read(self, replica: Replica) -> None:
        async for channel, data in replica.frames():
            if data is None:
                self._hung_up(channel)
                continue
            if channel not in self._channels:
                send = partial(replica.send, channel)
                self._channels[channel] = Coalescer(send, asyncio.get_running_loop())
                self._watch_channels()
            try:
                messages = to_replica(data)
            except ProtocolError as error:
                _log.warning("bad_frame_of_a_gateway", channel=channel, error=error.message)
                continue
            for message in messages:
                self._heard(channel, message)

    def _heard(self, channel: int, message: Ask | Stop) -> None:
        key = channel, message.id
        if isinstance(message, Stop):
            if (task := self._tasks.get(key)) is not None:
                task.cancel()
        elif key in self._tasks:
            _log.warning("request_repeated", channel=channel, id=message.id)
        elif self._leaves_at is not None:
            self._say(channel, _leaving(message.id))
        else:
            self._figures.requests += 1
            self._figures.running += 1
            task = self._tasks[key] = asyncio.create_task(self._answer(channel, message))
            task.add_done_callback(partial(self._ended, key))
            self._tell()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for out in self._channels.values():
                out.send(EMPTY)

    def _hung_up(self, channel: int) -> None:
        self._channels.pop(channel, None)
        for key, task in self._tasks.items():
            if key[0] == channel:
                task.cancel()
        self._watch_channels()

    def _watch_channels(self) -> None:
        if self._orphans is not None:
            self._orphans.cancel()
            self._orphans = None
        if not self._channels and self._orphan_s:
            self._orphans = asyncio.get_running_loop().call_later(self._orphan_s, self._orphaned.set)

    def _say(self, channel: int, *messages: FromReplica) -> None:
        if (out := self._channels.get(channel)) is not None:
            out.add(*messages)

    # ---- requests

    async def _answer(self, channel: int, ask: Ask) -> None:
        try:
            request, adapter = await self._engine.read(ask)
            answering = Answering(ask, request, self._engine.backend, partial(self._say, channel))
            name = f"{self._prefix}-{next(self._number)}"
            # Two requests that name no seed must not draw alike.
            seed = row_seed(request, secrets.token_bytes(32))
            asked = engine_requests(request, name, seed, adapter=adapter, waits=self._waits)
            async with self._engine.room.request():
                completion = await answering.asked(asked)
            self._say(channel, *answering.last(completion))
        except (InputError, AttemptError, ProtocolError) as error:
            self._figures.failures += 1
            self._say(channel, fault_of(ask.id, error))
            return
        self._figures.prompt_tokens += completion.prompt_tokens
        self._figures.completion_tokens += sum(choice.tokens for choice in completion.choices)

    def _ended(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        self._figures.running -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("request_failed", error=repr(error), exc_info=error)
            self._figures.failures += 1
            message = f"the replica failed: {type(error).__name__}"
            self._say(key[0], Fault(key[1], "internal", message, 500, retry=True))
        self._tell()

    def _tell(self) -> None:
        figures = self._figures
        note = f"{figures.running} of {figures.requests} requests running"
        self._context.progress(note, **{name: getattr(figures, name) for name in Figures.__slots__})


@dataclass(slots=True)
class _Said:
    """What a gateway knows of one choice. `held` is its last delta, which is sent with the end, so that nobody
    continues after it."""

    stream: PartedStream
    calls: bool = False
    streamed: bool = False
    held: ChoiceDelta | None = None


@dataclass(slots=True)
class Answering:
    """One request, and what is sent of its answer."""

    ask: Ask
    request: RowRequest
    backend: Backend
    say: Callable[..., None]
    _n: int = 1
    _begun: list[Begun] = field(default_factory=list[Begun])
    _begin: tuple[Begin, ...] = ()
    _said: dict[int, _Said] = field(default_factory=dict[int, _Said])

    async def asked(self, requests: list[Request]) -> Completion:
        """Return the engine's whole answer. Raises AttemptError."""
        self._n = requests[0].sampling.n
        if self.ask.so_far:
            if len(requests) * self._n != 1 or len(self.ask.so_far) != 1 or self.request.embeds:
                raise cannot_continue("it has not one choice")
            requests = [replace(requests[0], so_far=self.ask.so_far[0])]
        streaming = [
            replace(
                one,
                on_begin=partial(self._begins, len(requests)),
                on_delta=None if self.request.embeds else partial(self._gains, at),
            )
            for at, one in enumerate(requests)
        ]
        completion = await answer(self.backend, streaming)
        if not completion.choices and not completion.embeddings:
            raise AttemptError("the backend returned no completion", code="empty_completion")
        return completion

    def last(self, completion: Completion) -> list[FromReplica]:
        """Return the messages that remain to be sent."""
        read_answers(completion, self.request, getattr(self.backend, "calls_in", None))
        tools = self.request.tools
        for choice in completion.choices if tools is not None and tools.choice == "named" else ():
            if not choice.tool_calls and tools is not None and self.request.messages is not None:
                cut_off_call(choice, tools)
        number = self.ask.id
        rest = [self._rest(at, choice) for at, choice in enumerate(completion.choices)]
        said: list[FromReplica] = [*self._begin, Deltas(number, tuple(one for one in rest if one is not None))]
        vectors = [tuple(vector) for vector in completion.embeddings or ()]
        each = max(1, VECTOR_NUMBERS // max(1, max(map(len, vectors), default=1)))
        said += [Vectors(number, tuple(vectors[at : at + each])) for at in range(0, len(vectors), each)]
        ends = tuple(
            ChoiceEnd(at, one.finish_reason, one.tokens, one.refusal, one.note, one.stop_reason)
            for at, one in enumerate(completion.choices)
        )
        said.append(End(number, ends, completion.prompt_tokens, sum(one.tokens for one in completion.choices)))
        return [one for one in said if not (isinstance(one, Deltas) and not one.choices)]

    def _begins(self, requests: int, begun: Begun) -> None:
        self._begun.append(begun)
        if len(self._begun) == requests:
            # With the first of its answer: what the engine refuses by then has an error of its own as its answer.
            self._begin = (Begin(self.ask.id, sum(one.prompt_tokens for one in self._begun)),)

    def _gains(self, at: int, delta: Delta) -> None:
        index = at * self._n + delta.index
        said = self._of(index)
        said.streamed = True
        reasoning, text = said.stream.feed(delta.text)
        if delta.repeated:
            return
        said.calls = said.calls or bool(delta.tool_calls)
        logprobs = tuple(finite(list(delta.logprobs)) or ())
        gained = ChoiceDelta(index, delta.ids, text, reasoning or delta.reasoning, delta.tool_calls, logprobs)
        if delta.last:
            said.held = gained
        elif delta.ids or text or gained.reasoning or gained.tool_calls:
            begin, self._begin = self._begin, ()
            self.say(*begin, Deltas(self.ask.id, (gained,)))

    def _of(self, index: int) -> _Said:
        said = self._said.get(index)
        if said is None:
            reads = self.request.messages is not None
            stream = PartedStream(
                reasons=reads and has_reasoning(self.request),
                thinking=any(one.thinking for one in self._begun),
                tools=self.request.tools if reads else None,
                find=getattr(self.backend, "calls_in", None),
            )
            said = self._said[index] = _Said(stream)
        return said

    def _rest(self, index: int, choice: Choice) -> ChoiceDelta | None:
        said = self._of(index)
        gained = said.held or ChoiceDelta(index)
        if not said.streamed:  # a server that does not stream
            logprobs = tuple(finite(choice.logprobs) or ())
            gained = replace(gained, text=choice.text, reasoning=choice.reasoning or "", logprobs=logprobs)
        elif self.request.body is None:
            reasoning, text = said.stream.rest(choice)
            gained = replace(gained, reasoning=gained.reasoning + reasoning, text=gained.text + text)
        if choice.tool_calls and not said.calls:
            gained = replace(gained, tool_calls=tuple(choice.tool_calls))
        return None if gained == ChoiceDelta(index) else gained


def _leaving(number: int) -> Fault:
    return Fault(number, LEAVING, "the replica leaves", 503, retry=True)


def fault_of(number: int, error: InputError | AttemptError | ProtocolError) -> Fault:
    """Return the fault of a request that has no answer."""
    if isinstance(error, ProtocolError):  # no replica could send it
        return Fault(number, "answer_too_large", f"the answer is too large: {error.message}", 422, retry=False)
    if isinstance(error, InputError):
        return Fault(number, "bad_request", error.message, 400, retry=False)
    if isinstance(error, EngineFaultError):  # another engine may have what this one lacks
        return Fault(number, error.error_code, error.message, 503, retry=True)
    if error.error_code == CANNOT_CONTINUE:
        return Fault(number, error.error_code, error.message, 409, retry=False)
    return Fault(number, error.error_code, error.message, 500 if error.retry else 400, retry=error.retry)
