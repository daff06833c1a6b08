"""What a backend streams, joined, is what it returns; and a completion goes on behind its first tokens as if it had not
been interrupted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rollout.model.errors import AttemptError
from rollout.workloads.serve.frames import CANNOT_CONTINUE
from rollout_worker.backends.environment import engine_environment
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.port import Backend, BackendOptions, Choice, Delta, Request, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = Sampling(temperature=0.0, max_tokens=24)
WARM = Sampling(temperature=1.0, max_tokens=24, seed=5)
PROMPTS = ["What is the sum of 12 and 30?", "red, green and é blue"]
KINDS = [
    "mock",
    pytest.param("transformers", marks=pytest.mark.engine),
    # vLLM's own imports warn of what torch deprecates.
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout_worker.backends.tiny import make_tiny

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    return directory


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    options: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "device": "cpu", "max_num_seqs": 8}
    model = "mock" if kind == "mock" else str(request.getfixturevalue("tiny"))
    os.environ.update(engine_environment({"kind": kind, **options}, local_model=True))
    engine = open_backend(BackendOptions(model=model, kind=kind, options=options))
    await engine.start()
    yield engine
    await engine.close()


_number = 0


async def whole(backend: Backend, prompt: str, sampling: Sampling) -> list[Choice]:
    global _number
    _number += 1
    return (await backend.generate(Request(f"s-{_number}", sampling, prompt=prompt))).choices


async def streamed(
    backend: Backend, prompt: str, sampling: Sampling, so_far: tuple[int, ...] = ()
) -> tuple[list[Choice], list[Delta]]:
    global _number
    _number += 1
    deltas: list[Delta] = []
    request = Request(f"s-{_number}", sampling, prompt=prompt, on_delta=deltas.append, so_far=so_far)
    return (await backend.generate(request)).choices, deltas


async def a_stop(backend: Backend, sampling: Sampling) -> str:
    """A text that completions of the first prompt have in their middle."""
    text = (await whole(backend, PROMPTS[0], sampling))[0].text
    return text[len(text) // 2 : len(text) // 2 + 3]


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 3}, {"logprobs": 2}, {"stops": True}, {"stops": True, "include_stop": True},
     {"stops": True, "min_tokens": 18}, {"skip_special": False}, {"presence_penalty": 1.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
async def test_deltas_joined_are_the_completion(
    backend: Backend, kind: str, sampling: Sampling, more: dict[str, Any]
) -> None:
    if kind == "vllm" and "n" in more and not sampling.temperature:
        pytest.skip("vLLM refuses several completions that would be the same")
    more = dict(more)
    if more.pop("stops", False):
        more["stop"] = (await a_stop(backend, sampling), "\ue000" * 9)
    sampling = replace(sampling, **more)
    for prompt in PROMPTS:
        expected = await whole(backend, prompt, sampling)
        choices, deltas = await streamed(backend, prompt, sampling)
        for index, choice in enumerate(expected):
            own = [delta for delta in deltas if delta.index == index]
            assert "".join(delta.text for delta in own) == choice.text == choices[index].text
            assert choices[index].finish_reason == choice.finish_reason
            assert sum(len(delta.ids) for delta in own) == choices[index].tokens == choice.tokens
            assert [delta.last for delta in own] == [False] * (len(own) - 1) + [True]
            tokens = [entry["token"] for delta in own for entry in delta.logprobs]
            assert tokens == [entry["token"] for entry in choice.logprobs or ()]


@pytest.mark.parametrize(
    "more", [{}, {"stops": True}, {"min_tokens": 9}, {"choice": ("one or the other", "two of them")}], ids=str
)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
async def test_a_completion_goes_on_behind_its_first_tokens(
    backend: Backend, kind: str, sampling: Sampling, more: dict[str, Any]
) -> None:
    if kind == "vllm" and (sampling.temperature or "choice" in more):
        pytest.skip("vLLM draws anew, and begins forms anew")
    more = dict(more)
    if more.pop("stops", False):
        more["stop"] = (await a_stop(backend, sampling), "\ue000" * 4)
    sampling = replace(sampling, **more)
    for prompt in PROMPTS:
        (expected,), first = await streamed(backend, prompt, sampling)
        ids = [token for delta in first for token in delta.ids]
        for count in list(accumulate(len(delta.ids) for delta in first))[:-1]:
            (choice,), deltas = await streamed(backend, prompt, sampling, tuple(ids[:count]))
            repeated, *rest = deltas
            assert repeated.repeated and repeated.ids == tuple(ids[:count])
            assert repeated.text == text_after(first, count)
            assert [token for delta in rest for token in delta.ids] == ids[count:]
            assert repeated.text + "".join(delta.text for delta in rest) == expected.text == choice.text
            assert (choice.finish_reason, choice.tokens) == (expected.finish_reason, expected.tokens)


def text_after(deltas: list[Delta], count: int) -> str:
    """What had come when so many ids had."""
    text, seen = "", 0
    for delta in deltas:
        if seen == count:
            break
        seen += len(delta.ids)
        text += delta.text
    assert seen == count
    return text


async def test_what_an_engine_cannot_go_on_with_it_says(backend: Backend, kind: str) -> None:
    if kind == "transformers":
        pytest.skip("it goes on with all of them")
    sampling = replace(GREEDY, choice=("red and blue", "red or green"))
    with pytest.raises(AttemptError) as error:
        await streamed(backend, PROMPTS[0], sampling, (7, 8))
    assert error.value.error_code == CANNOT_CONTINUE and not error.value.retry
