"""A replica over the mock: what a gateway asks and gets, who goes first, and how it leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Key
from rollout.workloads.infer.payload import Payload, decode_result, encode_payload
from rollout.workloads.serve.frames import (
    Ask,
    Begin,
    ChoiceDelta,
    Deltas,
    End,
    Fault,
    FromReplica,
    Stop,
    ToReplica,
    Vectors,
    encoded,
    frames_of,
    from_replica,
)
from rollout_worker.backends.suggested import suggested_sampling
from rollout_worker.executors.infer import InferExecutor
from rollout_worker.executors.port import Attempt, Context, Done, HandOverError, Run
from rollout_worker.executors.serving import LEAVING, UNLIMITED, Engine, Room

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
T = TypeVar("T")


class FakeReplica:
    def __init__(self) -> None:
        self.frames_in: asyncio.Queue[tuple[int, bytes | None]] = asyncio.Queue()
        self.heard: list[tuple[int, FromReplica]] = []
        self.moved = asyncio.Event()
        self.withdrawn = self.closed = False

    async def __aenter__(self) -> FakeReplica:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    async def frames(self) -> AsyncIterator[tuple[int, bytes | None]]:
        while True:
            yield await self.frames_in.get()

    def send(self, channel: int, data: bytes) -> None:
        self.heard += [(channel, message) for message in from_replica(data)]
        self.moved.set()

    def withdraw(self) -> None:
        self.withdrawn = True
        self.moved.set()

    # ---- the test's side

    def ask(self, *messages: ToReplica, channel: int = 1) -> None:
        for frame in frames_of(map(encoded, messages)):
            self.frames_in.put_nowait((channel, frame))

    def of(self, number: int, kind: type[T], channel: int = 1) -> list[T]:
        return [one for at, one in self.heard if at == channel and one.id == number and isinstance(one, kind)]

    def deltas(self, number: int) -> list[ChoiceDelta]:
        return [choice for one in self.of(number, Deltas) for choice in one.choices]

    async def until(self, happened: Callable[[], T]) -> T:
        async with asyncio.timeout(20):
            while not (found := happened()):
                self.moved.clear()
                await self.moved.wait()
        return found

    async def end(self, number: int) -> End:
        ended = await self.until(lambda: self.of(number, End) + self.of(number, Fault))
        assert isinstance(ended[0], End), ended
        return ended[0]

    async def fault(self, number: int) -> Fault:
        ended = await self.until(lambda: self.of(number, End) + self.of(number, Fault))
        assert isinstance(ended[0], Fault), ended
        return ended[0]


class FakeContext:
    def __init__(self) -> None:
        self.served = FakeReplica()
        self.figures: dict[str, Any] = {}

    def progress(self, note: str, **figures: float | str | None) -> None:
        self.figures = figures
        self.served.moved.set()

    def hindered(self, message: str, *, code: str = "") -> None: ...

    def replica(self) -> FakeReplica:
        return self.served


class Rig:
    def __init__(self, executor: InferExecutor, config: dict[str, Any]) -> None:
        self.executor = executor
        self.config = config
        self.context = FakeContext()
        self.replica = self.context.served
        run = Run("01J00000000000000000000001", "serve", config, executor="infer")
        attempt = Attempt(Key(1, 0), 1, b"r" * 32, b'{"replica":0}', DEFAULT_SPEC, run)
        self.task = asyncio.create_task(executor.run(attempt, cast(Context, self.context)))

    async def row(self, row: dict[str, Any], sampling: dict[str, Any]) -> Done:
        run = Run("01J00000000000000000000002", "infer", {**self.config, "sampling": sampling})
        payload = encode_payload(Payload(row, 0, "in.jsonl", 1))
        attempt = Attempt(Key(2, 0), 1, b"i" * 32, payload, DEFAULT_SPEC, run)
        return await self.executor.run(attempt, cast(Context, self.context))


@asynccontextmanager
async def serving(**backend: Any) -> AsyncIterator[Rig]:
    config = {"model": {"uri": "m"}, "backend": {"kind": "mock", **backend}, "sampling": {}}
    executor = InferExecutor()
    await executor.start(Run("01J00000000000000000000001", "serve", config), cast(Context, FakeContext()))
    rig = Rig(executor, config)
    try:
        yield rig
    finally:
        rig.task.cancel()
        await asyncio.gather(rig.task, return_exceptions=True)
        await executor.close()
    assert rig.replica.closed


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def of_client(text: str) -> dict[str, Any]:
    """With what OpenAI's clients add."""
    return chat(text, stream=True, stream_options={"include_usage": True}, user="u", metadata={"a": "b"}, store=False)


