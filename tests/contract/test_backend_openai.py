"""The backend `openai` against a server of the tests that misbehaves: each row has its own answer, once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from openai_server import Answer, OpenAIServer, refused
from rollout.model.errors import AttemptError
from rollout_worker.backends import openai, openai_faults, pacing
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.port import Backend, BackendOptions, Delta, Embed, EngineFaultError, Request, Sampling

_opened: list[Backend] = []


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenAIServer]:
    monkeypatch.setattr(pacing, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(pacing, "BACKOFF_MAX_S", 0.05)
    found = OpenAIServer()
    await found.start()
    yield found
    for backend in _opened:
        await backend.close()
    _opened.clear()
    await found.stop()


async def opened(server: OpenAIServer, **options: Any) -> Backend:
    given = {"base_url": server.url, "max_in_flight": 16, "timeout_s": 5.0, **options}
    backend = open_backend(BackendOptions("m", kind="openai", options=given))
    await backend.start()
    _opened.append(backend)
    return backend


def ask(text: str, **changes: Any) -> Request:
    return Request("r", Sampling(), messages=({"role": "user", "content": text},), **changes)


async def text_of(backend: Backend, text: str) -> str:
    (choice,) = (await backend.generate(ask(text))).choices
    return choice.text


async def until(happened: Callable[[], Any]) -> None:
    while not happened():  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.005)


WORDS = ["cut", "half", "garbage", "twice", "late", "slow", "429", "429 after", "500", "503", "408", "409"]


def chosen(word: str) -> str | Answer:
    if not word[:3].isdigit():
        return word
    return refused(int(word[:3]), **({"retry_after_ms": "20"} if "after" in word else {}))


async def test_each_row_has_its_own_answer_whatever_the_server_does(server: OpenAIServer) -> None:
    draws = random.Random(1)
    server.fault = lambda text, nth: chosen(draws.choice(WORDS)) if nth < 4 and draws.random() < 0.6 else ""
    backend = await opened(server, timeout_s=1.0)
    texts = [f"row {n}" for n in range(150)]
    found = await asyncio.gather(*(text_of(backend, text) for text in texts))
    assert found == [f"echo of {text}" for text in texts]


@pytest.mark.parametrize("word", ["twice", "late"])
async def test_an_answer_that_nobody_asked_for_is_not_the_next_rows(server: OpenAIServer, word: str) -> None:
    server.fault = lambda text, nth: word
    backend = await opened(server)
    for n in range(20):
        assert await text_of(backend, f"row {n}") == f"echo of row {n}"
        await asyncio.sleep(0.05 if word == "late" else 0)


async def test_bodies_say_only_what_a_server_would_not_do_by_itself(server: OpenAIServer) -> None:
    backend = await opened(server)
    await backend.generate(ask("plain"))
    await backend.generate(
        Request(
            "r",
            Sampling(max_tokens=5, temperature=0.0, top_k=3, stop=("x",), logprobs=2, n=2, seed=7, seed_given=True),
            prompt="text",
        )
    )
    await backend.generate(
        Request("r", Sampling(json_schema={"type": "object"}), messages=({"role": "user", "content": "s"},))
    )
    body = {"messages": [{"role": "user", "content": "own"}], "tools": [{"type": "function"}], "verbosity": "low"}
    await backend.generate(Request("r", Sampling(temperature=0.3), body=body, url="/v1/chat/completions"))
    plain, text, schema, own = server.asked
    assert (plain.path, plain.body) == (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "plain"}], "max_tokens": 64},
    )
    assert text.path == "/v1/completions" and text.body == {
        "model": "m", "prompt": "text", "max_tokens": 5, "temperature": 0.0, "top_k": 3, "stop": ["x"], "logprobs": 2, "n": 2, "seed": 7,
    }  # fmt: skip
    assert schema.body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert own.body == {"model": "m", **body}


async def test_what_an_answer_says(server: OpenAIServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    token = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.0}]}
    message = {"content": None, "tool_calls": [call], "reasoning_content": "because", "refusal": None}
    choices = [{"index": 0, "finish_reason": "tool_calls", "message": message, "logprobs": {"content": [token]}}]
    body = json.dumps({"choices": choices, "usage": {"prompt_tokens": 4, "completion_tokens": 9}}).encode()
    server.fault = lambda text, nth: (200, {}, body)
    backend = await opened(server)
    completion = await backend.generate(ask("x"))
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.reasoning, completion.prompt_tokens) == (
        "",
        "tool_calls",
        "because",
        4,
    )
    assert choice.tool_calls == [{**call, "function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert choice.logprobs == [{"token": "a", "logprob": -0.5, "top": [{"token": "b", "logprob": -1.0}]}]


def events(*chunks: dict[str, Any], done: bool = True) -> Answer:
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks]
    return 200, {"content-type": "text/event-stream"}, "".join([": hi\n\n", *lines, "data: [DONE]\n\n" * done]).encode()


def chunk(index: int, finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return {"id": "c", "choices": [choice]}


async def test_a_streamed_answer_is_heard_as_it_comes_and_is_whole_in_the_end(server: OpenAIServer) -> None:
    token = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]}
    call = {"index": 0, "id": "k", "function": {"name": "f", "arguments": '{"a"'}}
    server.fault = lambda text, nth: events(
        chunk(0, role="assistant", content=""),
        chunk(0, reasoning_content="because"),
        chunk(0, content="Hé", logprobs=token),
        chunk(1, content="b"),
        chunk(0, tool_calls=[call]),
        chunk(0, tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        chunk(0, finish="tool_calls"),
        chunk(1, finish="length", content="c"),
        {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}},
    )
    backend = await opened(server)
    deltas: list[Delta] = []
    completion = await backend.generate(ask("x", on_delta=deltas.append))
    assert server.asked[0].body["stream"] is True
    first, second = completion.choices
    said = [{"token": "a", "logprob": -0.5, "top": []}]
    whole = {"id": "k", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert deltas == [
        Delta(0, reasoning="because"),
        Delta(0, "Hé", logprobs=(said[0],)),
        Delta(1, "b"),
        Delta(1, "c"),
        Delta(0, tool_calls=(whole,)),
    ]
    assert (first.text, first.reasoning, first.tool_calls, first.logprobs) == ("Hé", "because", [whole], said)
    assert (second.text, second.finish_reason) == ("bc", "length")
    assert (completion.prompt_tokens, first.tokens + second.tokens) == (4, 9)


async def test_a_stream_that_breaks_is_asked_again_only_if_nobody_has_heard_of_it(server: OpenAIServer) -> None:
    text = chunk(0, content="a")
    broken = {
        "before": events(done=False),
        "within": events(text, done=False),
        "error": events(text, {"error": {"code": 503}}),
    }
    whole = events(text, chunk(0, finish="stop"))
    server.fault = lambda said, nth: broken[said] if nth == 1 else whole
    backend = await opened(server)
    deltas: list[Delta] = []
    completion = await backend.generate(ask("before", on_delta=deltas.append))
    assert completion.choices[0].text == "a" and deltas == [Delta(0, "a")]
    for word in ("within", "error"):
        with pytest.raises(AttemptError) as error:
            await backend.generate(ask(word, on_delta=deltas.append))
        assert error.value.retry and server.counts[word] == 1


async def test_a_server_that_does_not_stream_answers_at_once(server: OpenAIServer) -> None:
    backend = await opened(server)
    deltas: list[Delta] = []
    completion = await backend.generate(ask("x", on_delta=deltas.append))
    assert completion.choices[0].text == "echo of x" and not deltas


async def test_tokens_of_several_completions_add_up_to_what_the_server_counted(server: OpenAIServer) -> None:
    backend = await opened(server)
    completion = await backend.generate(Request("r", Sampling(n=2), prompt="two words"))
    assert [choice.tokens for choice in completion.choices] == [2, 1] and completion.prompt_tokens == 2


async def test_embeddings(server: OpenAIServer) -> None:
    backend = await opened(server)
    completion = await backend.generate(Request("r", Sampling(), embed=Embed("text", dimensions=2)))
    assert completion.embeddings == [[0.5, -1.0]] and not completion.choices
    assert server.asked[0].body == {"model": "m", "input": "text", "dimensions": 2}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (refused(400, "bad key x"), "bad_request"),
        (refused(404, "this is a chat model"), "bad_request"),
        (refused(422, "no such parameter"), "bad_request"),
        (refused(413, "large"), "prompt_too_long"),
        (refused(400, "maximum context length is 8192 tokens", "context_length_exceeded"), "prompt_too_long"),
        (refused(400, "filtered", "content_filter"), "content_filter"),
        (refused(429, "Request too large for m on tokens per min"), "prompt_too_long"),
        ((200, {}, b'{"choices": [{"finish_reason": "content_filter", "message": {"content": ""}}]}'), "content_filter"),
    ],
)  # fmt: skip
async def test_what_only_the_row_is_to_blame_for_is_its_error_at_once(
    server: OpenAIServer, answer: Answer, code: str
) -> None:
    server.fault = lambda text, nth: answer if text == "bad" else ""
    backend = await opened(server)
    with pytest.raises(AttemptError) as error:
        await backend.generate(ask("bad"))
    assert (error.value.error_code, error.value.retry, server.counts["bad"]) == (code, False, 1)
    assert not isinstance(error.value, EngineFaultError)
    assert await text_of(backend, "good") == "echo of good"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (refused(401, "Incorrect API key provided: sesame-key-4711"), "authentication_failed"),
        (refused(404, "The model `m` does not exist", "model_not_found"), "model_unknown"),
        (refused(429, "You exceeded your quota", "insufficient_quota"), "quota_exhausted"),
        (refused(308, location="https://elsewhere/v1"), "redirected"),
    ],
)  # fmt: skip
async def test_what_no_row_can_get_past_is_the_engines(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, answer: Answer, code: str
) -> None:
    monkeypatch.setenv("THE_KEY", "sesame-key-4711")
    server.fault = lambda text, nth: answer
    backend = await opened(server, api_key_env="THE_KEY")
    with pytest.raises(EngineFaultError) as error:
        await backend.generate(ask("x"))
    assert (error.value.error_code, error.value.retry) == (code, False)
    assert server.asked[0].headers["authorization"] == "Bearer sesame-key-4711"


async def test_a_row_that_breaks_the_server_fails_after_some_tries(server: OpenAIServer) -> None:
    server.fault = lambda text, nth: refused(500)
    backend = await opened(server)
    with pytest.raises(AttemptError) as error:
        await backend.generate(ask("x"))
    assert (error.value.error_code, error.value.retry) == ("server_error", True)
    assert server.counts["x"] == openai_faults.BROKEN_TRIES


async def test_a_server_that_gets_slow_under_load_is_asked_less_at_once(server: OpenAIServer) -> None:
    server.fault = lambda text, nth: "slow" if server.open_requests > 4 else ""
    server.delay_s = 0.2
    backend = await opened(server, max_in_flight=32, timeout_s=0.6)
    texts = [f"row {n}" for n in range(32)]
    assert await asyncio.gather(*(text_of(backend, text) for text in texts)) == [f"echo of {text}" for text in texts]


async def test_a_server_that_says_when_to_come_again_is_left_alone_until_then(server: OpenAIServer) -> None:
    server.fault = lambda text, nth: refused(429, retry_after_ms="400") if (text, nth) == ("a", 1) else ""
    backend = await opened(server)
    first = asyncio.create_task(text_of(backend, "a"))
    await until(lambda: server.asked)
    await asyncio.sleep(0.05)
    await asyncio.gather(first, text_of(backend, "b"))
    assert all(later.at - server.asked[0].at >= 0.39 for later in server.asked[1:])


async def test_people_hear_of_a_long_pause(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "TELL_AFTER_S", 0.1)
    server.fault = lambda text, nth: refused(429, "come later", retry_after_ms="300") if nth == 1 else ""
    backend, said = await opened(server), list[str]()
    await asyncio.gather(*(backend.generate(ask(f"row {n}", waits=said.append)) for n in range(3)))
    assert len(said) == 2 and "come later" in said[0] and said[1] == ""


async def test_a_server_that_restarts_costs_no_row(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "TELL_AFTER_S", 0.1)
    backend, said = await opened(server), list[str]()
    await server.stop()
    row = asyncio.create_task(backend.generate(ask("x", waits=said.append)))
    await until(lambda: said)
    await server.start()
    assert (await row).choices[0].text == "echo of x"
    assert "cannot be reached" in said[0] and said[-1] == ""


async def test_cancelling_a_row_closes_its_request(server: OpenAIServer) -> None:
    server.delay_s = 0.2
    backend = await opened(server)
    row = asyncio.create_task(text_of(backend, "x"))
    await until(lambda: server.asked)
    row.cancel()
    with pytest.raises(asyncio.CancelledError):
        await row
    await until(lambda: server.left)


async def test_a_model_that_knows_the_newer_name_of_the_limit_only(server: OpenAIServer) -> None:
    backend = await opened(server)

    def fault(text: str, nth: int) -> str | Answer:
        body = next(asked.body for asked in reversed(server.asked) if asked.body["messages"][0]["content"] == text)
        return "" if "max_completion_tokens" in body else refused(400, "use 'max_completion_tokens' instead")

    server.fault = fault
    server.delay_s = 0.05
    texts = [f"row {n}" for n in range(8)]  # all of them hear it at once
    assert await asyncio.gather(*(text_of(backend, text) for text in texts)) == [f"echo of {text}" for text in texts]
    await text_of(backend, "later")
    assert server.counts["later"] == 1


# ---- start


async def fault_at_start(server: OpenAIServer, **options: Any) -> AttemptError:
    with pytest.raises(AttemptError) as error:
        await opened(server, **options)
    return error.value


async def test_a_key_that_is_not_set(server: OpenAIServer) -> None:
    error = await fault_at_start(server, api_key_env="NO_SUCH_KEY")
    assert (error.error_code, error.retry) == ("key_not_set", False) and "NO_SUCH_KEY=" in error.message


async def test_a_key_that_is_refused(server: OpenAIServer) -> None:
    server.models = refused(401, "who are you")
    error = await fault_at_start(server)
    assert (error.error_code, error.retry) == ("authentication_failed", False)


async def test_nobody_is_there(server: OpenAIServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error = await fault_at_start(server, base_url=f"http://127.0.0.1:{free.getsockname()[1]}/v1")
    assert (error.error_code, error.retry) == ("server_unreachable", True)


async def test_a_server_without_a_list_of_models_is_asked_all_the_same(server: OpenAIServer) -> None:
    server.models = refused(404)
    assert await text_of(await opened(server), "x") == "echo of x"


async def test_a_certificate_that_is_not_trusted(server: OpenAIServer, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    await server.stop()
    await server.start(context)
    error = await fault_at_start(server, base_url=f"https://127.0.0.1:{server.port}/v1")
    assert (error.error_code, error.retry) == ("certificate_untrusted", False) and "SSL_CERT_FILE" in error.message


def self_signed(directory: Path) -> tuple[Path, Path]:
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1)).sign(
        key, hashes.SHA256()
    )
    certificate, private = directory / "cert.pem", directory / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, private
