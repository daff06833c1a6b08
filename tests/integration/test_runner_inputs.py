"""Large inputs: a process reads them from the host's cache, and asks its daemon for what is no longer there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout.model.item import DEFAULT_SPEC, Blob, ObjectSlice
from rollout.objects.digest import object_id
from rollout.wire.codec import unpack_blobs
from rollout.wire.v1 import work_pb2
from rollout_worker.attempts import Held, Plan
from rollout_worker.executors.port import Run
from rollout_worker.processes.kinds import Kind
from runner_process import RunnerProcess

RUN = Run("01ARZ3NDEKTSV4RRFFQ69G5FAV", "script", {})
NOOP = b"noop" + b"." * 5000
ECHO = json.dumps({"data": "large " * 1000}).encode()
PACK = NOOP + ECHO
SLICES: list[Blob] = [ObjectSlice(object_id(PACK), 0, len(NOOP)), ObjectSlice(object_id(PACK), len(NOOP), len(ECHO))]
ECHOED = b"large " * 1000


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RunnerProcess]:
    made = RunnerProcess(RUN, tmp_path)
    try:
        assert made.frame()[0] == Kind.READY
        yield made
    finally:
        made.close()


def store(directory: Path, pack: bytes = PACK) -> Path:
    name = object_id(PACK).hex()
    path = directory / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack)
    return path


def held(*payloads: Blob) -> list[Held]:
    plan = Plan(RUN, "slot", "script")
    return [Held(1, seq, 1, bytes(32), payload, DEFAULT_SPEC, plan) for seq, payload in enumerate(payloads)]


def outcomes(process: RunnerProcess, count: int, *answers: dict[str, Any]) -> dict[int, Any]:
    """By seq, in the order of their ends: what each gave, or the code of its failure. Every answer is asked for."""
    found: dict[int, Any] = {}
    left = list(answers)
    while len(found) < count:
        kind, body = process.frame()
        if kind == Kind.REQUEST:
            question = json.loads(body)
            assert (question["op"], question["object_id"]) == ("path", object_id(PACK).hex())
            process.send(Kind.REPLY, json.dumps({"id": question["id"], **left.pop(0)}).encode())
            continue
        assert kind == Kind.RESULTS
        group = work_pb2.ResultGroup.FromString(body)
        failed = {error.index: error.code for error in group.errors}
        blobs = unpack_blobs(group.length, group.data, ())
        found |= {seq: failed.get(n, blob) for n, (seq, blob) in enumerate(zip(group.seq, blobs, strict=True))}
    assert not left
    return found


def test_what_is_in_the_cache_is_read_without_asking(process: RunnerProcess) -> None:
    store(process.cache)
    process.deliver(held(*SLICES, ECHO, *SLICES))
    assert outcomes(process, 5) == {0: b"", 1: ECHOED, 2: ECHOED, 3: b"", 4: ECHOED}


def test_what_was_evicted_is_asked_for(process: RunnerProcess, tmp_path: Path) -> None:
    process.deliver(held(*SLICES, ECHO))
    there = {"value": str(store(tmp_path / "again"))}
    found = outcomes(process, 3, there, there)
    assert list(found.items()) == [(0, b""), (1, ECHOED), (2, ECHOED)], "in the order in which they came"


def test_what_cannot_be_read_is_asked_for_too(process: RunnerProcess, tmp_path: Path) -> None:
    place = store(process.cache)
    place.unlink()
    place.mkdir()
    process.deliver(held(*SLICES, ECHO))
    there = {"value": str(store(tmp_path / "again"))}
    assert outcomes(process, 3, there, there) == {0: b"", 1: ECHOED, 2: ECHOED}


def test_what_cannot_be_had_fails_its_attempt_only(process: RunnerProcess, tmp_path: Path) -> None:
    process.deliver(held(*SLICES, ECHO))
    away = {"error": {"code": "unavailable", "message": "no coordinator", "retryable": True}}
    short = {"value": str(store(tmp_path / "again", PACK[:-1]))}
    assert outcomes(process, 3, away, short) == {0: "unavailable", 1: "object_corrupt", 2: ECHOED}