async def test_a_request_gets_what_a_row_gets() -> None:
    async with serving() as rig:
        rig.replica.ask(Ask(7, CHAT, of_client("one two three")))
        end = await rig.replica.end(7)
        row = {"custom_id": "a", "url": CHAT, "body": chat("one two three", max_tokens=50)}
        (choice,) = decode_result((await rig.row(row, {})).data).choices
        deltas = rig.replica.deltas(7)
        assert "".join(one.text for one in deltas) == choice.text
        assert sum(len(one.ids) for one in deltas) == choice.tokens == end.choices[0].tokens == end.completion_tokens
        assert end.choices[0].finish_reason == choice.finish_reason
        assert [one.prompt_tokens for one in rig.replica.of(7, Begin)] == [end.prompt_tokens] == [4]
        assert rig.context.figures == {
            "requests": 1, "running": 0, "prompt_tokens": 4, "completion_tokens": choice.tokens, "failures": 0
        }  # fmt: skip


async def test_another_replica_goes_on_behind_what_was_drawn() -> None:
    async with serving() as rig:
        rig.replica.ask(Ask(1, CHAT, chat("one two three")))
        await rig.replica.end(1)
        whole = rig.replica.deltas(1)
        for at in range(1, len(whole)):
            so_far = tuple(token for one in whole[:at] for token in one.ids)
            rig.replica.ask(Ask(10 + at, CHAT, chat("one two three"), (so_far,)))
            end = await rig.replica.end(10 + at)
            assert rig.replica.deltas(10 + at) == whole[at:]
            assert end.completion_tokens == len(whole)


async def test_calls_of_tools_come_whole_with_the_end() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "now"}}]
    async with serving() as rig:
        rig.replica.ask(Ask(1, CHAT, chat(f"look {call}", tools=tools)))
        end = await rig.replica.end(1)
        deltas = rig.replica.deltas(1)
        assert end.choices[0].finish_reason == "tool_calls"
        assert "".join(one.text for one in deltas) == "MOCK:user: look"
        assert [call["function"]["name"] for one in deltas for call in one.tool_calls] == ["now"]


async def test_several_prompts_and_completions_have_indices_of_their_own() -> None:
    async with serving() as rig:
        rig.replica.ask(Ask(1, TEXT, {"prompt": ["a b", "c"], "n": 2, "temperature": 1}))
        end = await rig.replica.end(1)
        assert [one.i for one in end.choices] == [0, 1, 2, 3] and end.prompt_tokens == 3
        texts = {at: "".join(one.text for one in rig.replica.deltas(1) if one.i == at) for at in range(4)}
        assert [texts[at].split()[0] for at in range(4)] == ["MOCK:a", "MOCK:a", "MOCK:c", "MOCK:c"]


async def test_embeddings_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_worker.executors.serving.VECTOR_NUMBERS", 40)
    async with serving() as rig:
        rig.replica.ask(Ask(1, EMBED, {"input": ["a", "b", "c"]}))
        end = await rig.replica.end(1)
        assert [len(one.vectors) for one in rig.replica.of(1, Vectors)] == [2, 1]
        assert end.prompt_tokens == 3 and not end.choices


