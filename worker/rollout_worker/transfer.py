"""Transfer of large inputs and results; requests of one event-loop turn travel together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout.model.errors import RolloutError, StorageFullError
from rollout.model.item import Failure, ObjectSlice
from rollout.objects.pack import Packer
from rollout.objects.slices import SliceReader

from rollout_worker import session_events as ev
from rollout_worker.attempts import Held
from rollout_worker.executors.port import DISK_FULL, STORE_AWAY


class Transfer:
    """Transfers. Events answer `fetch` and `store`. `spawn` runs a task for the worker's lifetime."""

    def __init__(
        self,
        slices: SliceReader,
        packer: Packer,
        event: Callable[[ev.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
    ) -> None:
        self._slices = slices
        self._packer = packer
        self._event = event
        self._spawn = spawn
        self._wanted: list[Held] = []
        self._results: list[ev.Store] = []
        self._due = False

    def fetch(self, held: Held) -> None:
        self._wanted.append(held)
        self._later()

    def store(self, action: ev.Store) -> None:
        self._results.append(action)
        self._later()

    def _later(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._due = False
        wanted, self._wanted = self._wanted, []
        results, self._results = self._results, []
        packs: dict[bytes, list[Held]] = {}
        for held in wanted:
            payload = held.payload
            if isinstance(payload, ObjectSlice) and not isinstance(held.predecessor, ObjectSlice):
                packs.setdefault(payload.object_id, []).append(held)
            else:
                self._spawn(self._fetch_one(held))
        for object_id, of_pack in packs.items():
            self._spawn(self._fetch_slices(object_id, of_pack))
        if results:
            self._spawn(self._store(results))

    async def _fetch_slices(self, object_id: bytes, held: list[Held]) -> None:
        """Fetch slices; a process reads from the cache what stays a slice."""
        try:
            found = await self._slices.take(object_id, [h.payload for h in held if isinstance(h.payload, ObjectSlice)])
        except RolloutError as error:
            for one in held:
                self._event(ev.FetchFailed(one.key, _failure("its input", error)))
        else:
            self._event(ev.Fetched([ev.Input(h.key, blob, None) for h, blob in zip(held, found, strict=True)]))

    async def _fetch_one(self, held: Held) -> None:
        try:
            payload = await self._slices.read(held.payload)
            before = held.predecessor
            predecessor = None if before is None else await self._slices.read(before)
        except RolloutError as error:
            self._event(ev.FetchFailed(held.key, _failure("its input", error)))
        else:
            self._event(ev.Fetched([ev.Input(held.key, payload, predecessor)]))

    async def _store(self, actions: list[ev.Store]) -> None:
        try:
            blobs = await self._packer.add_many([action.data for action in actions])
        except RolloutError as error:
            for action in actions:
                self._event(ev.StoreFailed(action.key, _failure("its result", error)))
        else:
            for action, blob in zip(actions, blobs, strict=True):
                self._event(ev.Stored(action.key, blob))


def _failure(what: str, error: RolloutError) -> Failure:
    if isinstance(error, StorageFullError):
        return Failure(DISK_FULL, f"{what} cannot be moved: {error.message}", True)
    if error.retryable:
        return Failure(STORE_AWAY, f"{what} cannot be moved: {error.message}", True)
    return Failure("object_store", f"{what} could not be moved: {error.message}", True)
