"""Coverage-guided fuzzing of what reads bytes: `python tests/fuzz/coverage_guided.py TARGET [libFuzzer options]`.

An input that makes a reader raise anything but its typed error is a finding: the fuzzer writes it to a file and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import atheris

sys.path.insert(0, str(Path(__file__).parent))

with atheris.instrument_imports(include=["rollout", "rollout_coordinator", "rollout_worker", "tomllib"]):  # pyright: ignore[reportAttributeAccessIssue]
    from hostile_messages import Feed, build
    from rollout.config.load import load_settings
    from rollout.config.settings import CoordinatorSettings
    from rollout.model.errors import AttemptError, ConfigError, InputError, ProtocolError
    from rollout.wire import codec
    from rollout.wire.v1 import runs_pb2, work_pb2
    from rollout.workloads.infer import rows
    from rollout.workloads.infer.config import InferConfig, SamplingSection
    from rollout.workloads.port import InputReader
    from rollout_coordinator.work_codec import hello_event, up_event
    from rollout_worker.attempts import Plan, held_from_wire, run_from_wire
    from rollout_worker.hosting.channel import JsonChannel
    from rollout_worker.processes.frames import read_frame, read_question
    from rollout_worker.processes.kinds import Kind

SAMPLING = SamplingSection()
SCRATCH = Path(tempfile.mkdtemp(prefix="fuzz-"))


def worker_frames(data: bytes) -> None:
    """What a coordinator reads from a worker."""
    frame = build(work_pb2.WorkUp, Feed(data))
    with contextlib.suppress(ProtocolError):
        hello_event(frame, "") if frame.HasField("hello") else up_event(frame)


def client_frames(data: bytes) -> None:
    frame = build(runs_pb2.SubmitUp, Feed(data))
    try:
        codec.item_batch_from_wire(frame.items)
        codec.run_config(codec.run_spec_from_wire(frame.open).config)
    except ProtocolError:
        pass


def coordinator_frames(data: bytes) -> None:
    """What a worker reads of an assignment."""
    group = build(work_pb2.AssignGroup, Feed(data))
    with contextlib.suppress(ProtocolError, AttemptError):
        held_from_wire(group, lambda _: Plan(run_from_wire(group.run), "slot", "k"))


def child_frames(data: bytes) -> None:
    kind, body = data[:1], data[1:]
    with contextlib.suppress(ProtocolError):
        read_question(body) if kind == bytes([Kind.REQUEST]) else read_frame(1, kind[0] if kind else 0, body)


def toml(data: bytes) -> None:
    path = SCRATCH / "c.toml"
    path.write_bytes(data)
    for model in (CoordinatorSettings, InferConfig):
        with contextlib.suppress(ConfigError):
            load_settings(cast(Any, model), path, environ={})


def jsonl(data: bytes) -> None:
    suffix = (".jsonl", ".gz", ".zst")[data[0] % 3] if data else ".jsonl"
    path = SCRATCH / f"in{suffix}"
    path.write_bytes(data[1:])
    try:
        source, _ = InputReader(exclude=SCRATCH / "out").rows(
            [str(path)], lambda line: rows.request_of(rows.row_of(line), SAMPLING, "mock")
        )
        source.close()
    except InputError:
        pass


def sidecar(data: bytes) -> None:
    """The body of a reply, while call 1 waits."""

    async def deliver() -> None:
        from rollout.model.errors import PluginError

        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        channel = cast(Any, JsonChannel.__new__(JsonChannel))
        channel._waiting = {1: answer}
        with contextlib.suppress(PluginError):
            JsonChannel._deliver(channel, data)
        if answer.done() and answer.exception() is not None:
            assert isinstance(answer.exception(), PluginError)

    asyncio.run(deliver())


TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f for f in (worker_frames, client_frames, coordinator_frames, child_frames, toml, jsonl, sidecar)
}

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()
