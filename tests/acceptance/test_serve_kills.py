"""Engines, workers and the coordinator are killed under `rollout serve`: every stream ends, and whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from bare_vllm import answers
from cluster import Cluster, Node, binary, free_port, write_toml

pytestmark = pytest.mark.timeout(240)

PROMPT = " ".join(f"word-{n}" for n in range(60))
CLIENTS = 24


@contextmanager
def serving(cluster: Cluster, **serve: object) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    sections = {
        "model": {"uri": "mock"},
        "backend": {"kind": "mock", "token_ms": 20},
        "serve": {"listen_addr": address, "served_name": "m", "max_replicas": 2, **serve},
    }
    config = write_toml(cluster.root / "serve.toml", sections)
    command = [binary("rollout"), "serve", "--config", str(config), *cluster.operator()]
    log = cluster.root / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=cluster.root, stdout=out, stderr=out)
    try:
        until(lambda: process.poll() is not None or answers(f"http://{address}/health"), 60)
        assert process.poll() is None, log.read_text()[-3000:]
        yield f"http://{address}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        finally:
            process.kill()
    assert process.returncode in (0, 130), log.read_text()[-3000:]


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def engines(worker: Node) -> list[psutil.Process]:
    assert worker.process is not None
    found = psutil.Process(worker.process.pid).children(recursive=True)
    return [child for child in found if any("runner" in part for part in child.cmdline())]


async def one(session: aiohttp.ClientSession, url: str, name: str) -> str:
    """The text of a stream."""
    body = {"model": "m", "prompt": f"{name} {PROMPT}", "stream": True, "max_tokens": 500, "temperature": 0}
    text = ""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        last = ""
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
            elif line.startswith(b"data: "):
                last = line.decode().strip()
        assert last == "data: [DONE]", last
    return text


async def load(url: str, kills: list[Callable[[], None]], *, gap_s: float) -> int:
    """Streams of CLIENTS clients while `kills` are done one after the other; how many ended, each of them whole."""
    over = asyncio.Event()
    ended = 0

    async def client(session: aiohttp.ClientSession, n: int) -> None:
        nonlocal ended
        k = 0
        while not over.is_set():
            name = f"{n}-{k}"
            assert await one(session, url, name) == f"MOCK:{name} {PROMPT}"
            ended, k = ended + 1, k + 1

    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for n in range(CLIENTS):
            group.create_task(client(session, n))
        for kill in kills:
            await asyncio.sleep(gap_s)
            await asyncio.to_thread(kill)
        await asyncio.sleep(gap_s)
        over.set()
    return ended


def test_every_stream_ends_whole_whatever_is_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        coordinator = cluster.add_coordinator()
        coordinator.wait_event("coordinator_ready")
        workers = [cluster.add_worker(), cluster.add_worker()]

        def kill_engine() -> None:
            (child, *_) = engines(workers[0])
            os.kill(child.pid, signal.SIGKILL)

        def kill_worker() -> None:
            workers[1].kill()
            workers[1].start()

        def kill_coordinator() -> None:
            coordinator.kill()
            coordinator.start()

        with serving(cluster) as url:
            until(lambda: all(map(engines, workers)), 30)
            ended = asyncio.run(load(url, [kill_engine, kill_worker, kill_coordinator], gap_s=4.0))
    assert ended >= 3 * CLIENTS