@pytest.mark.parametrize(
    ("ask", "status", "retry"),
    [
        (Ask(1, CHAT, {"messages": 3}), 400, False),
        (Ask(1, "/v1/other", {"prompt": "x"}), 400, False),
        (Ask(1, CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]}), 400, False),
        (Ask(1, CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/a.png"}}]}]}), 400, False),
        (Ask(1, CHAT, chat("a " * 40)), 400, False),
        (Ask(1, CHAT, chat("poison")), 500, True),
        (Ask(1, CHAT, chat("a", n=2), ((1,),)), 409, False),
        (Ask(1, CHAT, chat("a"), ((1,),)), 409, False),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_says_whose_fault_it_is(ask: Ask, status: int, retry: bool) -> None:
    async with serving(fail_match="poison", max_model_len=30) as rig:
        rig.replica.ask(ask, Ask(2, CHAT, chat("fine")))
        fault = await rig.replica.fault(1)
        assert (fault.status, fault.retry) == (status, retry)
        await rig.replica.end(2)


async def test_what_nobody_waits_for_is_stopped() -> None:
    async with serving(token_ms=10) as rig:
        rig.replica.ask(Ask(1, CHAT, chat("a " * 400)), Ask(2, CHAT, chat("b " * 10)))
        rig.replica.ask(Ask(1, CHAT, chat("c " * 400)), channel=2)
        await rig.replica.until(lambda: rig.replica.of(1, Deltas) and rig.replica.of(1, Deltas, channel=2))
        rig.replica.ask(Stop(1))
        rig.replica.frames_in.put_nowait((2, None))
        await rig.replica.until(lambda: rig.context.figures["running"] == 1)
        await rig.replica.end(2)
        assert not rig.replica.of(1, End) and not rig.replica.of(1, Fault)


async def test_a_replica_that_leaves_ends_what_it_has_begun() -> None:
    async with serving(token_ms=5) as rig:
        rig.replica.ask(Ask(1, CHAT, chat("a b c d e f g h")))
        await rig.replica.until(lambda: rig.replica.of(1, Deltas))
        rig.executor.leave(60)
        rig.replica.ask(Ask(2, CHAT, chat("late")))
        assert (await rig.replica.fault(2)).code == LEAVING
        await rig.replica.end(1)
        with pytest.raises(HandOverError):
            await rig.task
        assert rig.replica.withdrawn


async def test_what_does_not_end_in_time_must_run_elsewhere() -> None:
    async with serving(token_ms=1000) as rig:
        rig.replica.ask(Ask(1, CHAT, chat("a " * 400)))
        await rig.replica.until(lambda: rig.replica.of(1, Begin))
        rig.executor.leave(3600)
        rig.executor.leave(0)
        fault = await rig.replica.fault(1)
        assert (fault.code, fault.status, fault.retry) == (LEAVING, 503, True)
        with pytest.raises(HandOverError):
            await rig.task


async def test_a_frame_that_is_none_costs_no_request() -> None:
    async with serving() as rig:
        rig.replica.frames_in.put_nowait((1, b"{"))
        rig.replica.ask(Ask(1, CHAT, chat("a")))
        await rig.replica.end(1)


async def test_rows_take_what_requests_leave() -> None:
    room = Room(lambda: 2)
    running: list[str] = []
    let_go = asyncio.Event()

    async def row(name: str) -> None:
        async with room.row():
            running.append(name)
            await let_go.wait()

    async def settled() -> list[str]:
        for _ in range(10):
            await asyncio.sleep(0)
        return running

    async with room.replica():
        async with room.request():
            tasks = [asyncio.create_task(row(name)) for name in "abcd"]
            assert await settled() == ["a"]
            async with room.request():
                tasks[1].cancel()
                assert await settled() == ["a"]
        assert await settled() == ["a", "c"]
    assert await settled() == ["a", "c", "d"]  # without a replica the engine has them all
    let_go.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_a_request_leaves_open_the_run_says_then_the_model(tmp_path: Path) -> None:
    async def sampling(config: dict[str, Any], suggested: dict[str, Any], url: str, body: dict[str, Any]) -> list[Any]:
        whole = {"model": {}, "backend": {"kind": "vllm"}, "sampling": config}
        request, _ = await Engine(cast(Any, None), whole, suggested, Room(lambda: 1)).read(Ask(1, url, body))
        return [request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_k]

    ask, prompt = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True, "eos_token_id": 1})
    )
    suggested = await suggested_sampling("vllm", str(tmp_path), None)
    assert await sampling({}, {}, CHAT, ask) == [UNLIMITED, 1.0, -1]
    assert await sampling({}, {}, TEXT, prompt) == [16, 1.0, -1]
    assert await sampling({}, suggested, CHAT, ask) == [99, 0.6, 20]
    assert await sampling({}, suggested, TEXT, prompt) == [16, 0.6, 20]
    assert await sampling({"max_tokens": 5, "top_k": None}, suggested, TEXT, prompt) == [5, 0.6, 20]
    assert await sampling({"temperature": 0.1}, suggested, CHAT, {**ask, "max_completion_tokens": 3}) == [3, 0.1, 20]
    with pytest.raises(AttemptError):
        await sampling({}, {"temperature": -1}, CHAT, ask)
