"""The executor over the mock: formats, typed failures, seeds, where the model comes from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from infer_input import check_input
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Blob, Key, NewItem
from rollout.objects.digest import object_id
from rollout.objects.tree import describe
from rollout.workloads.infer.config import InferConfig, SamplingSection
from rollout.workloads.infer.model import resolve_model
from rollout.workloads.infer.payload import Payload, decode_result, encode_payload, encode_result
from rollout.workloads.infer.plan import resolve_config
from rollout.workloads.infer.request import parse_row
from rollout_worker.backends.port import Choice, Completion
from rollout_worker.executors.infer import InferExecutor, read_answers, row_result
from rollout_worker.executors.port import Attempt, Child, Replica, Run
from rollout_worker.executors.trees import locate_model


class FakeContext:
    def __init__(self, scratch: Path, objects: dict[bytes, bytes] | None = None) -> None:
        self.scratch = scratch
        self.objects = objects or {}

    def progress(self, note: str, **figures: float | str | None) -> None: ...

    def hindered(self, message: str, *, code: str = "") -> None: ...

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        raise AssertionError("infer spawns nothing")

    def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        raise AssertionError("infer spawns nothing")

    async def put_object(self, data: bytes | Path) -> bytes:
        raise AssertionError("infer stores nothing itself")

    async def get_object(self, blob: Blob) -> bytes:
        raise AssertionError("payloads arrive resolved")

    async def call_plugin(
        self, name: str, method: str, payload: dict[str, Any] | bytes, timeout_s: float = 60.0
    ) -> Any:
        raise AssertionError("infer calls no plugin")

    def replica(self) -> Replica:
        raise AssertionError("an attempt at a row is no replica")

    async def object_path(self, object_id: bytes) -> Path:
        name = object_id.hex()
        path = self.scratch / "cache" / name[:2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.objects[object_id])
        return path


def run_of(tmp_path: Path, **sections: Any) -> Run:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\n')
    base = {"model": {"uri": "m"}, "input": {"glob": str(path)}, "output": {"dir": "o"}, "backend": {"kind": "mock"}}
    found = InferConfig.model_validate({**base, **sections})
    return Run("01J00000000000000000000000", "infer", resolve_config(found, check_input(found), resolve_model(found)))


def attempt_of(run: Run, row: dict[str, Any], number: int = 1, identity: bytes = b"i" * 32) -> Attempt:
    payload = encode_payload(Payload(row, 0, "in.jsonl", 1))
    return Attempt(Key(1, 0), number, identity, payload, DEFAULT_SPEC, run)


async def test_rows(tmp_path: Path) -> None:
    run, context = run_of(tmp_path), FakeContext(tmp_path)
    executor = InferExecutor()
    await executor.start(run, context)
    assert executor.concurrency == 64
    done = await executor.run(attempt_of(run, {"prompt": "hello world"}), context)
    assert decode_result(done.data).choices[0].text == "MOCK:hello world"
    assert (done.units_in, done.units_out) == (2, 2)
    row = {"messages": [{"role": "user", "content": "hi"}], "sampling": {"n": 3, "logprobs": 2}}
    result = decode_result((await executor.run(attempt_of(run, row), context)).data)
    assert len({choice.text for choice in result.choices}) == 3
    again = await executor.run(attempt_of(run, row, 2), context)
    assert decode_result(again.data) == result  # another attempt, the same bytes
    other = await executor.run(attempt_of(run, row, identity=b"j" * 32), context)
    assert decode_result(other.data) != result
    await executor.close()


def test_a_token_that_cannot_come_has_a_logprob_that_json_can_hold() -> None:
    impossible = {"token": "a", "logprob": float("-inf"), "top": [{"token": "a", "logprob": float("-inf")}]}
    result = row_result(Completion([Choice("a", "stop", 1, [impossible])], 1))
    logprobs = decode_result(encode_result(result)).choices[0].logprobs
    assert logprobs == [{"token": "a", "logprob": -9999.0, "top": [{"token": "a", "logprob": -9999.0}]}]


async def test_one_bad_row_does_not_sink_its_neighbours(tmp_path: Path) -> None:
    run, context = run_of(tmp_path, backend={"kind": "mock", "fail_match": "poison"}), FakeContext(tmp_path)
    executor = InferExecutor()
    await executor.start(run, context)
    rows = [{"prompt": "fine"}, {"prompt": 3}, {"prompt": "poison"}, {"prompt": "fine too"}]
    out = await asyncio.gather(*(executor.run(attempt_of(run, r), context) for r in rows), return_exceptions=True)
    assert [isinstance(result, AttemptError) for result in out] == [False, True, True, False]
    assert isinstance(out[1], AttemptError) and (out[1].error_code, out[1].retry) == ("bad_request", False)
    assert isinstance(out[2], AttemptError) and (out[2].error_code, out[2].retry) == ("mock_failure", True)
    await executor.close()


async def test_injected_failures_pass_on_a_later_attempt(tmp_path: Path) -> None:
    run, context = run_of(tmp_path, backend={"kind": "mock", "fail_rate": 0.5}), FakeContext(tmp_path)
    executor = InferExecutor()
    await executor.start(run, context)

    async def ok(item: int, number: int) -> bool:
        try:
            await executor.run(attempt_of(run, {"prompt": "x"}, number, bytes([item]) * 32), context)
        except AttemptError:
            return False
        return True

    outcomes = [[await ok(item, number) for number in range(1, 17)] for item in range(40)]
    assert all(any(row) for row in outcomes)
    assert 0.3 < sum(row.count(False) for row in outcomes) / 640 < 0.7
    assert outcomes == [[await ok(item, number) for number in range(1, 17)] for item in range(40)]


async def test_unknown_backend(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.config["backend"]["kind"] = "nope"
    with pytest.raises(AttemptError, match="no backend 'nope' is installed on this worker") as error:
        await InferExecutor().start(run, FakeContext(tmp_path))
    assert not error.value.retry


def test_engine_key_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    assert InferExecutor.engine_key(run) == InferExecutor.engine_key(run_of(tmp_path, sampling={"max_tokens": 3}))
    assert InferExecutor.engine_key(run) != InferExecutor.engine_key(run_of(tmp_path, model={"uri": "other"}))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    vllm = run_of(tmp_path)
    vllm.config["backend"] |= {"kind": "vllm", "device": "cpu"}
    found = InferExecutor.environment(vllm)
    assert found["OMP_NUM_THREADS"] == "1" and found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert "OMP_NUM_THREADS" not in InferExecutor.environment(vllm)


async def test_model_directory_from_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "sub" / "weights").write_bytes(b"w")
    run = run_of(tmp_path, model={"uri": str(directory)}, backend={"kind": "transformers"})
    assert await locate_model(run.config["model"], FakeContext(tmp_path)) == (str(directory), None)  # the same machine
    tree = await describe(directory)
    objects = {tree.id: tree.to_bytes(), object_id(b"{}"): b"{}", object_id(b"w"): b"w"}
    (directory / "config.json").write_text("{ }")  # this host has something else under that path
    with pytest.raises(AttemptError, match="was not uploaded"):
        await locate_model(run.config["model"], FakeContext(tmp_path))
    run.config["model"]["manifest"] = tree.id.hex()
    found, _ = await locate_model(run.config["model"], FakeContext(tmp_path, objects))
    assert (Path(found) / "sub" / "weights").read_bytes() == b"w"
    assert Path(found).parent == tmp_path / "cache-trees"


def test_a_text_held_to_a_form_is_no_reasoning() -> None:
    message = {"messages": [{"role": "user", "content": "x"}]}
    for sampling, reasoning in (({}, '{"a":1}'), ({"json_schema": {}}, None), ({"choice": ["a"]}, None)):
        completion = Completion([Choice('{"a":1}', "stop", 1)], 1, thinking=True)
        read_answers(completion, parse_row({**message, "sampling": sampling}, SamplingSection(), "mock"))
        assert completion.choices[0].reasoning == reasoning
