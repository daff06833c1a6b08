"""A client process that lives as long as the soak and uses the client library all the time.

    python soak_client.py --coordinator ADDR [--coordinator ADDR] --tls-dir DIR --stop FILE --certificate-lifetime-s S

One run stays open all the time and gets a few items a second, some of which spawn children; beside it, short runs one
after another, every second of them deleted afterwards. Checks each commit log as it comes. One JSON object a line on
stdout: `gauge` (asyncio tasks), `run_done`, `stream_done`, and `fault`, which is a finding. Ends when FILE appears.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.model.run import RunSpec

RUN_ITEMS = 40
STREAM_EVERY_S = 2.0
FAMILY_EVERY = 4  # each n-th item of the stream is a parent
PATIENT = ItemSpec(max_worker_lost=1000)  # workers are killed all the time: a lost attempt is no fault of its item


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event} | fields), flush=True)


def stream_payload(n: int) -> dict[str, Any]:
    if n % FAMILY_EVERY == 0:
        return {"spawn": [{"sleep_ms": 50, "data": f"{n}.{child}"} for child in range(3)]}
    return {"sleep_ms": 100, "data": n}


def stream_result(n: int) -> bytes:
    if n % FAMILY_EVERY == 0:
        return json.dumps([f"{n}.{child}" for child in range(3)], separators=(",", ":")).encode()
    return str(n).encode()


def item(n: int, payload: dict[str, Any]) -> NewItem:
    body = json.dumps(payload).encode()
    return NewItem(hashlib.sha256(b"%d " % n + body).digest(), body, PATIENT)


async def follow(client: Runs, run_id: str, expected: Any) -> int:
    """Read a run's commit log to its end; rows. A `fault` for each row that is not the expected one."""
    n = 0
    async for page in client.watch(run_id):
        for entry in page.entries:
            if entry.seq != n or entry.outcome is not Outcome.DONE or entry.data != expected(n):
                say("fault", run=run_id, at=n, seq=entry.seq, outcome=entry.outcome.name, data=repr(entry.data)[:200])
            n += 1
    return n


async def stream(client: Runs, stop: Path) -> None:
    spec = RunSpec(new_ulid(), "script", b"{}", name="stream")
    await client.submit(spec, lambda seq: iter(()), seal=False)
    reading = asyncio.create_task(follow(client, spec.run_id, stream_result))
    n = 0
    while not stop.exists():
        end = n + 4
        await client.submit(
            spec, lambda seq, end=end: iter([item(k, stream_payload(k)) for k in range(seq, end)]), seal=False
        )
        n = end
        await asyncio.sleep(STREAM_EVERY_S)
    await client.submit(spec, lambda seq: iter(()))
    read = await reading
    if read != n:
        say("fault", run=spec.run_id, submitted=n, read=read)
    say("stream_done", rows=read, run=spec.run_id)


async def short_runs(client: Runs, stop: Path) -> None:
    n = 0
    while not stop.exists():
        spec = RunSpec(new_ulid(), "script", b"{}", name=f"short-{n}")
        items = [item(k, {"sleep_ms": 150, "data": k}) for k in range(RUN_ITEMS)]
        await client.submit(spec, lambda seq, items=items: iter(items[seq:]))
        read = await follow(client, spec.run_id, lambda k: str(k).encode())
        if read != RUN_ITEMS:
            say("fault", run=spec.run_id, submitted=RUN_ITEMS, read=read)
        if n % 2:
            await client.delete(spec.run_id)
        n += 1
        say("run_done", rows=read, run=spec.run_id)


async def gauges(stop: Path) -> None:
    began = asyncio.get_running_loop().time()
    while not stop.exists():
        say("gauge", at=asyncio.get_running_loop().time() - began, tasks=len(asyncio.all_tasks()))
        await asyncio.sleep(10)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", action="append", required=True)
    parser.add_argument("--tls-dir", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--certificate-lifetime-s", type=float, required=True)
    args = parser.parse_args()
    async with await Runs.connect(
        args.coordinator, tls_dir=args.tls_dir, lifetime_s=args.certificate_lifetime_s
    ) as client:
        await asyncio.gather(stream(client, args.stop), short_runs(client, args.stop), gauges(args.stop))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
