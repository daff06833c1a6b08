"""Trials without a cluster: the executor of jobs over a real provider, with a context that keeps objects in a directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout.model.errors import AttemptError, NotFoundError
from rollout.model.item import Blob, ItemSpec, Key, NewItem
from rollout.objects.digest import hash_file, object_id
from rollout.objects.tree import upload
from rollout.snapshots.tar import unpack
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.load_task import load_task
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.trial import TrialSpec
from rollout_worker.executors.job import JobExecutor
from rollout_worker.executors.port import Attempt, Child, Replica, Run
from rollout_worker.sandboxes.local import LocalProvider
from rollout_worker.sandboxes.local_sandbox import LocalSandbox
from rollout_worker.sandboxes.port import Provider


class Objects:
    """A store that is a directory, laid out as a host's cache."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "cache"

    def _path(self, name: bytes) -> Path:
        path = self.directory / name.hex()[:2] / name.hex()
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    async def has(self, object_ids: list[bytes]) -> list[bool]:
        return [self._path(name).exists() for name in object_ids]

    async def put(self, data: bytes) -> bytes:
        name = object_id(data)
        self._path(name).write_bytes(data)
        return name

    async def put_path(self, path: Path, *, known_id: bytes | None = None) -> bytes:
        name = known_id or hash_file(path)[0]
        self._path(name).write_bytes(path.read_bytes())
        return name

    def path(self, name: bytes) -> Path:
        path = self._path(name)
        if not path.exists():
            raise NotFoundError(f"there is no object {name.hex()}")
        return path


class FakeContext:
    """Of one attempt."""

    def __init__(self, objects: Objects, scratch: Path, told: asyncio.Event) -> None:
        self._objects = objects
        self._told = told
        self.scratch = scratch
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.hindrances: list[str] = []
        scratch.mkdir(parents=True, exist_ok=True)

    def progress(self, note: str, **figures: float | str | None) -> None:
        self.told.append((note, figures))
        self._told.set()

    def hindered(self, message: str, *, code: str = "") -> None:
        if message:
            self.hindrances.append(message)

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        raise NotImplementedError

    def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        raise NotImplementedError

    async def put_object(self, data: bytes | Path) -> bytes:
        return await (self._objects.put(data) if isinstance(data, bytes) else self._objects.put_path(data))

    async def get_object(self, blob: Blob) -> bytes:
        assert isinstance(blob, bytes)
        return blob

    async def object_path(self, object_id: bytes) -> Path:
        return self._objects.path(object_id)

    async def call_plugin(self, name: str, method: str, payload: Any, timeout_s: float = 60.0) -> Any:
        raise NotImplementedError

    def replica(self) -> Replica:
        raise NotImplementedError


class Rig:
    """One started executor."""

    def __init__(self, job: JobConfig, directory: Path) -> None:
        self.job = job
        self.directory = directory
        self.objects = Objects(directory)
        self.executor = JobExecutor()
        self.contexts: list[FakeContext] = []
        self._told = asyncio.Event()
        self._trees: dict[str, str] = {}
        self._number = 0

    async def start(self, tasks: Sequence[Path]) -> None:
        for task in tasks:
            await self.add(task)
        config = {"job": self.job.model_dump(mode="json"), "trees": self._trees}
        self.run = Run("run-1", "job", config)
        await self.executor.start(self.run, self.context())  # pyright: ignore[reportArgumentType]

    async def add(self, task: Path) -> str:
        checksum = (await upload(task, self.objects)).hex()
        self._trees[checksum] = checksum
        return checksum

    def context(self) -> FakeContext:
        self._number += 1
        context = FakeContext(self.objects, self.directory / "scratch" / str(self._number), self._told)
        self.contexts.append(context)
        return context

    async def until(self, phase: str) -> None:
        """Until the next trial is there."""
        self.contexts.clear()
        while not any(note == phase for context in self.contexts for note, _ in context.told):
            self._told.clear()
            await self._told.wait()

    @property
    def provider(self) -> Provider:
        trials = self.executor._trials  # pyright: ignore[reportPrivateUsage]
        provider = trials and trials._provider  # pyright: ignore[reportPrivateUsage]
        assert provider is not None
        return provider

    def sandboxes(self) -> list[LocalSandbox]:
        """That are there now."""
        provider = self.provider
        assert isinstance(provider, LocalProvider)
        return list(provider._sandboxes.values())  # pyright: ignore[reportPrivateUsage]

    def boxes(self) -> list[str]:
        """Of sandboxes that are there."""
        return sorted(path.name for path in (self.directory / "cache-sandboxes" / "boxes").iterdir())

    async def attempt(
        self,
        task: Path,
        *,
        agent: str | None = None,
        number: int = 1,
        most: int = 3,
        predecessor: TrialRecord | None = None,
        **spec: Any,
    ) -> TrialRecord:
        """One try; AttemptError, whose `data` is the record, where it has no valid reward."""
        loaded = load_task(task).task
        told = TrialSpec(
            id="0" * 64,
            dataset="d",
            task=loaded.name,
            checksum=await self.add(task),
            dialect=loaded.dialect_name,
            agent=agent or self.job.agents[0].id,
            attempt=1,
            **spec,
        )
        attempt = Attempt(
            Key(1, self._number),
            number,
            b"\0" * 32,
            told.encode(),
            ItemSpec(max_attempts=most),
            self.run,
            predecessor=None if predecessor is None else predecessor.encode(),
        )
        done = await self.executor.run(attempt, self.context())  # pyright: ignore[reportArgumentType]
        record = TrialRecord.decode(done.data)
        assert done.keeps == (bytes.fromhex(record.files or ""),)
        return record

    async def trial(self, task: Path, **settings: Any) -> TrialRecord:
        """Its record, whether it has a valid reward or not."""
        try:
            return await self.attempt(task, **settings)
        except AttemptError as error:
            if not error.data:
                raise
            return TrialRecord.decode(error.data)

    def files(self, record: TrialRecord) -> dict[str, str]:
        """What the trial left, by path."""
        name = bytes.fromhex(record.files or "")
        self._number += 1
        directory = self.directory / "unpacked" / str(self._number)
        unpack(self.objects.path(name), directory, name)
        return {
            str(path.relative_to(directory)): path.read_text(errors="replace")
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }


def job(provider: str, *agents: Mapping[str, Any], **keys: Any) -> JobConfig:
    environment = {"type": provider, **keys.pop("environment", {})}
    named = list(agents) or [{"name": "oracle"}]
    return JobConfig.model_validate({"agents": named, "datasets": [{"path": "d"}], "environment": environment, **keys})


@asynccontextmanager
async def rig(config: JobConfig, directory: Path, *tasks: Path) -> AsyncIterator[Rig]:
    """Started, and closed again."""
    opened = Rig(config, directory)
    await opened.start(tasks)
    try:
        yield opened
    finally:
        await opened.executor.close()
