"""Objects in S3: put and get of 1 KiB to 2 GiB beside boto3's transfer manager, on one emulator in one run.

Run: python tests/bench/bench_s3.py [--sizes 1024 1048576 268435456 2147483648] [--quick]

Every client is a process of its own, so that its peak of memory is its own, and so is the emulator. The emulator takes
most of the time of large bodies: what is compared is what a client adds to that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import boto3
from measure import Row, directory, spread

HERE = Path(__file__).resolve().parent
REGION = "eu-central-1"
SIZES = {1 << 10: 150, 1 << 20: 40, 256 << 20: 3, 2 << 30: 1}
"""Bytes of an object, and how often it is put and got in one turn."""
QUICK = {1 << 10: 40, 1 << 20: 10, 64 << 20: 2}
TURNS = 3
PART_MIB = 16
PARTS = 3
REACH = 0.95
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def emulator() -> Iterator[str]:
    """Its endpoint."""
    command = [sys.executable, str(HERE.parent / "cloud" / "moto_locked.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


def fresh_bucket(endpoint: str, name: str) -> str:
    client: Any = boto3.client(  # type: ignore[call-overload]
        "s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id="testing", aws_secret_access_key="testing"
    )
    client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
    client.close()
    return name


def peer(name: str, bucket: str, root: Path, size: int, times: int) -> dict[str, Any]:
    """An emulator for each: what an earlier client put there fills no memory."""
    file = root / f"object-{size}"
    if not file.exists():
        with file.open("wb") as target:
            for _ in range(-(-size // (1 << 20))):
                target.write(os.urandom(min(1 << 20, size)))
            target.truncate(size)
    with emulator() as endpoint:
        fresh_bucket(endpoint, bucket)
        command = [sys.executable, str(HERE / "s3_peer.py"), name, endpoint, bucket, str(file), str(times)]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **CREDENTIALS}, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout)


def human(size: int) -> str:
    for unit, amount in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= amount:
            return f"{size // amount} {unit}"
    return f"{size} B"


def compare(root: Path, size: int, times: int, turns: int) -> list[Row]:
    names = ["boto3", "bucket", "store", *(["obstore"] if find_spec("obstore") else [])]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names:
            found[name].append(peer(name, f"bench-{name}-{turn}", root, size, times))
    rows: list[Row] = []
    for what in ("put", "get"):
        # seconds of one, the median of a turn
        seconds = {name: [statistics.median(run[what]) for run in runs] for name, runs in found.items()}
        ratios = [b / a for a, b in zip(seconds["bucket"], seconds["boto3"], strict=True)]
        stored = [b / a for a, b in zip(seconds["store"], seconds["boto3"], strict=True)]
        memory = {name: max(run["grown_mib"] for run in runs) for name, runs in found.items()}
        ratio = statistics.median(ratios)
        others = "".join(f", obstore {statistics.median(seconds[n]) * 1000:,.1f} ms" for n in names if n == "obstore")
        large = size > PART_MIB << 20
        rows.append(
            Row(
                f"{what} of {human(size)} in emulated S3 beside boto3's transfer manager",
                f"{spread([one * 1000 for one in seconds['bucket']], 1)} ms, boto3 "
                f"{spread([one * 1000 for one in seconds['boto3']], 1)} ms{others}: ratio {spread(ratios)}, {turns} "
                f"pairs; hashed and verified {spread(stored)}; memory +{memory['bucket']:.0f} MiB at most "
                f"(boto3 +{memory['boto3']:.0f})",
                f"≥{REACH}" + (f", memory ≤{PARTS} parts of {PART_MIB} MiB" if large else ""),
                ratio >= REACH and (not large or memory["bucket"] <= PARTS * PART_MIB),
                {
                    "ratio": ratio,
                    "store_ratio": statistics.median(stored),
                    "grown_mib": memory["bucket"],
                    "boto3_grown_mib": memory["boto3"],
                    **{f"{name}_s": statistics.median(value) for name, value in seconds.items()},
                },
            )
        )
    return rows


def rows(quick: bool, sizes: dict[int, int] | None = None) -> list[Row]:
    plan = sizes or (QUICK if quick else SIZES)
    found: list[Row] = []
    for size, times in plan.items():
        with directory() as root:
            found += compare(root, size, times, 2 if quick else TURNS)
    return found


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    made.add_argument("--sizes", type=int, nargs="+", help="bytes")
    made.add_argument("--quick", action="store_true")
    given = made.parse_args()
    sizes = {size: SIZES.get(size, QUICK.get(size, 3)) for size in given.sizes} if given.sizes else None
    for size, times in (sizes or (QUICK if given.quick else SIZES)).items():
        for row in rows(given.quick, {size: times}):
            print(f"{row.what}\n  {row.figure}\n  {row.target}: {row.verdict}", flush=True)


if __name__ == "__main__":
    main()
