"""The backend `vllm`, the backend `openai` on vLLM's own server, and vLLM's server and batch runner asked without
Rollout give the same (make test-vllm)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from replica_rig import serving
from rollout.workloads.serve.frames import Ask, ChoiceDelta, End
from rollout_worker.backends.environment import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

VLLM = {"kind": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16}
ROWS = 200
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"enum": [1, 2, 3]}},
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, "-m", "rollout.cli", "model", "make-tiny", str(directory)], check=True, timeout=120)
    return directory


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("server") / "log").open("w")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny), "--port", str(port)]
    command += ["--served-model-name", str(tiny), "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "xlam"]  # a form of JSON, as ours is
    command += ["--structured-outputs-config", json.dumps({"backend": "guidance", "disable_any_whitespace": True})]
    env = os.environ | engine_environment({**VLLM, "device": "cpu"}, local_model=True)
    process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 300
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5):
            return True
    except OSError:
        return False


def body(n: int) -> tuple[str, dict[str, Any]]:
    """The n-th of chats, completions and chats with tools, in turns."""
    chat = [{"role": "user", "content": f"Say {n}."}]
    greedy = {"temperature": 0, "max_tokens": 16}
    match n % 8:
        case 0:
            return "chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, *chat], **greedy}
        case 1:
            return "chat/completions", {"messages": chat, "logprobs": True, "top_logprobs": 2, **greedy}
        case 2:
            return "completions", {"prompt": f"What is {n} times 8?", **greedy}
        case 3:
            return "completions", {"prompt": [f"One {n}", f"Two {n}"], "stop": ["e"], **greedy}
        case 4:
            return "completions", {"prompt": [n, 17, 230, 5], "repetition_penalty": 1.2, **greedy}
        case 5:
            named = {"type": "function", "function": {"name": "get_weather"}}
            forced = {"tools": TOOLS, "tool_choice": named, **greedy, "max_tokens": 64}
            return "chat/completions", {"messages": chat, **forced}
        case 6:
            # A function without free text: calls that are cut off at the limit are text here, and nothing there.
            forced = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
            return "chat/completions", {"messages": chat, **forced, **greedy, "max_tokens": 96}
        case _:
            # Ours keeps special tokens where there may be calls, since some models mark calls by them.
            return "chat/completions", {"messages": chat, "tools": TOOLS, "skip_special_tokens": False, **greedy}


def line(n: int) -> dict[str, Any]:
    path, asked = body(n)
    return {"custom_id": f"r-{n}", "method": "POST", "url": f"/v1/{path}", "body": asked}


def ask(server: str, model: str, n: int) -> dict[str, Any]:
    return post(server, model, *body(n))


def post(server: str, model: str, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": model, **asked}).encode()
    request = urllib.request.Request(f"{server}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What two answers to a body must have in common."""
    return [choice_of(choice) for choice in answer["choices"]], {key: answer["usage"][key] for key in COUNTS}


COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def choice_of(choice: dict[str, Any]) -> tuple[Any, ...]:
    message = choice.get("message") or {"content": choice["text"]}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parsed = [(call["name"], json.loads(call["arguments"])) for call in calls]
    # A named function has called, whatever the reason: OpenAI says "stop" there, and we say "tool_calls".
    return message.get("content") or "", parsed, "stop" if parsed else choice["finish_reason"]


def test_the_same_texts_calls_and_counts(cli: Cli, tiny: Path, server: str) -> None:
    inputs = [*(line(n) for n in range(ROWS)), *plain(60), {"id": "long", "prompt": "far too long " * 500}]
    (cli.directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inputs))
    found: list[list[tuple[Any, ...]]] = []
    answered: list[list[dict[str, Any]]] = []
    for name, backend in (("engine", VLLM), ("server", {"kind": "openai", "base_url": server})):
        path = cli.config(
            f"{name}.toml", model={"uri": str(tiny)}, backend=backend, output={"dir": name, "openai": True}, sampling={"temperature": 0, "max_tokens": 16}
        )  # fmt: skip
        done = cli.run("infer", "batch", "--config", str(path), timeout=400)
        assert done.code == 0, done
        (error,) = lines(cli.directory / name / "errors.jsonl")
        assert (error["id"], error["code"]) == ("long", "prompt_too_long")
        found.append(
            [(row["id"], row["completion"], row["finish_reason"], row["usage"]) for row in cli.completions(name)][ROWS:]
        )
        answered.append(lines(cli.directory / name / "openai.jsonl")[:ROWS])
    assert len(found[0]) == 60 and found[0] == found[1]
    with ThreadPoolExecutor(16) as threads:
        asked = list(threads.map(lambda n: ask(server, str(tiny), n), range(ROWS)))
    for n, (engine, passed, bare) in enumerate(zip(*answered, asked, strict=True)):
        assert said(passed["response"]["body"]) == said(bare), inputs[n]
        if not open_ended(n):
            assert said(engine["response"]["body"]) == said(bare), inputs[n]
    forced = [n for n in range(ROWS) if open_ended(n) and asked[n]["choices"][0]["finish_reason"] != "length"]
    assert forced
    for n in forced:
        assert choice_of(answered[0][n]["response"]["body"]["choices"][0]) == choice_of(asked[n]["choices"][0]), n


