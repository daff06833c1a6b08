"""The life of a coordinator: open, stand by, lead, be deposed, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from rollout.cli.descriptors import open_files_limit
from rollout.model import events as names
from rollout.model.errors import (
    ConfigError,
    FencedError,
    RolloutError,
    StorageDamagedError,
    StorageError,
    StorageFaultError,
    StorageFullError,
    StorageUnavailableError,
)
from rollout.security.authority import Authority
from rollout.security.credentials import Credentials
from rollout.security.roles import Role

from rollout_coordinator.connections import Door, Doorkeeper, shares
from rollout_coordinator.driver import LeaseLostError
from rollout_coordinator.health import Probes
from rollout_coordinator.leadership import Part
from rollout_coordinator.lease import LeaseKeeper
from rollout_coordinator.ledger.port import EventsOf
from rollout_coordinator.objects_opening import open_objects
from rollout_coordinator.server import bind_join_server, bind_server
from rollout_coordinator.ui_child import UiChild
from rollout_coordinator.upkeep import maintain
from rollout_coordinator.wiring import Parts, advertised, build_lease, tls_directory

log = structlog.get_logger()
T = TypeVar("T")

FENCED_CODE = 3
FENCED_EXIT_S = 4.0
STOP_GRACE_S = 1.0
LAST_WORDS_S = 1.0
LEAVING_S = 4.0
"""Time for workers that drain because their parent is gone; `parent.GRACE_S` later all of them are killed."""
OPEN_RETRY_S = 0.5
OPEN_RETRY_MAX_S = 5.0


class Alarm(Protocol):
    """The interface of `threading.Timer`: it calls its function later, even if the event loop hangs."""

    daemon: bool

    def start(self) -> None: ...
    def cancel(self) -> None: ...


class Coordinator:
    """Call `start`, then `run` until `stop` is called; `run` returns the exit code. `exit_hard` ends a deposed process.

    With `patient`, it waits for a failing database, as a daemon does; otherwise a disk fault ends it, because its user
    is present and is told. `lease`, given in place of `start`, `hint_every_s` and `alarm` are seams for simulations.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        exit_hard: Callable[[int], object] = os._exit,
        patient: bool = True,
        lease: LeaseKeeper | None = None,
        hint_every_s: float = 0.2,
        alarm: Callable[[float, Callable[[], object]], Alarm] = threading.Timer,
    ) -> None:
        self._parts = parts
        self._exit_hard = exit_hard
        self._patient = patient
        self._disk_fault: asyncio.Future[StorageFaultError] = asyncio.get_running_loop().create_future()
        self._hint_every_s = hint_every_s
        self._alarm = alarm
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._note_predecessor: Callable[[], None] | None = None
        self._fenced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._suspecting: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._servers: list[grpc.aio.Server] = []
        self._ui: UiChild | None = None
        self._credentials: Credentials | None = None
        self._lease = lease  # made once the port is bound
        self.probes = Probes(parts)
        self._frozen = False
        self.addr = self.join_addr = ""
        self.serving = asyncio.Event()  # set while this one leads
        self.ended: asyncio.Task[int] | None = None  # for those who run it as a task
        parts.driver.on_serving = self._on_serving
        parts.driver.on_reset = self._on_reset
        parts.driver.on_store = self._on_store
        if lease is not None:
            lease.on_store = self._on_store
        parts.leadership.suspect = self._suspect

    @property
    def lease(self) -> LeaseKeeper:
        assert self._lease is not None, "start() first"
        return self._lease

    # ---- start

    async def start(self) -> None:
        """Open stores and ports, waiting for an unavailable database. Raises ConfigError for what a user must
        change."""
        p = self._parts
        await p.objects_child.prepare()
        for opening in (p.ledger.open, p.storage.open):
            await self._patiently(opening)
        await self._patiently(
            lambda: open_objects(p.store, p.storage, p.settings, self._has_runs), told="objects_unavailable"
        )
        transport = p.settings.transport
        tls_dir = tls_directory(p.settings)
        authority = Authority.load_or_create(tls_dir, transport.cluster)
        await self._patiently(lambda: self._check_authority(authority, tls_dir))
        self._credentials = await Credentials.obtain(
            tls_dir=tls_dir,
            cluster=transport.cluster,
            role=Role.COORDINATOR,
            incarnation=p.incarnation,
            lifetime_s=transport.certificate_lifetime_s,
            addresses=transport.coordinator_addrs,
        )
        p.metrics.certificate.set_function(lambda credentials=self._credentials: credentials.not_after)
        await self._patiently(p.revocations.refresh)
        connections, joining = shares(open_files_limit(), join=bool(transport.join_addr))
        server, self.addr = bind_server(p, self._credentials, authority, connections)
        self._servers = [server]
        leader_addr = p.runs.leader_addr = advertised(p.settings, self.addr)
        if transport.join_addr:
            server, self.join_addr = bind_join_server(p, self._credentials, authority, joining)
            self._servers.append(server)
        doorkeeper = Doorkeeper(
            [
                Door("listen_addr", port_of(self.addr), connections),
                Door("join_addr", port_of(self.join_addr), joining, known_after_s=None),
            ],
            clock=lambda: p.clock.now().mono,
        )
        p.gate.identified = lambda context: doorkeeper.identified(context.peer())
        p.doctor.addr, p.doctor.join_addr = leader_addr, self._advertised_join(leader_addr)
        p.doctor.objects_addr = lambda: p.objects_child.addr
        p.doctor.certificate_ends = lambda credentials=self._credentials: credentials.not_after
        self._lease = build_lease(p, leader_addr)
        await self._patiently(lambda: p.members.register(leader_addr))
        self._lease.on_store = self._on_store
        await self._patiently(p.objects_child.start)
        for server in self._servers:
            await server.start()
        await self.probes.start()
        if p.settings.http.ui:
            self._ui = UiChild(p.settings, p.clock, self.addr, self.join_addr)
            self._ui.start()
        self._background = [
            asyncio.create_task(self._credentials.keep_renewed()),
            asyncio.create_task(p.revocations.run()),
            asyncio.create_task(p.members.run()),
            asyncio.create_task(doorkeeper.run()),
        ]

    def _advertised_join(self, leader_addr: str) -> str:
        """Return where others reach the join port: on the host of `leader_addr`, unless it listens on its own host."""
        host, _, port = self.join_addr.rpartition(":")
        if host in ("0.0.0.0", "[::]", ""):
            host = leader_addr.rpartition(":")[0]
        return f"{host}:{port}" if port else ""

    async def _check_authority(self, authority: Authority, tls_dir: Path) -> None:
        """Raise ConfigError, with the remedy, if coordinators of one database have different CAs."""
        storage = self._parts.storage
        if await storage.cas("security", "ca", None, authority.ca_hash):
            return
        if await storage.get("security", "ca") != authority.ca_hash:
            raise ConfigError(
                f"the CA in {tls_dir} is not the one of the other coordinators of this database: remove that directory "
                "and join with a token of `rollout-coordinator token create --role coordinator`, or, when the old CA "
                "is lost for good, give this cluster a new database"
            )

    async def _has_runs(self) -> bool:
        return bool(await self._parts.ledger.run_views((), 1))

    async def _patiently(self, opening: Callable[[], Awaitable[T]], told: str = "storage_unreachable") -> T:
        """Retry while the database is unavailable; `stop` ends the retries with the last error. `told` is the event to
        log."""
        pause = OPEN_RETRY_S
        while True:
            try:
                return await opening()
            except StorageFaultError:
                raise  # a person must do something first
            except StorageUnavailableError as error:
                log.warning(told, error=str(error), retry_in_s=pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), pause)
                if self._stop.is_set():
                    raise
                pause = min(2 * pause, OPEN_RETRY_MAX_S)

    # ---- lead

    async def run(self) -> int:
        """Stand by and lead in turn until stopped. Returns 0 for a clean stop, 1 if the store is full."""
        code = 0
        try:
            while not self._stop.is_set():
                if not await self._win():
                    break
                await self._lead()
        except (StorageFullError, StorageFaultError, StorageDamagedError) as error:
            damaged = isinstance(error, StorageDamagedError)
            remedy = "restore the database from a backup" if damaged else "nothing acknowledged is lost"
            log.error(error.code, error=str(error), action=f"stopped; {remedy}")
            code = 1
        except FencedError as error:
            await self._deposed(str(error))
            return FENCED_CODE
        await self.close()
        return code

    async def _win(self) -> bool:
        p = self._parts
        p.leadership.part = Part.STANDBY
        acquiring = asyncio.create_task(self.lease.acquire())
        told = False
        try:
            while not acquiring.done():
                stopping = asyncio.create_task(self._stop.wait())
                await asyncio.wait(
                    {acquiring, stopping, self._disk_fault},
                    timeout=self._hint_every_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                stopping.cancel()
                if self._disk_fault.done():
                    raise self._disk_fault.result()
                if self._stop.is_set():
                    return False
                p.leadership.leader_address = self.lease.leader_hint()
                if not told and not acquiring.done():
                    told = True
                    log.info(
                        "coordinator_standby",
                        addr=self.addr,
                        join_addr=self.join_addr,
                        http_addr=self.probes.addr,
                        leader=p.leadership.leader_address,
                    )
            fence = await acquiring
        finally:
            acquiring.cancel()
            await asyncio.gather(acquiring, return_exceptions=True)
        p.leadership.epoch = fence.epoch
        p.leadership.part = Part.REPLAYING
        p.metrics.epoch.set(fence.epoch)
        p.objects_child.set_epoch(fence.epoch)
        p.objects_gate.forget_all()  # another leader may have deleted some meanwhile
        await self._tell_predecessor()
        return True

    async def _tell_predecessor(self) -> None:
        """Log how and when the last tenure ended, and how long nobody led."""
        p, row = self._parts, self.lease.before
        if row is None or row.holder == p.incarnation:
            return
        now, moved = p.clock.now(), self.lease.before_moved
        moved_ms = 0 if moved is None else now.wall_ms - round((now.mono - moved) * 1000)
        seen_ms = max(moved_ms, p.members.seen_ms(row.address), await self._newest_event_ms())
        said: dict[str, Any] = {"address": row.address}
        if seen_ms:
            said |= {"seen_ms": seen_ms, "gap_s": round(max(0, now.wall_ms - seen_ms) / 1000, 1)}
        if row.released:
            log.info("predecessor_stopped", **said)
            self._note_predecessor = partial(p.history.note, "predecessor_stopped", "info", **said)
        else:
            log.warning("predecessor_failed", **said)
            self._note_predecessor = partial(p.history.note, "predecessor_failed", "warning", **said)

    async def _newest_event_ms(self) -> int:
        """Return the time of the newest event, 0 if there is none or the database is slow."""
        with contextlib.suppress(TimeoutError, StorageError):
            async with asyncio.timeout(LAST_WORDS_S):
                newest = await self._parts.ledger.newest_events(EventsOf(), 1)
                return newest[-1].at_ms if newest else 0
        return 0

    async def _lead(self) -> None:
        """Lead for one tenure. Returns when the lease ran out or after a stop. Raises FencedError or
        StorageFullError."""
        p = self._parts
        serving = asyncio.create_task(p.driver.serve_as_leader(self.lease))
        renewing = asyncio.create_task(self.lease.run_renewals())
        cleaning = asyncio.create_task(maintain(p))
        recording = asyncio.create_task(p.history.run(p.leadership.epoch))
        stopping = asyncio.create_task(self._stop.wait())
        trusting = asyncio.create_task(self._while_trusted())
        tasks: list[asyncio.Task[object]] = [serving, renewing, cleaning, recording, stopping, trusting]  # type: ignore[list-item]
        try:
            await asyncio.wait(
                {serving, renewing, stopping, trusting, self._fenced, self._disk_fault},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._disk_fault.done():
                raise self._disk_fault.result()
            if self._fenced.done():
                raise FencedError(self._fenced.result())
            if renewing.done():
                renewing.result()
            if self._stop.is_set():
                p.driver.stop()
            elif trusting.done() and not serving.done():
                raise LeaseLostError
            await serving
        except LeaseLostError:
            # First, since the store may take long to say who leads: nobody waits here for it any more.
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            p.leadership.part = Part.STANDBY
            await self._check_deposed()
            said = {"reason": "the database did not confirm in time that it still leads", "action": "it stands by"}
            log.warning("lease_lost", **said)
            p.history.note("lease_lost", "warning", **said)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            p.metrics.leader.set(0)
            self.serving.clear()
        if self._stop.is_set():
            p.history.note("coordinator_stopping", addr=p.runs.leader_addr or self.addr, reason=self._stop_reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(p.history.write(p.leadership.epoch, last=True), LAST_WORDS_S)

    async def _while_trusted(self) -> None:
        """Watch the lease while the driver waits for a store that may never respond: its workers would wait too,
        although there may be another leader."""
        while self.lease.trusted():  # noqa: ASYNC110 - trust ends by the clock, nobody tells
            await asyncio.sleep(self._hint_every_s)

    def _on_serving(self) -> None:
        p = self._parts
        p.leadership.part = Part.LEADER
        p.metrics.leader.set(1)
        if self.serving.is_set():
            return  # replayed in place
        self.serving.set()
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()  # what start-up made lives as long as the process; measured x1.16 in items/s
            gc.set_threshold(50_000, 50, 50)
        log.info(
            names.COORDINATOR_READY,
            addr=self.addr,
            join_addr=self.join_addr,
            objects_addr=p.objects_child.addr,
            http_addr=self.probes.addr,
            epoch=p.leadership.epoch,
        )
        # With what follows, so that one transaction has both.
        note, self._note_predecessor = self._note_predecessor, None
        if note is not None:
            note()
        p.history.note(names.COORDINATOR_READY, addr=p.runs.leader_addr or self.addr, epoch=p.leadership.epoch)

    def _on_store(self, error: StorageError | None) -> None:
        """Set what calls are refused with and /readyz reports while the database fails, logging each cause once."""
        trouble = "" if error is None else str(error)
        if trouble and trouble != self._parts.leadership.trouble:
            log.error(
                "database_failing",
                error=trouble,
                action="nothing is acknowledged until it works again; trying on"
                if self._patient or not isinstance(error, StorageFaultError)
                else "stopping",
            )
            self._parts.history.note("database_failing", "error", error=trouble, action="nothing was acknowledged")
        elif not trouble and self._parts.leadership.trouble:
            log.info("database_works_again")
            self._parts.history.note("database_works_again")
        self._parts.leadership.trouble = trouble
        if isinstance(error, StorageFaultError) and not self._patient and not self._disk_fault.done():
            self._disk_fault.set_result(error)

    def _on_reset(self, error: RolloutError) -> None:
        p = self._parts
        if p.leadership.part is Part.LEADER:
            p.leadership.part = Part.STOPPED if self._stop.is_set() else Part.REPLAYING
        p.router.close_all(error)
        p.relay.close_all(error)
        p.gate.end_waits(error)

    # ---- fencing

    def _suspect(self, epoch: int) -> None:
        """React to a peer that has seen a newer epoch: trust the ledger, not the peer."""
        if self._suspecting is None or self._suspecting.done():
            self._suspecting = asyncio.create_task(self._verify(epoch))

    async def _check_deposed(self) -> None:
        """Raise FencedError if another holds the lease; a store that does not respond leaves it open."""
        try:
            row = await self._parts.ledger.read_lease()
        except StorageError:
            return
        if row is not None and row.epoch != self.lease.epoch:
            raise FencedError(f"The lease is at epoch {row.epoch}, this one held {self.lease.epoch}.")

    async def _verify(self, epoch: int) -> None:
        p = self._parts
        try:
            row = await p.ledger.read_lease()
        except StorageError as error:
            log.warning("epoch_ahead", seen=epoch, epoch=p.leadership.epoch, error=str(error))
            return
        if row is not None and row.epoch > p.leadership.epoch and not self._fenced.done():
            self._fenced.set_result(f"A peer has seen epoch {epoch} and the lease is at {row.epoch}.")
        else:
            log.warning(
                "epoch_ahead",
                seen=epoch,
                epoch=p.leadership.epoch,
                hint="was the database restored from a backup? restart the workers",
            )

    async def _deposed(self, reason: str) -> None:
        """End because another coordinator leads: log one event, close everything, exit hard. Writes nothing any
        more."""
        p = self._parts
        watchdog = self._alarm(FENCED_EXIT_S, lambda: self._exit_hard(FENCED_CODE))
        watchdog.daemon = True
        watchdog.start()
        p.leadership.part = Part.STOPPED
        log.error(names.COORDINATOR_FENCED, epoch=p.leadership.epoch, reason=reason, leader=self.lease.leader_hint())
        self.lease.fenced()
        p.router.close_all(FencedError("Another coordinator leads now."))
        p.relay.close_all(FencedError("Another coordinator leads now."))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FENCED_EXIT_S / 2):
                for server in self._servers:
                    await server.stop(0.1)
                await asyncio.gather(p.objects_child.stop(), self._end_ui())
        watchdog.cancel()
        self._exit_hard(FENCED_CODE)

    # ---- stop

    def stop(self, reason: str = "") -> None:
        """Finish the current batch, release the lease and close the streams; `run` then returns. `reason` is for
        users."""
        if not self._stop.is_set():
            self._stop_reason = reason
            log.info("coordinator_stopping", addr=self._parts.runs.leader_addr or self.addr, reason=reason)
            self._stop.set()

    async def stop_after_workers(self, reason: str) -> None:
        """Stop if workers stop for the same reason: wait, for at most `LEAVING_S`, for what they return and their
        output."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S):
                while self._parts.router.has_streams:  # noqa: ASYNC110 - a stream that ends tells nobody
                    await asyncio.sleep(self._hint_every_s / 4)
        self.stop(reason)

    async def close(self) -> None:
        """Close everything, also after a `start` that failed midway."""
        p = self._parts
        p.leadership.part = Part.STOPPED
        if self._lease is not None:
            await self._lease.release()  # first: a standby takes over while this one tidies up
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for server in self._servers:
            await server.stop(STOP_GRACE_S)
        await asyncio.gather(p.objects_child.stop(), self._end_ui())
        await self.probes.stop()
        for closing in (p.store.close, p.storage.close, p.ledger.close):
            await closing()
        if p.spans is not None:
            await asyncio.to_thread(p.spans.close)
        log.info("coordinator_stopped")

    async def _end_ui(self) -> None:
        if self._ui is not None:
            await self._ui.stop()


def port_of(addr: str) -> int:
    """Return the port, 0 for none."""
    return int(addr.rpartition(":")[2] or 0)


async def started(parts: Parts, *, exit_hard: Callable[[int], object] = os._exit, patient: bool = True) -> Coordinator:
    """Return a running coordinator; one that could not start is closed again."""
    coordinator = Coordinator(parts, exit_hard=exit_hard, patient=patient)
    try:
        await coordinator.start()
    except (RolloutError, ConfigError, OSError):
        await coordinator.close()
        raise
    return coordinator
