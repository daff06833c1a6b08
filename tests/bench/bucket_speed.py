"""A bucket's put and get beside a client of the provider's, on the same server and in turns; and the memory of a put."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from measure import Row, spread
from rollout.cloud.bucket import Bucket

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PIECE = 512 * KIB
SIZES = {"1 KiB": KIB, "1 MiB": MIB, "256 MiB": 256 * MIB, "2 GiB": 2 * GIB}
TARGET = 0.95
PARTS = 3
CLOUD = Path(__file__).resolve().parents[1] / "cloud"


@dataclass
class Peer:
    """A provider's client. `get` reads the whole of an object and forgets it."""

    name: str
    put: Callable[[str, bytes], Awaitable[None]]
    get: Callable[[str], Awaitable[None]]


@dataclass
class Figures:
    """MB/s: ours and the peer's, in turns."""

    ours: list[float] = field(default_factory=list[float])
    theirs: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)


async def body(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]


async def ours_put(bucket: Bucket, key: str, data: bytes) -> None:
    await bucket.write(key, body(data), len(data))


async def ours_get(bucket: Bucket, key: str) -> None:
    async with aclosing(bucket.read(key)) as pieces:
        async for _ in pieces:
            pass


async def _rate(call: Callable[[], Awaitable[None]], size: int, repeat: int) -> float:
    began = time.monotonic()
    for _ in range(repeat):
        await call()
    return size * repeat / (time.monotonic() - began) / 1e6


async def compare(bucket: Bucket, peer: Peer, size: int, *, rounds: int) -> tuple[Figures, Figures]:
    """Of put and of get."""
    data = bytes(size)
    repeat = max(1, min(50, 16 * MIB // size))
    put, get = Figures(), Figures()
    await ours_put(bucket, "warm", data[:KIB])
    await peer.put("warm", data[:KIB])
    for _ in range(rounds):
        put.ours.append(await _rate(lambda: ours_put(bucket, "ours", data), size, repeat))
        put.theirs.append(await _rate(lambda: peer.put("theirs", data), size, repeat))
        get.ours.append(await _rate(lambda: ours_get(bucket, "ours"), size, repeat))
        get.theirs.append(await _rate(lambda: peer.get("theirs"), size, repeat))
    return put, get


async def peak_parts(bucket: Bucket, size: int) -> float:
    """Of what a put holds at most, in parts."""

    async def made() -> AsyncIterator[bytes]:
        for at in range(0, size, PIECE):
            yield bytes(min(PIECE, size - at))

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await bucket.write("memory", made(), size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (peak - before) / bucket.part_bytes


async def rows_of(bucket: Bucket, peer: Peer, sizes: Sequence[str], *, rounds: int) -> list[Row]:
    found: list[Row] = []
    for name in sizes:
        for what, figures in zip(("put", "get"), await compare(bucket, peer, SIZES[name], rounds=rounds), strict=True):
            said = f"{spread(figures.ours, 1)} MB/s; {peer.name} {spread(figures.theirs, 1)}; {figures.ratio:.2f}"
            values = {"ours": statistics.median(figures.ours), "ratio": figures.ratio}
            row = Row(
                f"{bucket.url.split(':')[0]} {what} {name}", said, f">= {TARGET}", figures.ratio >= TARGET, values
            )
            found.append(row)
    parts = await peak_parts(bucket, 256 * MIB)
    what = f"{bucket.url.split(':')[0]} memory of a put of 256 MiB"
    found.append(Row(what, f"{parts:.2f} parts", f"<= {PARTS}", parts <= PARTS, {"parts": parts}))
    return found


@contextmanager
def server(script: str) -> Iterator[str]:
    """Its endpoint: an emulator of tests/cloud in a process of its own, which prints it and ends with its input."""
    with subprocess.Popen(
        [sys.executable, str(CLOUD / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