@pytest.mark.filterwarnings("ignore")
async def test_a_replica_streams_what_the_server_answers(
    tiny: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = {**VLLM, "device": "cpu"}
    for name, value in engine_environment(backend, local_model=True).items():
        monkeypatch.setenv(name, value)
    bodies = [body(n) for n in range(48) if not open_ended(n)]
    chat = {"messages": [{"role": "user", "content": "To the end of the context."}], "temperature": 0}
    bodies += [("chat/completions", chat), ("completions", {"prompt": "As many as OpenAI's.", "temperature": 0})]
    with ThreadPoolExecutor(16) as threads:
        bare = list(threads.map(lambda asked: post(server, str(tiny), *asked), bodies))
    async with serving(str(tiny), **backend) as rig:
        for n, (path, asked) in enumerate(bodies):
            rig.replica.ask(Ask(n, f"/v1/{path}", {"model": str(tiny), "stream": True, **asked}))
        for n, (answer, asked) in enumerate(zip(bare, bodies, strict=True)):
            end = await rig.replica.end(n)
            assert said(as_answer(end, rig.replica.deltas(n))) == said(answer), asked
        number = len(bodies)
        for n in (0, 2, len(bodies) - 1):  # another replica goes on behind what this one has said
            path, asked = bodies[n]
            whole = rig.replica.deltas(n)
            for at in range(1, len(whole)):
                number += 1
                so_far = tuple(token for one in whole[:at] for token in one.ids)
                rig.replica.ask(Ask(number, f"/v1/{path}", asked, (so_far,)))
                end = await rig.replica.end(number)
                joined = as_answer(end, [*whole[:at], *rig.replica.deltas(number)])
                assert said(joined) == said(bare[n]), (asked, at)


def as_answer(end: End, deltas: list[ChoiceDelta]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for choice in end.choices:
        own = [delta for delta in deltas if delta.i == choice.i]
        calls = [call for delta in own for call in delta.tool_calls]
        message = {"content": "".join(delta.text for delta in own), "tool_calls": calls}
        choices.append({"message": message, "finish_reason": choice.finish_reason})
    counts = end.prompt_tokens, end.completion_tokens, end.prompt_tokens + end.completion_tokens
    return {"choices": choices, "usage": dict(zip(COUNTS, counts, strict=True))}


def open_ended(n: int) -> bool:
    """Where a call is required, vLLM's server takes keys in it beside name and parameters, without end if the model
    writes such; ours does not."""
    return body(n)[1].get("tool_choice") == "required"


def test_the_same_vectors_as_the_batch_runner(cli: Cli, tiny: Path) -> None:
    asked: list[Any] = [[f"What is {n} times 8?", "and 9?"] if n % 4 else [n, 17, 230] for n in range(40)]
    inputs = [
        {"custom_id": f"e-{n}", "method": "POST", "url": "/v1/embeddings", "body": {"model": str(tiny), "input": one}}
        for n, one in enumerate(asked)
    ]
    (cli.directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inputs))
    backend = {key: value for key, value in VLLM.items() if key != "kind"} | {"device": "cpu"}
    path = cli.config(model={"uri": str(tiny)}, backend=VLLM, output={"openai": True})
    path.write_text(path.read_text().replace("[backend]", '[backend]\nengine = { runner = "pooling" }'))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", "in.jsonl", "-o", "bare.jsonl"]
    command += ["--model", str(tiny), "--runner", "pooling", "--dtype", "float32", "--max-model-len", "256"]
    env = os.environ | engine_environment({**backend, "kind": "vllm"}, local_model=True)
    with (cli.directory / "log").open("w") as log:
        bare = subprocess.Popen([*command, "--enforce-eager"], cwd=cli.directory, stdout=log, stderr=log, env=env)
        done = cli.run("infer", "batch", "--config", str(path), timeout=300)
        assert done.code == 0, done
        assert bare.wait(timeout=300) == 0, (cli.directory / "log").read_text()[-3000:]
    theirs = {row["custom_id"]: row["response"]["body"] for row in lines(cli.directory / "bare.jsonl")}
    ours = lines(cli.directory / "out" / "openai.jsonl")
    assert [row["custom_id"] for row in ours] == [row["custom_id"] for row in inputs]
    for row in ours:
        body, other = row["response"]["body"], theirs[row["custom_id"]]
        assert len(body["data"]) == len(other["data"])
        for vector, bare_vector in zip(body["data"], other["data"], strict=True):
            assert vector["embedding"] == pytest.approx(bare_vector["embedding"], abs=1e-4)
        assert body["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def plain(count: int) -> list[dict[str, Any]]:
    chat = ({"id": f"c-{n}", "messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(count // 2))
    text = ({"id": f"p-{n}", "prompt": f"What is {n} times 8?", "sampling": {"logprobs": 1}} for n in range(count // 2))
    return [*chat, *text]
