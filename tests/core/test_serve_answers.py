"""Answers, byte for byte as vLLM's server (0.32) writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout.workloads.serve.answers import Head, Stream, Whole, encoded
from rollout.workloads.serve.asks import Asked, ask_of
from rollout.workloads.serve.exchange import Piece
from rollout.workloads.serve.frames import ChoiceDelta, ChoiceEnd, End
from serve_replicas import config_of

HEAD = Head("chatcmpl-1", 5, "m")
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]
TOKEN = {
    "token": "é",
    "logprob": -0.5,
    "top": [{"token": "é", "logprob": -0.5}, {"token": "b", "logprob": float("-inf")}],
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def asked(url: str, **body: Any) -> Asked:
    if url == CHAT:
        body = {"messages": HELLO, **body}
    return ask_of(url, {"model": "m", **body}, config_of())


def pieces(*deltas: ChoiceDelta, finish: str = "stop", apart: bool = False) -> list[Piece]:
    end = End(1, tuple(ChoiceEnd(i, finish, 1) for i in sorted({d.i for d in deltas})), 3, len(deltas))
    first = [Piece((delta,), prompt_tokens=3) for delta in deltas]
    if apart:
        return [*first, Piece(end=end)]
    return [*first[:-1], Piece((deltas[-1],), prompt_tokens=3, end=end)]


def whole(request: Asked, *parts: Piece) -> str:
    answer = Whole(request)
    for part in parts:
        answer.add(part)
    return encoded(answer.body(HEAD)).decode()


def stream(request: Asked, *parts: Piece) -> list[str]:
    answer = Stream(request, HEAD)
    events = [event.decode() for part in parts for event in answer.add(part)]
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    return [event[6:-2] for event in events]


def test_a_whole_chat() -> None:
    assert whole(asked(CHAT), *pieces(ChoiceDelta(0, (1,), "Hé"), ChoiceDelta(0, (2,), "y"))) == (
        '{"id":"chatcmpl-1","object":"chat.completion","created":5,"model":"m","choices":[{"index":0,"message":'
        '{"role":"assistant","content":"Héy","refusal":null,"annotations":null,"audio":null,"function_call":null,'
        '"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null,'
        '"routed_experts":null}],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":3,'
        '"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":null,"completion_tokens_details":null},'
        '"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,'
        '"ec_transfer_params":null,"metrics":null}'
    )


def test_a_whole_completion() -> None:
    assert whole(asked(TEXT, prompt="Hi"), *pieces(ChoiceDelta(0, (1,), "a"), finish="length")) == (
        '{"id":"chatcmpl-1","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":"a",'
        '"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,'
        '"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":null,"usage":'
        '{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1,"prompt_tokens_details":null,'
        '"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )


def test_a_streamed_chat_ends_with_its_last_delta() -> None:
    top = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","choices":['
    request = asked(CHAT, stream=True, stream_options={"include_usage": True})
    assert stream(request, *pieces(ChoiceDelta(0, (1,), "a"), ChoiceDelta(0, (2,), "b"))) == [
        top + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        '"prompt_token_ids":null,"prompt_text":null}',
        top + '{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":null}]}',
        top + '{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":"stop","stop_reason":null,'
        '"token_ids":null}]}',
        top + '],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}',
        "[DONE]",
    ]


def test_a_streamed_completion() -> None:
    top = '{"id":"chatcmpl-1","object":"text_completion","created":5,"model":"m","choices":['
    tail = ',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}'
    request = asked(TEXT, prompt="Hi", stream=True)
    assert stream(request, *pieces(ChoiceDelta(0, (1,), "a"), apart=True)) == [
        top + '{"index":0,"text":"a","logprobs":null,"finish_reason":null' + tail,
        top + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop"' + tail,
        "[DONE]",
    ]


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(asked(CHAT, stream=True, stream_options=options), *pieces(ChoiceDelta(0, (1, 2), "a")))
    usage = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert usage == [0, 2, 1]  # the last is what the end says


def test_logprobs_of_a_chat() -> None:
    answer = json.loads(whole(asked(CHAT, logprobs=True), *pieces(ChoiceDelta(0, (1,), "é", logprobs=(TOKEN,)))))
    entry = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    rest = {"token": "b", "logprob": -9999.0, "bytes": [98]}
    assert answer["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": [entry, rest]}]}


def test_logprobs_of_a_completion_count_characters_over_chunks() -> None:
    request = asked(TEXT, prompt="Hi", logprobs=1, stream=True)
    deltas = [ChoiceDelta(0, (n,), "é", logprobs=(TOKEN,)) for n in (1, 2)]
    found = [json.loads(event)["choices"][0]["logprobs"] for event in stream(request, *pieces(*deltas))[:-1]]
    top = [{"é": -0.5, "b": -9999.0}]
    assert found == [
        {"text_offset": [at], "token_logprobs": [-0.5], "tokens": ["é"], "top_logprobs": top} for at in (0, 1)
    ]


def test_tool_calls_and_reasoning() -> None:
    request = asked(CHAT, tools=TOOLS)
    deltas = (ChoiceDelta(0, (1,), reasoning="hm"), ChoiceDelta(0, (2,), tool_calls=(CALL,)))
    message = json.loads(whole(request, *pieces(*deltas, finish="tool_calls")))["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["tool_calls"]) == (None, "hm", [CALL])
    streamed = asked(CHAT, tools=TOOLS, stream=True)
    nothing = ChoiceDelta(0, (3,))  # drawn, and not yet known what it is
    chunks = [json.loads(event) for event in stream(streamed, *pieces(deltas[0], nothing, deltas[1]))[1:-1]]
    said = [chunk["choices"][0]["delta"] for chunk in chunks]
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    assert said == [{"reasoning": "hm"}, {"tool_calls": [call]}]


def test_choices_by_their_number() -> None:
    deltas = (ChoiceDelta(1, (1,), "b"), ChoiceDelta(0, (2,), "a"))
    answer = json.loads(whole(asked(CHAT, n=2), *pieces(*deltas)))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b"]
    request = asked(CHAT, n=2, stream=True)
    roles = [json.loads(event)["choices"][0] for event in stream(request, *pieces(*deltas))[:2]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in roles] == [(0, "assistant"), (1, "assistant")]


@pytest.mark.parametrize(("form", "first"), [("float", [1.0, 0.5]), ("base64", "AACAPwAAAD8=")])
def test_embeddings(form: str, first: Any) -> None:
    request = asked(EMBED, input=["a", "b"], encoding_format=form)
    parts = [Piece(vectors=((1.0, 0.5),)), Piece(vectors=((0.0, 1.0),), end=End(1, (), 4, 0))]
    answer = json.loads(whole(request, *parts))
    assert answer["data"][0] == {"index": 0, "object": "embedding", "embedding": first}
    assert (len(answer["data"]), answer["usage"]["total_tokens"], answer["object"]) == (2, 4, "list")


def test_an_answer_that_begins_anew_holds_nothing_of_before() -> None:
    parts = [Piece((ChoiceDelta(0, (1,), "lost"),)), Piece(again=True), *pieces(ChoiceDelta(0, (1,), "a"))]
    assert json.loads(whole(asked(TEXT, prompt="Hi"), *parts))["choices"][0]["text"] == "a"


def test_half_of_a_surrogate_pair_is_escaped() -> None:
    half = ChoiceDelta(0, (1,), "\ud83d")
    assert "\\ud83d" in whole(asked(CHAT), *pieces(half))
    assert "\\ud83d" in stream(asked(CHAT, stream=True), *pieces(half))[1]
