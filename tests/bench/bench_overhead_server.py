"""Overhead of `rollout infer batch` on a server with OpenAI's interface, over a bare asyncio client of as many requests.

Run: python tests/bench/report.py --only overhead-server
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Row, directory, spread
from openai_server import OpenAIServer
from overhead import JsonObject, Ours, alternate, write_rows

CASES = ((200, 64), (50, 32))
"""(milliseconds a request, requests at once)."""


async def serve(delay_s: float) -> None:
    server = OpenAIServer(delay_s=delay_s)
    await server.start()
    print(server.url, flush=True)
    await asyncio.Event().wait()


async def ask_all(url: str, rows: list[JsonObject], at_once: int) -> None:
    import aiohttp

    turns = asyncio.Semaphore(at_once)

    async def ask(session: aiohttp.ClientSession, row: JsonObject) -> None:
        async with turns, session.post(f"{url}/completions", json={"model": "m", "max_tokens": 64, **row}) as response:
            if json.loads(await response.read())["choices"][0]["text"] != f"echo of {row['prompt']}":
                raise RuntimeError("a row has another's answer")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:
        await asyncio.gather(*(ask(session, row) for row in rows))


def bare(url: str, rows: list[JsonObject], at_once: int) -> JsonObject:
    began = time.perf_counter()
    asyncio.run(ask_all(url, rows, at_once))
    return {"seconds": time.perf_counter() - began}


def case(root: Path, delay_ms: int, at_once: int, seconds: float, repeats: int) -> Row:
    rows: list[JsonObject] = [{"prompt": f"row {n}"} for n in range(int(seconds * at_once * 1000 / delay_ms))]
    source = write_rows(root / "rows.jsonl", rows)
    command = [sys.executable, __file__, "--serve", str(delay_ms / 1000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        ours = Ours(root / "cluster", "m", {"kind": "openai", "base_url": url, "max_in_flight": at_once}, {})
        try:
            ours.run(write_rows(root / "warm.jsonl", rows[: 2 * at_once]))
            sides = {"bare": lambda: bare(url, rows, at_once), "ours": lambda: ours.run(source)}
            found = alternate(sides, repeats)
        finally:
            ours.close()
            server.terminate()
    times = {name: [float(r["seconds"]) for r in runs] for name, runs in found.items()}
    overhead = [100 * (o / b - 1) for b, o in zip(times["bare"], times["ours"], strict=True)]
    median = statistics.median(overhead)
    return Row(
        f"{len(rows):,} requests of {delay_ms} ms, {at_once} at once, over asyncio",
        f"{spread(overhead, 1)} %, {repeats} pairs (bare {spread(times['bare'])} s, ours {spread(times['ours'])})",
        "≤5 %",
        median <= 5,
        {"percent": median},
    )


def rows(quick: bool) -> list[Row]:
    seconds, repeats = (5.0, 2) if quick else (15.0, 3)
    found: list[Row] = []
    for delay_ms, at_once in CASES:
        with directory() as root:
            found.append(case(root, delay_ms, at_once, seconds, repeats))
    return found


if __name__ == "__main__" and sys.argv[1:2] == ["--serve"]:
    asyncio.run(serve(float(sys.argv[2])))
