"""Accepts results that refer to objects only once those objects are durable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import structlog
from rollout.model.errors import InputError, StorageError, UnavailableError
from rollout.model.item import Failure, ObjectSlice, Outcome
from rollout.objects.port import ObjectStore

from rollout_coordinator.core.events import ResultGroup, WorkerResults

log = structlog.get_logger()

KNOWN_MAX = 100_000
OBJECT_MISSING = "object_missing"


class ObjectsGate:
    """Asks the store once per object. `forget` drops ids that were deleted."""

    def __init__(self, store: ObjectStore, on_error: Callable[[], object] = lambda: None) -> None:
        self._store = store
        self._on_error = on_error
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def missing(self, ids: Iterable[bytes]) -> set[bytes]:
        """Return those that are not in the store. Raises UnavailableError if it does not respond."""
        unknown: list[bytes] = []
        for object_id in set(ids):
            if object_id in self._known:
                self._known.move_to_end(object_id)
            else:
                unknown.append(object_id)
        if not unknown:
            return set()
        try:
            found = await self._store.has(unknown)
        except StorageError as error:
            self._on_error()
            raise UnavailableError(f"The object store does not answer: {error}") from error
        for object_id, there in zip(unknown, found, strict=True):
            if there:
                self._known[object_id] = None
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return {o for o, there in zip(unknown, found, strict=True) if not there}

    def forget(self, ids: Iterable[bytes]) -> None:
        for object_id in ids:
            self._known.pop(object_id, None)

    def forget_all(self) -> None:
        self._known.clear()

    async def check_payloads(self, ids: set[bytes]) -> None:
        """Raise InputError, naming the first missing object."""
        if not ids:
            return
        missing = await self.missing(ids)
        if missing:
            first = min(missing).hex()
            raise InputError(
                f"{len(missing)} object(s) that payloads refer to are not in the object store, the first is {first}: "
                "upload objects before the items that refer to them"
            )

    async def check_results(self, event: WorkerResults) -> None:
        """Turn each result whose object is missing into a retryable failure, in place. Failed attempts keep their
        failure and lose their evidence."""
        ids = {object_id for group in event.groups for _, object_id in _named(group)}
        if not ids:
            return
        missing = await self.missing(ids)
        if not missing:
            return
        log.warning("object_missing", session=event.session, objects=len(missing), first=min(missing).hex())
        for group in event.groups:
            for index, object_id in list(_named(group)):
                if object_id not in missing:
                    continue
                group.data[index] = b""
                group.keeps.pop(index, None)
                if index not in group.failures:
                    outcomes = group.outcome or [Outcome.DONE] * len(group.seq)
                    outcomes[index] = Outcome.FAILED
                    group.outcome = outcomes
                    group.failures[index] = Failure(
                        OBJECT_MISSING, f"The result's object {object_id.hex()} was never stored.", retryable=True
                    )


def _named(group: ResultGroup) -> Iterator[tuple[int, bytes]]:
    """Yield (entry, object) for each object that contains a result or that a result names."""
    for index, blob in enumerate(group.data):
        if isinstance(blob, ObjectSlice):
            yield index, blob.object_id
    for index, ids in group.keeps.items():
        for object_id in ids:
            yield index, object_id
