"""Messages through SQS, sent, received and acknowledged, beside a bare loop of boto3, on one emulator in a process of
its own, in turns. The emulator serves one request at a time, and is most of the time of both."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cloud"))

import itertools

import boto3
from measure import Row, spread
from moto_locked import REGION, aws_emulator
from rollout.config.cloud import CloudSection
from rollout.queues import Outgoing, Place, open_queue

BODY = "x" * 1024
STEPS = ("sent", "received", "acknowledged")


def serve(pipe: Connection) -> None:
    with aws_emulator() as emulator:
        pipe.send(emulator.endpoint)
        pipe.recv()


@contextmanager
def emulator() -> Iterator[str]:
    """Its endpoint."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join()


def bare(client: Any, url: str, count: int) -> list[float]:
    """Seconds of each step, ten messages a call, one call after the other."""
    times: list[float] = [time.monotonic()]
    for start in range(0, count, 10):
        entries = [{"Id": str(n), "MessageBody": BODY} for n in range(start, min(start + 10, count))]
        client.send_message_batch(QueueUrl=url, Entries=entries)
    times.append(time.monotonic())
    receipts: list[str] = []
    while len(receipts) < count:
        answer = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
        receipts += [message["ReceiptHandle"] for message in answer["Messages"]]
    times.append(time.monotonic())
    for start in range(0, count, 10):
        entries = [{"Id": str(n), "ReceiptHandle": r} for n, r in enumerate(receipts[start : start + 10])]
        client.delete_message_batch(QueueUrl=url, Entries=entries)
    times.append(time.monotonic())
    return [b - a for a, b in itertools.pairwise(times)]


async def ours(cloud: CloudSection, url: str, count: int) -> list[float]:
    queue = open_queue("sqs", Place(url), cloud)
    await queue.open()
    times: list[float] = [time.monotonic()]
    await queue.enqueue([Outgoing(BODY.encode()) for _ in range(count)])
    times.append(time.monotonic())
    got: list[Any] = []
    while len(got) < count:
        got += await queue.dequeue(count - len(got), 300.0, 1.0)
    times.append(time.monotonic())
    assert await queue.ack(got) == []
    times.append(time.monotonic())
    await queue.close()
    return [b - a for a, b in itertools.pairwise(times)]


def compare(count: int, repeats: int) -> dict[str, tuple[list[float], list[float]]]:
    """By step, messages a second of ours and of the bare loop."""
    found: dict[str, tuple[list[float], list[float]]] = {step: ([], []) for step in STEPS}
    with emulator() as endpoint:
        cloud = CloudSection.model_validate({"provider": "aws", "region": REGION, "endpoint_url": endpoint})
        client = boto3.client(
            "sqs",
            endpoint_url=endpoint,
            region_name=REGION,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        for turn in range(repeats + 1):
            url = client.create_queue(QueueName=f"queue-{turn}")["QueueUrl"]
            ways = (asyncio.run(ours(cloud, url, count)), bare(client, url, count))
            if turn:  # the first one warms up
                for step, one, other in zip(STEPS, *ways, strict=True):
                    found[step][0].append(count / one)
                    found[step][1].append(count / other)
        client.close()
    return found


def rows(quick: bool) -> list[Row]:
    count, repeats = (60, 2) if quick else (300, 5)
    lines: list[Row] = []
    with _credentials():
        found = compare(count, repeats)
    for step, (engine, loop) in found.items():
        ratios = [a / b for a, b in zip(engine, loop, strict=True)]
        ratio = statistics.median(ratios)
        lines.append(
            Row(
                f"messages of 1 KiB {step}, SQS under emulation, beside boto3",
                f"{spread(engine, 0)}/s, bare {spread(loop, 0)}: ratio {spread(ratios)}",
                "≥0.95",
                ratio >= 0.95,
                {"messages_per_s": statistics.median(engine), "bare_per_s": statistics.median(loop), "ratio": ratio},
            )
        )
    return lines


@contextmanager
def _credentials() -> Iterator[None]:
    names = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    for row in rows("--quick" in sys.argv):
        print(row.what, "|", row.figure, "|", row.verdict)
