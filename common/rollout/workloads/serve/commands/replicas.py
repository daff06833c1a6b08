"""Runs of replicas. Each run is one generation with a stream to its running replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.cli.asking import reached
from rollout.cli.named_snapshots import NamedSnapshots
from rollout.cli.progress import Display
from rollout.client.relay import Broken, Down, Draining, Replica, ReplicaStream, Said, Up
from rollout.client.run_session import RunSession
from rollout.client.runs import Runs, new_ulid
from rollout.client.snapshots import snapshot_at
from rollout.client.target import Target
from rollout.client.trees import name_trees, upload_trees
from rollout.model.errors import NotFoundError
from rollout.model.ids import short
from rollout.model.item import NewItem
from rollout.model.run import ENDED, RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.output import RUN_ID, write_atomically
from rollout.workloads.port import Workload
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.errors import ApiError, ServerEndedError
from rollout.workloads.serve.exchange import Exchange, Limits
from rollout.workloads.serve.frames import BEAT_S
from rollout.workloads.serve.gateway import Generation
from rollout.workloads.serve.routing import Router
from rollout.workloads.serve.workload import SECTION, ServeChecked

OPEN_RUNS = "runs.json"
"""File in the directory with the open runs, so that the next command finds those of a killed one."""
_ENDED = frozenset(str(state) for state in ENDED)
_PROBE_PAUSE_S = 1.0
_GROW_S = 1.0
_TELL_S = 2.0


@dataclass(slots=True)
class Replicas:
    """A run of replicas. `engine` describes its engines as checked. `tasks` listen to the replicas and watch the run; a
    task that ended has failed."""

    run_id: str
    config: JsonObject
    engine: JsonObject
    generation: Generation
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def check(self) -> None:
        """Raise RolloutError if the run has ended or the cluster does not know it."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def ready(self, config: ServeConfig, display: Display) -> None:
        """Wait until a replica has generated something. Raises RolloutError as `check` does."""
        exchange, told = self.generation.exchange, ""
        while not self.generation.ready:
            appeared = asyncio.ensure_future(exchange.appeared.wait())
            try:
                await asyncio.wait({appeared, *self.tasks}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                appeared.cancel()
            self.check()
            try:
                await self.generation.probe(config)
            except ApiError as error:
                if error.message != told and error.status not in (429, 503):
                    display.note(f"warning: the engine does not answer: {error.message}")
                told = error.message
                await asyncio.sleep(_PROBE_PAUSE_S)


class ReplicaRuns:
    """Opens and ends runs of replicas. `target` is their cluster as the user named it."""

    def __init__(
        self,
        runs: Runs,
        workload: Workload[Any, Any],
        target: Target,
        snapshots: NamedSnapshots,
        directory: Path,
        display: Display,
    ) -> None:
        self._runs = runs
        self._workload = workload
        self._target = target
        self._snapshots = snapshots
        self._directory = directory
        self._display = display
        self._left: dict[bytes, str] = {}
        self.open: list[Replicas] = []

    async def named(self, checked: ServeChecked) -> ServeChecked:
        """Resolve the model to a snapshot. Raises ConfigError or NotFoundError."""
        await self._snapshots.find(checked, checked.snapshots)
        return checked

    async def newer(self, replicas: Replicas) -> bool:
        """Return whether the followed run has made a newer snapshot."""
        name: str = lookup(replicas.config, f"{SECTION}.model.snapshot") or ""
        if name not in self._snapshots.sources:
            return False
        target, snapshot = self._snapshots.sources[name]
        with suppress(NotFoundError):
            if target is self._target:
                newest = await snapshot_at(self._runs, snapshot.run_id, None)
            else:
                async with reached(target, self._snapshots.where.tell, patience_s=_TELL_S) as (client, _):
                    newest = await snapshot_at(client, snapshot.run_id, None)
            return newest.id != name
        return False

    async def take_over(self) -> None:
        """Adopt the runs of a killed command: continue the one with the same model and end the others."""
        with suppress(OSError, ValueError):
            known: list[str] = json.loads((self._directory / OPEN_RUNS).read_text())
            for run_id in known:
                with suppress(NotFoundError):
                    status = await self._runs.get(run_id)
                    if status.state not in _ENDED:
                        self._left[status.spec.config] = run_id

    async def begin(self, checked: ServeChecked, settings: ServeConfig, on_replay: Any) -> Replicas:
        """Open a run, submit its replicas and listen to them."""
        runs, config, step = self._runs, checked.config, self._display.step
        trees = [one for one in checked.trees if one.always or self._target.private is None]
        engine = deepcopy(config["executors"])  # of which names of trees are no part
        await name_trees(config, trees, step)
        run_id = self._left.pop(self._workload.spec("", config).config, "") or new_ulid()
        spec = self._workload.spec(run_id, config)
        await runs.open(spec)
        model: JsonObject = lookup(config, f"{SECTION}.model")
        stream, serve = runs.replicas(run_id), settings.serve
        exchange = Exchange(
            lambda replica, data: stream.send(Replica(*replica), data),
            Router(serve.max_in_flight),
            Limits(serve.queue_s, serve.max_queued, serve.replay),
            settings.backend.kind,
            on_replay,
        )
        label = str(model.get("snapshot") or model.get("content_id") or model["uri"])[:12]
        replicas = Replicas(run_id, config, engine, Generation(label, exchange))
        self.open.append(replicas)
        self._write()
        session = RunSession(runs, run_id)
        await session.remember(self._target, self._directory, spec.name)
        await self._snapshots.provide(session, config, checked.snapshots)
        await upload_trees(runs, run_id, config, trees, step)
        for left in self._left.values():
            await self._kill(left)
        self._left.clear()
        replicas.tasks += [
            asyncio.create_task(_listen(stream, exchange)),
            asyncio.create_task(_beat(exchange)),
            asyncio.create_task(self._watch(replicas)),
            asyncio.create_task(self._grow(replicas, checked, spec)),
        ]
        return replicas

    async def _grow(self, replicas: Replicas, checked: ServeChecked, spec: RunSpec) -> None:
        """Submit replicas until every engine has one: another one whenever the last found a free engine, and when
        workers join."""
        exchange, most = replicas.generation.exchange, checked.settings.serve.max_replicas
        router = exchange.router
        known: set[str] = set()
        wanted = engines = 0
        while True:
            ready = {one.incarnation for one in (await self._runs.workers()).workers if one.state == "ready"}
            more = wanted == 0 or len(router.engines) > engines or not ready <= known
            if more and exchange.holding >= wanted and len(router.engines) < most:
                known, engines = ready, len(router.engines)
                wanted += max(1, min(len(ready), most)) if wanted == 0 else 1
                items = partial(self._items, checked, replicas.config, wanted)
                await self._runs.submit(spec, items, seal=False)
            await asyncio.sleep(_GROW_S)

    def _items(self, checked: ServeChecked, config: JsonObject, wanted: int, start: int) -> Iterator[NewItem]:
        return islice(self._workload.plan(checked, config, start), max(0, wanted - start))

    async def end(self, replicas: Replicas) -> None:
        """End a run. Its remaining requests are lost."""
        for task in replicas.tasks:
            task.cancel()
        await asyncio.gather(*replicas.tasks, return_exceptions=True)
        await self._kill(replicas.run_id)
        self.open.remove(replicas)
        self._write()

    async def _kill(self, run_id: str) -> None:
        with suppress(NotFoundError):
            await RunSession(self._runs, run_id).kill("the server ended it")

    def _write(self) -> None:
        ids = [one.run_id for one in self.open]
        write_atomically(self._directory / OPEN_RUNS, json.dumps([*ids, *self._left.values()]).encode())
        if ids:
            write_atomically(self._directory / RUN_ID, f"{ids[-1]}\n".encode())

    async def _end_of(self, run_id: str) -> str:
        """Return who ended the run, or why it ended."""
        reply = await self._runs.describe(run_id, failures=1)
        status = reply.status
        by = f" by the {status.ended_by}" if status.ended_by else ""
        whys = [text for text in (status.reason, *map(_said, reply.failures)) if text]
        return f"run {short(run_id)} is {status.state}{by}{': ' if whys else ''}{'; '.join(whys)}"

    async def _watch(self, replicas: Replicas) -> None:
        """Wait for the end of the run, then raise RolloutError: only this command should end it."""
        shown = ""
        async with aclosing(RunSession(self._runs, replicas.run_id).statuses()) as statuses:
            async for status, _ in statuses:
                if status.state in _ENDED:
                    raise ServerEndedError(await self._end_of(replicas.run_id))
                generation = replicas.generation
                generation.waits_for = "" if generation.ready else _waits_for(status)
                if generation.waits_for not in ("", shown):
                    shown = generation.waits_for
                    self._display.step(f"starting engines of {generation.label}: {shown}")


def _said(failure: pb.RunFailure) -> str:
    return f"{failure.code}: {failure.message}"


def _waits_for(status: pb.RunStatus) -> str:
    """Return, in words, what the first engine waits for."""
    causes = [f"{cause.code}: {cause.message.splitlines()[0]}" for cause in status.causes if cause.message]
    waits = [wait.message for wait in status.waits] if not status.in_flight else []
    taken = "a worker loads the model" if status.in_flight else "no worker has taken it yet"
    return (causes or waits or [taken])[0]


async def _beat(exchange: Exchange) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        exchange.beat()


async def _listen(stream: ReplicaStream, exchange: Exchange) -> None:
    """Pass the stream's messages to the exchange. Raises RolloutError if the cluster refuses the stream for good."""
    async with stream:
        async for event in stream:
            match event:
                case Said(replica, data):
                    exchange.said(replica, data)
                case Up(replica, worker, engine):
                    exchange.up(replica, f"{worker}/{engine}")
                case Draining(replica):
                    exchange.drain(replica)
                case Down(replica):
                    exchange.down(replica)
                case Broken(error):
                    exchange.broken()
                    if not error.retryable:
                        raise error
