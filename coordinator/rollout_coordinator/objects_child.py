"""Starts and supervises the objects server: its own process, so that gigabytes never delay a beat."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, cast

import structlog
from rollout.config.interpreter import python_module
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import ConfigError, RolloutError, StorageUnavailableError, UnavailableError

from rollout_coordinator.clock import Clock

log = structlog.get_logger()

READY_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
STEADY_S = 30.0  # having run this long, the next death starts with a short pause again
_ERRORS: dict[object, type[RolloutError]] = {e.code: e for e in (ConfigError, StorageUnavailableError)}


class ObjectsChild:
    """`start` returns once it listens; after that a dead server is started again on the same address."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        clock: Clock,
        on_addr: Callable[[str], None],
        on_errors: Callable[[int], object],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_addr = on_addr
        self._on_errors = on_errors
        self._process: asyncio.subprocess.Process | None = None
        self._prepared = False
        self._supervisor: asyncio.Task[None] | None = None
        self._listen = settings.objects.listen_addr
        self._epoch = 0
        self._stopping = False
        self.addr = ""
        self.ready = asyncio.Event()  # set whenever it has begun to serve

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def prepare(self) -> None:
        """Its process loads its modules, while this one opens its database, and waits to be told what to serve."""
        await self._launch()
        self._prepared = True

    async def _launch(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *python_module("rollout_coordinator.objects_server"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self._process

    async def start(self) -> None:
        """ConfigError, StorageUnavailableError (its database is away) or UnavailableError when it does not come up."""
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())

    def set_epoch(self, epoch: int) -> None:
        """Tell it of a new epoch."""
        self._epoch = max(epoch, self._epoch)
        self._write({"epoch": self._epoch})

    async def stop(self) -> None:
        """Closes its stdin, which ends it; kills it if that takes long."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None:
            await self._end(self._process)

    def _write(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _spawn(self) -> None:
        objects = self._settings.objects.model_dump() | {"listen_addr": self._listen}
        process = self._process
        if not self._prepared or process is None:
            process = await self._launch()
        self._prepared = False
        try:
            self._write(
                {
                    "objects": objects,
                    "storage": self._settings.storage.model_dump(),
                    "cloud": self._settings.cloud.model_dump(exclude_unset=True),
                    "transport": self._settings.transport.model_dump(),
                    "incarnation": self._clock.ulid(),
                    "epoch": self._epoch,
                }
            )
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), READY_LIMIT_S)
            message = _message(line)
            if message.get("event") != "objects_ready":
                text = str(message.get("message") or "it ended before it was ready; its log says why")
                kind = _ERRORS.get(message.get("code"), UnavailableError)
                raise kind(f"The objects server did not start: {text}")
        except TimeoutError as error:
            await self._end(process)
            raise UnavailableError(f"The objects server was not ready within {READY_LIMIT_S:g} s.") from error
        except BaseException:
            await self._end(process)
            raise
        self.addr = str(message["addr"])
        if not self._listen or self._listen.endswith(":0"):
            # Workers keep the address: a restarted server listens where the first one did.
            host = (self._listen or self._settings.transport.listen_addr).rpartition(":")[0]
            self._listen = f"{host}:{self.addr.rpartition(':')[2]}"
        self._on_addr(self.addr)
        self.ready.set()

    async def _supervise(self) -> None:
        pause = BACKOFF_S
        while True:
            assert self._process is not None
            began = self._clock.now().mono
            code = await self._ended(self._process)
            if self._clock.now().mono - began > STEADY_S:
                pause = BACKOFF_S
            self._on_errors(1)
            log.error("objects_server_died", code=code, restart_in_s=pause)
            while True:
                await asyncio.sleep(pause)
                pause = min(pause * 2, BACKOFF_MAX_S)
                try:
                    await self._spawn()
                except (UnavailableError, StorageUnavailableError, ConfigError) as error:
                    log.error("objects_server_not_started", error=str(error), retry_in_s=pause)
                else:
                    log.info("objects_server_restarted", addr=self.addr)
                    break

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code; what it says until then is counted."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            count = _message(line).get("count")
            self._on_errors(count if isinstance(count, int) else 0)
        return await process.wait()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _message(line: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(line)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
