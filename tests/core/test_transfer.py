"""What becomes of an input that cannot be fetched and a result that cannot be stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rollout.model.errors import (
    NotFoundError,
    RolloutError,
    StorageFullError,
    StorageUnavailableError,
    UnavailableError,
)
from rollout.model.item import DEFAULT_SPEC, ObjectSlice
from rollout.objects.pack import Packer
from rollout_worker import session_events as ev
from rollout_worker.attempts import Held
from rollout_worker.executors.port import Run
from rollout_worker.transfer import Transfer
from session_world import LOG, RUN, plan_run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageUnavailableError("its directory is gone"), "store_unavailable"),
        (UnavailableError("nobody leads at present"), "store_unavailable"),
        (StorageFullError("3 MiB free"), "disk_full"),
        (NotFoundError("no object 00"), "object_store"),
    ],
)
async def test_a_store_that_is_away_or_full_is_no_fault_of_the_item(error: RolloutError, code: str) -> None:
    class Slices:
        async def take(self, *_: Any) -> Any:
            raise error

        read = take

    async def put(pieces: Sequence[bytes]) -> ObjectSlice:
        raise error

    events: asyncio.Queue[Any] = asyncio.Queue()
    transfer = Transfer(Slices(), Packer(put, linger_s=0.0), events.put_nowait, asyncio.ensure_future)  # type: ignore[arg-type]
    plan = plan_run(Run(RUN, "script", {}))
    of_pack, with_predecessor = (
        Held(LOG, seq, 1, bytes(32), ObjectSlice(bytes(32), 0, 8), DEFAULT_SPEC, plan) for seq in (0, 1)
    )
    with_predecessor.predecessor = ObjectSlice(bytes(32), 8, 8)
    transfer.fetch(of_pack)
    transfer.fetch(with_predecessor)
    transfer.store(ev.Store(of_pack.key, b"result"))
    told = [await asyncio.wait_for(events.get(), 10) for _ in range(3)]
    assert sorted(type(one).__name__ for one in told) == ["FetchFailed", "FetchFailed", "StoreFailed"]
    assert {one.failure.code for one in told} == {code}
    assert all(error.message in one.failure.message and one.failure.retryable for one in told)
