"""A replica over the mock: what a gateway asks and gets, who goes first, and how it leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from replica_rig import serving
from rollout.model.errors import AttemptError
from rollout.workloads.infer.payload import decode_result
from rollout.workloads.serve.frames import (
    EMPTY,
    Ask,
    Begin,
    Deltas,
    End,
    Fault,
    Stop,
    Vectors,
)
from rollout_worker.backends.suggested import suggested_sampling
from rollout_worker.executors.port import HandOverError
from rollout_worker.executors.serving import LEAVING, UNLIMITED, Engine, Room

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


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
        await asyncio.sleep(0)  # it is told of behind its last message
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


@pytest.mark.engine
async def test_a_model_goes_on_with_what_it_samples(tmp_path: Path) -> None:
    from rollout_worker.backends.tiny import make_tiny

    make_tiny(tmp_path / "tiny")
    body = {"messages": [{"role": "user", "content": "Say 7."}], "seed": 3, "max_tokens": 12, "stop": ["\ue000" * 5]}
    async with serving(str(tmp_path / "tiny"), kind="transformers", dtype="float32", device="cpu") as rig:
        rig.replica.ask(Ask(1, CHAT, body))
        first = await rig.replica.end(1)
        whole = rig.replica.deltas(1)
        ids = [token for one in whole for token in one.ids]
        rig.replica.ask(*(Ask(10 + at, CHAT, body, (tuple(ids[:at]),)) for at in range(1, len(ids))))
        for at in range(1, len(ids)):
            assert (await rig.replica.end(10 + at)).choices == first.choices
            assert [token for one in rig.replica.deltas(10 + at) for token in one.ids] == ids[at:]
            joined = [*whole[:at], *rig.replica.deltas(10 + at)]
            assert "".join(one.text for one in joined) == "".join(one.text for one in whole)


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


async def test_an_answer_that_no_frame_holds_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.workloads.serve.frames.FRAME_BYTES", 4096)
    async with serving() as rig:
        rig.replica.ask(Ask(1, TEXT, {"prompt": "a", "n": 256, "max_tokens": 1}))
        fault = await rig.replica.fault(1)
        assert (fault.code, fault.status, fault.retry) == ("answer_too_large", 422, False)


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


async def test_a_replica_that_has_nothing_to_say_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_worker.executors.serving.BEAT_S", 0.01)
    async with serving() as rig:
        rig.replica.frames_in.put_nowait((4, EMPTY))
        await rig.replica.until(lambda: rig.replica.beats.count(4) > 1)


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
