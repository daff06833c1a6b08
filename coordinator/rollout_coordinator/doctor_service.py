"""What a coordinator reports about itself to `rollout doctor`."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollout.cli.descriptors import open_files_limit
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import StorageError
from rollout.objects.opening import backend_name
from rollout.objects.place import place_of
from rollout.security.roles import caller
from rollout.storage.port import Storage
from rollout.wire.v1 import doctor_pb2, doctor_pb2_grpc

from rollout_coordinator.clock import Clock
from rollout_coordinator.connections import DESCRIPTORS
from rollout_coordinator.leadership import Gate, Leadership, Part

STORAGE_LIMIT_S = 3.0


class DoctorService(doctor_pb2_grpc.DoctorServicer):
    """Answers callers with any certificate of the cluster, including a host's, even while it stands by or its database
    fails: that is when users ask, and no process can buy a certificate then.

    `addr`, `join_addr` and `certificate_ends` (unix seconds) are known once it listens.
    """

    def __init__(
        self, gate: Gate, leadership: Leadership, storage: Storage, settings: CoordinatorSettings, clock: Clock
    ) -> None:
        self._gate = gate
        self._leadership = leadership
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._started_ms = clock.now().wall_ms
        self.addr = self.join_addr = ""
        self.objects_addr: Callable[[], str] = lambda: ""
        self.certificate_ends: Callable[[], float] = lambda: 0.0

    async def Examine(self, request: doctor_pb2.ExamineRequest, context: Any) -> doctor_pb2.ExamineReply:
        async with self._gate.answering(context):
            self._gate.check_host(caller(context))
            self._gate.identified(context)
            return await self._examine()
        raise AssertionError

    async def _examine(self) -> doctor_pb2.ExamineReply:
        leadership, settings = self._leadership, self._settings
        seconds, fault = await self._storage_latency()
        leading = leadership.part in (Part.LEADER, Part.REPLAYING)
        return doctor_pb2.ExamineReply(
            epoch=leadership.epoch,
            part=str(leadership.part),
            leader=self.addr if leading else leadership.leader_address,
            trouble=leadership.trouble or fault,
            host=platform.node(),
            version=version("rollout-engine"),
            python=platform.python_version(),
            now_ms=self._clock.now().wall_ms,
            started_ms=self._started_ms,
            storage=settings.storage.backend,
            storage_ms=seconds * 1000,
            join_addr=self.join_addr,
            objects_addr=self.objects_addr(),
            coordinators=settings.transport.coordinator_addrs,
            open_files=await asyncio.to_thread(lambda: sum(1 for _ in os.scandir(DESCRIPTORS))),
            open_files_limit=min(open_files_limit(), (1 << 32) - 1),
            certificate_ends_ms=int(self.certificate_ends() * 1000),
            objects=self._objects(),
            disks=await asyncio.to_thread(self._disks),
        )

    def _objects(self) -> str:
        settings = self._settings
        place, at = place_of(settings.objects, settings.storage, settings.cloud), settings.cloud.endpoint_of_objects
        return f"{place} at {at}" if "://" in place and at else place

    async def _storage_latency(self) -> tuple[float, str]:
        """Return the seconds of one read, or 0 and why it failed."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(STORAGE_LIMIT_S):
                await self._storage.get("security", "ca")
        except TimeoutError:
            return 0.0, f"its database did not answer within {STORAGE_LIMIT_S:g} s"
        except StorageError as error:
            return 0.0, str(error)
        return time.perf_counter() - began, ""

    def _disks(self) -> list[doctor_pb2.DiskSpace]:
        settings = self._settings
        places: list[tuple[str, Path]] = []
        if settings.storage.backend == "embedded":
            places.append(("database", Path(settings.storage.embedded.path).expanduser().parent))
        if backend_name(settings.objects, settings.storage, settings.cloud) == "fs":
            places.append(("objects", Path(settings.objects.path).expanduser()))
        found: list[doctor_pb2.DiskSpace] = []
        for what, path in places:
            try:
                space = shutil.disk_usage(path)
            except OSError:
                continue  # a read of the database says that better
            found.append(doctor_pb2.DiskSpace(what=what, path=str(path.resolve()), free=space.free, total=space.total))
        return found
