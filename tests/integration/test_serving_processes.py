"""Requests of a gateway and rows of an infer run on one engine of a real worker, and a worker that leaves."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_cluster import PATIENCE_S, Engine, EngineCluster
from rollout.client.relay import Down, Draining, Event, ReplicaStream, Said, Up
from rollout.client.runs import new_ulid
from rollout.model.run import RunSpec
from rollout.workloads.infer.payload import Payload, decode_result, encode_payload
from rollout.workloads.serve.frames import Ask, Deltas, End, FromReplica, encoded, frames_of, from_replica

MODEL: dict[str, Any] = {"uri": "m", "content_id": "00" * 32}
CONFIG: dict[str, Any] = {"model": MODEL, "backend": {"kind": "mock", "token_ms": 20, "concurrency": 4}, "sampling": {}}
URL = "/v1/chat/completions"

pytestmark = pytest.mark.parametrize("rough_cluster", ["sqlite"], indirect=True)


def body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0}


class Reader:
    def __init__(self, stream: ReplicaStream) -> None:
        self.stream = stream
        self.events = aiter(stream)
        self.said: list[FromReplica] = []

    async def until(self, kind: type[Event]) -> Any:
        while True:
            event = await asyncio.wait_for(anext(self.events), PATIENCE_S)
            if isinstance(event, Said):
                self.said += from_replica(event.data)
            if isinstance(event, kind):
                return event

    async def until_said(self, kind: type[FromReplica]) -> None:
        while not any(isinstance(one, kind) for one in self.said):
            await self.until(Said)


async def submit(engine: Engine, workload: str, config: dict[str, Any], payloads: list[bytes]) -> str:
    items = [engine.item(payload, executor="infer", max_worker_lost=100) for payload in payloads]
    run = RunSpec(new_ulid(), workload, json.dumps(config).encode())
    await engine.client.submit(run, lambda seq: iter(items[seq:]))
    return run.run_id


@pytest.fixture
async def served(rough: Engine, rough_cluster: EngineCluster) -> AsyncIterator[Engine]:
    worker = rough_cluster.add_worker(worker={"executors": ["infer"], "max_engines": 2})
    await asyncio.to_thread(worker.wait_event, "worker_ready")
    yield rough
    for node in rough_cluster.workers:
        if node.alive():
            node.kill()


async def test_requests_and_rows_share_an_engine_and_a_worker_that_leaves_ends_its_requests(
    served: Engine, rough_cluster: EngineCluster
) -> None:
    serve = await submit(served, "serve", {"executors": {"infer": CONFIG}}, [b'{"replica":0}'])
    async with served.client.replicas(serve) as stream:
        reader = Reader(stream)
        up: Up = await reader.until(Up)
        row = {"custom_id": "a", "url": URL, "body": body("a row")}
        infer = await submit(served, "infer", CONFIG, [encode_payload(Payload(row, 0, "f", 1))])
        entries, _ = await served.finish(infer)
        assert decode_result(entries[0].data).choices[0].text == "MOCK:user: a row"
        (worker,) = (node for node in rough_cluster.workers if node.alive())
        assert len(worker.log.read_text().split('"engine_ready"')) == 2
        (frame,) = frames_of([encoded(Ask(1, URL, body("word " * 50)))])
        assert stream.send(up.replica, frame)
        await reader.until_said(Deltas)
        leaving = asyncio.create_task(asyncio.to_thread(worker.kill, signal.SIGTERM))
        await reader.until(Draining)
        await reader.until_said(End)
        await reader.until(Down)
        await leaving
        texts = [one.text for said in reader.said if isinstance(said, Deltas) for one in said.choices]
        assert "".join(texts).split() == ["MOCK:user:", *["word"] * 50]
