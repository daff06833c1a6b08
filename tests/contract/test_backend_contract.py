"""What every inference backend promises, over mock, transformers and vLLM with the same small model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from rollout.model.errors import AttemptError
from rollout_worker.backends.environment import engine_environment
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.port import Backend, BackendOptions, Completion, Request, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_LEN = 256
GREEDY = Sampling(temperature=0.0, max_tokens=16)
WARM = Sampling(temperature=1.0, max_tokens=16, seed=11)
PROMPTS = ["What is the sum of 12 and 30?", "red, green", "A worker that is lost gives its work " * 4, "x"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout_worker.backends.tiny import make_tiny

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    return directory


KINDS = [
    "mock",
    pytest.param("transformers", marks=pytest.mark.engine),
    # vLLM's own imports warn of what torch deprecates.
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    options: dict[str, Any] = {"max_model_len": MAX_LEN, "dtype": "float32", "device": "cpu"}
    if kind == "mock":
        options.update(delay_ms=1, seed=3)
        model = "mock"
    else:
        model = str(request.getfixturevalue("tiny"))
        options["max_num_seqs"] = 8
    os.environ.update(engine_environment({"kind": kind, **options}, local_model=True))
    engine = open_backend(BackendOptions(model=model, kind=kind, options=options))
    await engine.start()
    yield engine
    await engine.close()


_number = 0


def ask(prompt: str, sampling: Sampling, **changes: Any) -> Request:
    global _number
    _number += 1
    return Request(f"r-{_number}", replace(sampling, **changes), prompt=prompt)


def texts(completion: Completion) -> list[str]:
    return [choice.text for choice in completion.choices]


async def test_says_what_it_is(backend: Backend) -> None:
    assert backend.device == "cpu"
    assert backend.concurrency >= 1


async def test_greedy_does_not_depend_on_neighbours(backend: Backend) -> None:
    alone = [texts(await backend.generate(ask(prompt, GREEDY))) for prompt in PROMPTS]
    many = await asyncio.gather(*(backend.generate(ask(prompt, GREEDY)) for prompt in PROMPTS * 6))
    assert [texts(completion) for completion in many] == alone * 6
    assert all(text for found in alone for text in found)


async def test_same_seed_same_text(backend: Backend) -> None:
    first = await backend.generate(ask(PROMPTS[0], WARM, n=2))
    crowd = [backend.generate(ask(prompt, WARM, seed=5)) for prompt in PROMPTS * 3]
    again, *_ = await asyncio.gather(backend.generate(ask(PROMPTS[0], WARM, n=2)), *crowd)
    assert texts(first) == texts(again)
    other = await backend.generate(ask(PROMPTS[0], WARM, n=2, seed=1234))
    assert texts(first) != texts(other)


async def test_n_choices_differ(backend: Backend) -> None:
    completion = await backend.generate(ask(PROMPTS[0], WARM, n=4))
    assert len(completion.choices) == 4
    assert len(set(texts(completion))) > 1


async def test_max_tokens(backend: Backend) -> None:
    completion = await backend.generate(ask(PROMPTS[2], GREEDY, max_tokens=3, ignore_eos=True))
    (choice,) = completion.choices
    assert (choice.tokens, choice.finish_reason) == (3, "length")
    assert completion.prompt_tokens > 0


async def test_the_models_length_ends_a_completion(backend: Backend, kind: str) -> None:
    if kind == "mock":
        pytest.skip("the mock repeats its prompt and ends")
    completion = await backend.generate(ask("x", GREEDY, max_tokens=10_000, ignore_eos=True))
    (choice,) = completion.choices
    assert choice.finish_reason == "length"
    assert completion.prompt_tokens + choice.tokens in (MAX_LEN, MAX_LEN + 1)


async def test_stop(backend: Backend) -> None:
    whole = (await backend.generate(ask(PROMPTS[0], GREEDY, ignore_eos=True))).choices[0].text
    stop = whole[4:6]
    (choice,) = (await backend.generate(ask(PROMPTS[0], GREEDY, ignore_eos=True, stop=(stop, "\0never")))).choices
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


async def test_logprobs(backend: Backend) -> None:
    (none,) = (await backend.generate(ask(PROMPTS[1], GREEDY))).choices
    assert none.logprobs is None
    (chosen,) = (await backend.generate(ask(PROMPTS[1], GREEDY, logprobs=0))).choices
    assert chosen.logprobs is not None
    assert len(chosen.logprobs) == chosen.tokens and all(token["top"] == [] for token in chosen.logprobs)
    (three,) = (await backend.generate(ask(PROMPTS[1], GREEDY, logprobs=3))).choices
    assert three.logprobs is not None
    for token in three.logprobs:
        assert len(token["top"]) == 3
        assert token["top"][0]["logprob"] == pytest.approx(token["logprob"])
        assert token["logprob"] <= 0 and isinstance(token["token"], str)
        assert [t["logprob"] for t in token["top"]] == sorted((t["logprob"] for t in token["top"]), reverse=True)


async def test_prompt_too_long(backend: Backend) -> None:
    neighbour = backend.generate(ask(PROMPTS[0], GREEDY))
    bad = backend.generate(ask("word " * 2000, GREEDY))
    fine, error = await asyncio.gather(neighbour, bad, return_exceptions=True)
    assert isinstance(fine, Completion)
    assert isinstance(error, AttemptError)
    assert (error.error_code, error.retry) == ("prompt_too_long", False)
    assert str(MAX_LEN) in str(error)


async def test_cancellation_frees_the_batch(backend: Backend) -> None:
    long = [ask(prompt, GREEDY, max_tokens=200, ignore_eos=True) for prompt in PROMPTS * 8]
    tasks = [asyncio.ensure_future(backend.generate(request)) for request in long]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    out = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError | Completion) for result in out)
    assert any(isinstance(result, asyncio.CancelledError) for result in out)
    assert (await backend.generate(ask(PROMPTS[0], GREEDY))).choices


async def test_chat(backend: Backend, kind: str) -> None:
    messages = ({"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello."})
    chat = await backend.generate(Request("chat", GREEDY, messages=messages))
    assert chat.choices[0].text
    if kind != "mock":
        written = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        plain = await backend.generate(ask(f"{written}<|im_start|>assistant\n", GREEDY))
        assert texts(plain) == texts(chat) and plain.prompt_tokens == chat.prompt_tokens


async def test_json_schema(backend: Backend) -> None:
    rows = [ask(prompt, WARM, json_schema=SCHEMA, max_tokens=60, seed=at) for at, prompt in enumerate(PROMPTS)]
    rows.append(ask(PROMPTS[0], GREEDY, json_schema=SCHEMA, max_tokens=60))
    for completion in await asyncio.gather(*(backend.generate(row) for row in rows)):
        (choice,) = completion.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMA)


async def test_a_schema_that_cannot_be(backend: Backend, kind: str) -> None:
    if kind == "mock":
        pytest.skip("the mock reads only what it knows of a schema")
    fine, error = await asyncio.gather(
        backend.generate(ask(PROMPTS[0], GREEDY)),
        backend.generate(ask(PROMPTS[0], GREEDY, json_schema={"type": "nonsense"})),
        return_exceptions=True,
    )
    assert isinstance(fine, Completion)
    assert isinstance(error, AttemptError)
    assert (error.error_code, error.retry) == ("bad_request", False)


async def test_penalties_and_cuts_are_taken(backend: Backend) -> None:
    sampling = replace(WARM, top_k=5, top_p=0.9, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5)
    sampling = replace(sampling, repetition_penalty=1.2, min_tokens=4)
    completion = await backend.generate(ask(PROMPTS[0], sampling))
    assert completion.choices[0].text
