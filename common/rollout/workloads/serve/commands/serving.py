"""The process of `rollout serve`: its cluster, its generations of replicas, and the HTTP server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from rollout.cli.boundary import OK
from rollout.cli.checking import noted
from rollout.cli.command_cluster import CommandCluster
from rollout.cli.dry_run import dry_run
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.named_snapshots import NamedSnapshots
from rollout.cli.progress import display_for
from rollout.cli.run_place import place, target_of
from rollout.cli.work import Work
from rollout.cli.work_options import Options
from rollout.client.private import OwnerLock
from rollout.client.runs import Runs
from rollout.client.snapshots import NoSnapshotYetError
from rollout.model.errors import RolloutError, StateError
from rollout.model.ids import short
from rollout.wire import event_loop
from rollout.wire.http_server import Https, Server, server
from rollout.workloads.port import InputReader, Workload, cloud_of
from rollout.workloads.serve.app import application
from rollout.workloads.serve.commands.replicas import ReplicaRuns, Replicas
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.gateway import Gateway
from rollout.workloads.serve.keys import read_keys
from rollout.workloads.serve.workload import ServeChecked

FOLLOW_S = 5.0
"""Interval between two checks for new snapshots of a followed run."""
_FIRST_PATIENCE_S = 20.0
_PATIENCE_S = 30 * 24 * 3600.0
"""How long the server waits for its cluster: longer than any repair takes."""
_LAST_PATIENCE_S = 5.0


def serve_until_ended(
    workload: Workload[Any, Any],
    settings: ServeConfig,
    read: Callable[[], ServeConfig],
    at_place: Callable[[], AbstractContextManager[None]],
    options: Options,
) -> int:
    """Serve until the command is stopped, and return the exit code. `read` reads the settings again. `at_place` adds
    file and line to faults of settings. Raises ConfigError with every fault before anything is started or written."""
    target = target_of(options)
    if not target.addresses:
        workload.works_here()
    if options.dry_run:
        return dry_run(workload, settings, options, [])
    target = place(workload.directory(settings), target, options)
    if target.private is not None:
        workload.check_host(settings)
    display = display_for(json=options.json)
    work = Work(workload, settings, options, target, display)
    try:
        return event_loop.run(_Serving(work, settings, read, at_place).run())
    finally:
        display.close()


class _Serving:
    def __init__(
        self,
        work: Work,
        settings: ServeConfig,
        read: Callable[[], ServeConfig],
        at_place: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._workload, self._target, self._display = work.workload, work.target, work.display
        self._settings = settings
        self._read = read
        self._at_place = at_place
        self._directory = work.directory
        self._gateway = Gateway(settings, read_keys(settings.serve.api_keys_env, os.environ))
        self._cluster = CommandCluster(work, engines=2)
        """Two engines, because the old and the new model overlap during a switch."""
        self._snapshots = NamedSnapshots(
            work.workload, work.target, self._directory, work.display.note, work.display.step
        )
        self._serves = False
        self._ending = asyncio.Event()
        self._told = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        interrupts = Interrupts(self._at_once, self._gently)
        interrupts.install()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._told.set)
        with suppress(Interrupted):
            await interrupts.guard(self._work())
        self._display.event("ended", "the server has ended")
        return OK

    def _gently(self) -> bool:
        self._ending.set()
        return self._serves

    def _at_once(self) -> None:
        self._cluster.kill()
        self._display.close()
        self._display.event("ended", "the server has ended; requests that ran were cut off")

    async def _work(self) -> None:
        checked = await self._checked(self._settings)
        for note in (*checked.notes, *(f"warning: {text}" for text in self._workload.warnings(self._settings))):
            self._display.note(noted(note))
        await self._named(checked)  # before anything is started
        application_of = application(self._gateway)
        http = server(application_of, self._settings.serve.address, "serve.listen_addr", _https(self._settings))
        lock = OwnerLock(self._directory)
        if not lock.try_acquire():
            raise StateError(
                f"another `rollout serve` uses the directory {self._directory}: end it, or set serve.dir to another one"
            )
        try:
            self._cluster.tell()
            async with self._cluster.prepared(), self._cluster.reached(_FIRST_PATIENCE_S) as runs:
                replicas = ReplicaRuns(
                    runs, self._workload, self._target, self._snapshots, self._directory, self._display
                )
                await self._serve(http, replicas, runs, checked)
        finally:
            lock.release()

    async def _named(self, checked: ServeChecked) -> None:
        """Resolve the model, after waiting for the first snapshot of a followed run. Raises ConfigError or
        NotFoundError."""
        while True:
            try:
                return await self._snapshots.find(checked, checked.snapshots)
            except NoSnapshotYetError as error:
                if not self._settings.model.follow:
                    raise
                self._display.step(f"waiting: {error.message}")
                await asyncio.sleep(FOLLOW_S)

    async def _checked(self, settings: ServeConfig) -> ServeChecked:
        reading = InputReader(exclude=self._directory, cloud=cloud_of(settings))
        return await asyncio.to_thread(self._workload.check, settings, reading)

    async def _serve(self, http: Server, replicas: ReplicaRuns, runs: Runs, checked: ServeChecked) -> None:
        """Serve until told to stop. Raises RolloutError if serving becomes impossible."""
        url = f"{http.url}{self._settings.serve.root_path}/v1"
        serving = asyncio.create_task(http.run_until_cancelled())
        working = asyncio.create_task(self._generations(runs, replicas, checked, url))
        ending = asyncio.create_task(self._ending.wait())
        failing = self._cluster.failure or asyncio.Future[None]()
        self._serves = True
        self._display.event("listening", f"listening at {url}, and starting engines", url=url)
        try:
            await asyncio.wait({serving, working, ending, failing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, failing, serving):
                if task.done():
                    task.result()
            await self._drain()
        finally:
            tasks = [working, ending, serving, *self._retiring]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            runs.patience_s = _LAST_PATIENCE_S
            for one in list(replicas.open):
                with suppress(RolloutError):
                    await replicas.end(one)

    async def _drain(self) -> None:
        """Finish running requests within the drain time."""
        gateway = self._gateway
        gateway.draining = True
        if running := gateway.in_flight:
            said = f"{running} running requests are finished first; Ctrl-C once more ends at once"
            self._display.event("draining", said, in_flight=running)
        with suppress(TimeoutError):
            async with asyncio.timeout(gateway.config.serve.drain_s):
                await gateway.idle.wait()

    # ---- generations

    async def _generations(self, runs: Runs, replicas: ReplicaRuns, checked: ServeChecked, url: str) -> None:
        """Start the first generation, and another one whenever the configuration or the followed run asks for it."""
        await replicas.take_over()
        first = await self._begun(replicas, checked, self._settings)
        runs.patience_s = _PATIENCE_S
        self._gateway.switch(first.generation)
        await first.ready(self._settings, self._display)
        self._display.close()
        name = self._settings.names[0]
        said = f"{name} is served at {url} (run {short(first.run_id)}); Ctrl-C ends it"
        self._display.event("ready", said, url=url, model=name, run_id=first.run_id)
        latest = first
        while True:
            if not await self._wish(replicas, latest):
                continue
            try:
                latest = await self._follow(replicas, latest)
            except RolloutError as error:
                latest.check()
                self._display.note(f"warning: nothing was changed: {error.message}")

    async def _wish(self, replicas: ReplicaRuns, latest: Replicas) -> bool:
        """Wait until there may be another configuration or snapshot. Raises RolloutError if the run has ended."""
        told = asyncio.ensure_future(self._told.wait())
        follows = self._settings.model.follow
        try:
            await asyncio.wait(
                {told, *latest.tasks}, timeout=FOLLOW_S if follows else None, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            told.cancel()
        latest.check()
        return self._told.is_set() or (follows and await self._newer(replicas, latest))

    async def _newer(self, replicas: ReplicaRuns, latest: Replicas) -> bool:
        try:
            return await replicas.newer(latest)
        except RolloutError:  # the other cluster is away: what is served stays
            return False

    async def _follow(self, replicas: ReplicaRuns, latest: Replicas) -> Replicas:
        """Apply a new configuration or snapshot, and return the current replicas. If it raises RolloutError, nothing
        has changed."""
        told = self._told.is_set()
        self._told.clear()
        settings = self._read() if told else self._settings
        checked = await self._admitted(replicas, settings)
        if checked.config["executors"] != latest.engine:
            latest = await self._switched(replicas, checked, settings, latest)
        if settings.serve.listen_addr != self._settings.serve.listen_addr:
            self._display.note("note: serve.listen_addr holds from the next start on")
        self._settings = settings
        self._gateway.take(settings)
        if told:
            self._display.note("the configuration was read again")
        return latest

    async def _admitted(self, replicas: ReplicaRuns, settings: ServeConfig) -> ServeChecked:
        """Check new settings; their API keys apply from now on. Raises RolloutError."""
        with self._at_place():
            checked = await replicas.named(await self._checked(settings))
            self._gateway.admit(read_keys(settings.serve.api_keys_env, os.environ))
        return checked

    async def _switched(
        self, replicas: ReplicaRuns, checked: ServeChecked, settings: ServeConfig, before: Replicas
    ) -> Replicas:
        """Send requests to the new model once it is ready; requests already running finish at the old one."""
        after = await self._begun(replicas, checked, settings)
        self._gateway.coming = after.generation
        try:
            await self._ready(replicas, after, settings, before)
        except RolloutError:
            await replicas.end(after)
            raise
        finally:
            self._gateway.coming = None
        self._display.close()
        self._gateway.switch(after.generation)
        label = after.generation.label
        said = f"{settings.names[0]}: model {label} answers (run {short(after.run_id)})"
        self._display.event("switched", said, model=label, run_id=after.run_id)
        retiring = asyncio.create_task(self._retired(replicas, before))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        return after

    async def _ready(self, replicas: ReplicaRuns, after: Replicas, settings: ServeConfig, before: Replicas) -> None:
        """Wait until the new generation is ready. Raises RolloutError if it does not start, if the old one has ended,
        or if another model is asked for meanwhile."""
        ready = asyncio.ensure_future(after.ready(settings, self._display))
        again = False
        try:
            while not ready.done():
                told = asyncio.ensure_future(self._told.wait())
                await asyncio.wait({ready, told, *before.tasks}, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
                if ready.done():
                    break
                before.check()
                self._told.clear()
                again = True
                if not await self._asks_for(replicas, after):
                    raise StateError("another model was asked for before this one was ready")
            ready.result()
        finally:
            ready.cancel()
            await asyncio.wait({ready})
            if again:
                self._told.set()  # what else was changed holds then

    async def _asks_for(self, replicas: ReplicaRuns, coming: Replicas) -> bool:
        """Return whether the configuration still asks for this model. A configuration with faults changes nothing."""
        try:
            checked = await self._admitted(replicas, self._read())
        except RolloutError as error:
            self._display.note(f"warning: nothing was changed: {error.message}")
            return True
        return checked.config["executors"] == coming.engine

    async def _retired(self, replicas: ReplicaRuns, before: Replicas) -> None:
        """End the old generation in the background: a request may take long, and the configuration must be read
        meanwhile."""
        await before.generation.exchange.idle.wait()
        self._gateway.generations.remove(before.generation)
        await replicas.end(before)

    async def _begun(self, replicas: ReplicaRuns, checked: ServeChecked, settings: ServeConfig) -> Replicas:
        return await replicas.begin(checked, settings, self._gateway.metrics.replays.inc)


def _https(settings: ServeConfig) -> Https | None:
    serve = settings.serve
    if not serve.tls_cert:
        return None
    return Https(Path(serve.tls_cert).expanduser(), Path(serve.tls_key).expanduser(), "serve.tls_cert")
