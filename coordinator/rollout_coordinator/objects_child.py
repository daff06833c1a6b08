"""Starts and supervises the objects server, a process of its own, so that gigabytes never delay a beat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import ConfigError, RolloutError, StorageUnavailableError, UnavailableError
from rollout.processes.backoff import Backoff
from rollout.processes.child import PIPE, Child
from rollout.processes.interpreter import python_module
from rollout.processes.supervised import STOP_LIMIT_S, Supervised

from rollout_coordinator.clock import Clock

log = structlog.get_logger()

READY_LIMIT_S = 60.0
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
STEADY_S = 30.0
_ERRORS: dict[object, type[RolloutError]] = {e.code: e for e in (ConfigError, StorageUnavailableError)}


class ObjectsChild(Supervised):
    """`start` returns once it listens; afterwards a dead server is restarted on the same address."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        clock: Clock,
        on_addr: Callable[[str], None],
        on_errors: Callable[[int], object],
    ) -> None:
        super().__init__(Backoff(BACKOFF_S, BACKOFF_MAX_S, STEADY_S), lambda: clock.now().mono)
        self._settings = settings
        self._ulid = clock.ulid
        self._on_addr = on_addr
        self._on_errors = on_errors
        self._prepared = False
        self._listen = settings.objects.listen_addr
        self._epoch = 0
        self.addr = ""
        self.ready = asyncio.Event()  # set whenever it has begun to serve

    async def prepare(self) -> None:
        """Start the process, which loads its modules while this one opens its database, and waits for its
        configuration."""
        await self._execute()
        self._prepared = True

    async def _execute(self) -> Child:
        command = python_module("rollout_coordinator.objects_server")
        self._child = await Child.start(command, stdin=PIPE, stdout=PIPE)
        return self._child

    async def start(self) -> None:
        """Start serving. Raises ConfigError, StorageUnavailableError (its database is unavailable) or UnavailableError
        if it does not come up."""
        await self._spawn()
        self.watch()

    def set_epoch(self, epoch: int) -> None:
        """Send it a new epoch."""
        self._epoch = max(epoch, self._epoch)
        if self._child is not None:
            self._child.say({"epoch": self._epoch})

    async def _spawn(self) -> None:
        objects = self._settings.objects.model_dump() | {"listen_addr": self._listen}
        child = self._child
        if not self._prepared or child is None:
            child = await self._execute()
        self._prepared = False
        try:
            child.say(
                {
                    "objects": objects,
                    "storage": self._settings.storage.model_dump(),
                    "cloud": self._settings.cloud.model_dump(exclude_unset=True),
                    "transport": self._settings.transport.model_dump(),
                    "incarnation": self._ulid(),
                    "epoch": self._epoch,
                }
            )
            message = await asyncio.wait_for(child.hear(), READY_LIMIT_S) or {}
            if message.get("event") != "objects_ready":
                text = str(message.get("message") or "it ended before it was ready; its log says why")
                kind = _ERRORS.get(message.get("code"), UnavailableError)
                raise kind(f"The objects server did not start: {text}")
        except TimeoutError as error:
            await child.end(STOP_LIMIT_S)
            raise UnavailableError(f"The objects server was not ready within {READY_LIMIT_S:g} s.") from error
        except BaseException:
            await child.end(STOP_LIMIT_S)
            raise
        self.addr = str(message["addr"])
        if not self._listen or self._listen.endswith(":0"):
            # Workers keep the address: a restarted server listens where the first one did.
            host = (self._listen or self._settings.transport.listen_addr).rpartition(":")[0]
            self._listen = f"{host}:{self.addr.rpartition(':')[2]}"
        self._on_addr(self.addr)
        self.ready.set()

    async def launch(self) -> None:
        await self._spawn()
        log.info("objects_server_restarted", addr=self.addr)

    def restarts(self, end: int | Exception, pause_s: float) -> bool:
        if isinstance(end, int):
            self._on_errors(1)
            log.error("objects_server_died", code=end, restart_in_s=pause_s)
        else:
            log.error("objects_server_not_started", error=str(end), retry_in_s=pause_s)
        return True

    async def ended(self) -> int:
        """Wait for its end, counting what it reports until then."""
        assert self._child is not None
        while (message := await self._child.hear()) is not None:
            count = message.get("count")
            self._on_errors(count if isinstance(count, int) else 0)
        return await self._child.wait()
