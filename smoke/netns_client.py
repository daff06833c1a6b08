"""A client that keeps one run busy until FILE appears, and writes down every committed row as it comes.

    python netns_client.py --coordinator ADDR [--coordinator ADDR] --tls-dir DIR --stop FILE --rows FILE --effects DIR
        [--ahead N] [--exclusive-every N] [--exclusive-ms MS]

Rows are numbers; most sleep a moment, some long enough to be under way when a link is cut, some are exclusive: each
of these holds a lock of its own while it runs, and notes its starts and ends and whether another attempt held the lock
in a file of its own below DIR. One JSON line per committed row in `--rows`; on stdout at the
end one JSON object: rows submitted, rows committed, state.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import ItemSpec, NewItem
from rollout.model.run import Order, RunSpec

AHEAD = 400  # rows submitted and not committed, about: more than pass while one long row holds up the cursor
CHUNKS = 10  # to which these are submitted
LONG_EVERY, LONG_MS = 37, 4000
EXCLUSIVE_EVERY, EXCLUSIVE_MS = 29, 6000  # longer than a fence takes: a cut worker kills those that it runs
SHORT_MS = 250


def item(n: int, args: argparse.Namespace) -> NewItem:
    payload: dict[str, Any] = {"sleep_ms": LONG_MS if n % LONG_EVERY == 0 else SHORT_MS, "data": n}
    spec = ItemSpec(max_worker_lost=100)
    if n % args.exclusive_every == 0:
        effects, lock = str(args.effects / str(n)), str(args.effects / f"{n}.lock")
        payload |= {"sleep_ms": args.exclusive_ms, "effects": effects, "alone": lock}
        spec = ItemSpec(max_worker_lost=100, max_attempts=100, exclusive=True)
    body = json.dumps(payload).encode()
    return NewItem(hashlib.sha256(body).digest(), body, spec)


class Effect(NamedTuple):
    """What an attempt of an exclusive row wrote down: `start`, `end`, `cancelled`, or `beside` another that still ran.

    One that is killed writes no end, so lines alone do not tell when it was over: its lock does. `at`: monotonic, s.
    """

    what: str
    row: int
    attempt: int
    at: float


def read_effects(directory: Path) -> list[Effect]:
    found: list[Effect] = []
    for file in directory.glob("*[0-9]"):
        for line in file.read_text().splitlines():
            what, row, attempt, at = line.split()
            found.append(Effect(what, int(row), int(attempt), int(at) / 1e9))
    return found


class Feed:
    def __init__(self, client: Runs, args: argparse.Namespace) -> None:
        self.client, self.args = client, args
        self.chunk = max(1, args.ahead // CHUNKS)
        self.spec = RunSpec(new_ulid(), "script", b"{}", name="netns", order=Order.SCHEDULE)
        self.submitted = self.committed = 0
        self.state = ""
        self.opened = asyncio.Event()

    async def feed(self) -> None:
        def items(end: int) -> Any:
            def rest(seq: int) -> Iterator[NewItem]:
                return (item(n, self.args) for n in range(seq, end))

            return rest

        self.submitted = self.chunk
        await self.client.submit(self.spec, items(self.submitted), seal=False)
        self.opened.set()
        while not self.args.stop.exists():
            if self.submitted - self.committed < self.args.ahead:
                self.submitted += self.chunk
                await self.client.submit(self.spec, items(self.submitted), seal=False)
            else:
                await asyncio.sleep(0.05)
        await self.client.submit(self.spec, items(self.submitted))

    async def watch(self, out: TextIO) -> None:
        await self.opened.wait()
        async for page in self.client.watch(self.spec.run_id):
            now = time.monotonic()
            for entry in page.entries:
                data = entry.data.decode() if entry.failure is None else f"failed: {entry.failure.code}"
                row = {"seq": entry.seq, "data": data, "attempt": entry.attempt, "worker": entry.worker, "at": now}
                out.write(json.dumps(row) + "\n")
            if page.entries:
                out.flush()
                self.committed += len(page.entries)
            if page.status is not None:
                self.state = page.status.state


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", action="append", required=True)
    for name in ("--tls-dir", "--stop", "--rows", "--effects"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--ahead", type=int, default=AHEAD)
    parser.add_argument("--exclusive-every", type=int, default=EXCLUSIVE_EVERY)
    parser.add_argument("--exclusive-ms", type=int, default=EXCLUSIVE_MS)
    args = parser.parse_args()
    with args.rows.open("w") as out:
        async with await Runs.connect(args.coordinator, tls_dir=args.tls_dir, patience_s=120) as client:
            run = Feed(client, args)
            await asyncio.gather(run.feed(), run.watch(out))
    summary = {
        "event": "client_done",
        "submitted": run.submitted,
        "committed": run.committed,
        "state": run.state,
    }
    print(json.dumps(summary), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
