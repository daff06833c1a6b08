"""A coordinator in this process, fake workers and clients over real mTLS: submit, dispatch, result, watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator_peers import FakeClient, FakeWorker, config, items, ulid
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings
from rollout_coordinator.lifecycle import Coordinator, started
from rollout_coordinator.wiring import Parts, build


@asynccontextmanager
async def coordinator(
    directory: Path, *, listen: str = "127.0.0.1:0", extra: str = "", **seams: Any
) -> AsyncIterator[tuple[Coordinator, Parts]]:
    settings = load_settings(CoordinatorSettings, config(directory, listen, extra=extra))
    parts = build(settings, **seams)
    exits: list[int] = []
    node = await started(parts, exit_hard=exits.append)
    running = asyncio.create_task(node.run())
    try:
        serving = asyncio.create_task(node.serving.wait())
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if running.done():
            raise AssertionError(f"ended with {running.result()}")
        yield node, parts
    finally:
        node.stop()
        await running


async def test_submit_dispatch_result_watch(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        rows = items(1000)
        replies = await client.submit(run_id, [rows[i : i + 100] for i in range(0, 1000, 100)])
        assert replies[0].status.state == "running" and replies[0].objects_addr
        assert replies[-1].durable == 1000 and replies[-1].sealed
        log, status = await client.collect(run_id)
        assert [seq for seq, _ in log] == list(range(1000))
        assert [data for _, data in log] == [f"done row {n}".encode() for n in range(1000)]
        assert (status.state, status.cursor, status.done, status.units_out) == ("completed", 1000, 1000, 3000)
        await worker.until(lambda: worker.accepted == 1000)
        assert worker.contexts == {run_id: b'{"a":1}'} and not worker.failures
        assert len(set(worker.assigned)) == 1000
        assert (await client.get(run_id)).state == "completed"  # from the ledger: the core has dropped it
        await client.close()
        await worker.stop()
