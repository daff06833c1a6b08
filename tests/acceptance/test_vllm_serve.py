"""`rollout serve` on vLLM answers as vLLM's own server does: equal bodies but for ids and times (make test-vllm)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bare_vllm import answers, bare_vllm, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BACKEND = {"kind": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16}
RECORDED = Path(__file__).with_name("client_requests.jsonl")
"""What two public clients send: {client, path, body}."""
GREEDY = {"temperature": 0, "max_tokens": 16}
CHAT = "/v1/chat/completions"
FORGET = frozenset({"id", "created"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """(model, URL of the bare server, URL of ours)."""
    directory = tmp_path_factory.mktemp("serve")
    tiny = directory / "tiny"
    subprocess.run([sys.executable, "-m", "rollout.cli", "model", "make-tiny", str(tiny)], check=True, timeout=120)
    port = free_port()
    backend = "".join(f"{key} = {json.dumps(value)}\n" for key, value in BACKEND.items())
    (directory / "serve.toml").write_text(
        f'[model]\nuri = "{tiny}"\n[backend]\n{backend}[serve]\nlisten_addr = "127.0.0.1:{port}"\nserved_name = "{tiny}"\n'
    )
    command = [sys.executable, "-m", "rollout.cli", "serve", "--config", "serve.toml"]
    with (directory / "ours.log").open("w") as log, bare_vllm(tiny, directory / "bare.log", BACKEND) as bare:
        ours = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 300
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert ours.poll() is None and time.monotonic() < deadline, (directory / "ours.log").read_text()[-3000:]
                time.sleep(0.5)
            yield str(tiny), bare, f"http://127.0.0.1:{port}/v1"
        finally:
            ours.send_signal(signal.SIGINT)
            assert ours.wait(timeout=60) in (0, 130), (directory / "ours.log").read_text()[-3000:]


def ask(base: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status (400 for 422 too, which vLLM's server does not use), and the JSON body or the chunks of the stream."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(base.removesuffix("/v1") + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return 400 if error.code == 422 else error.code, None
    if not body.get("stream"):
        return status, forget(json.loads(text))
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return status, joined([forget(json.loads(event)) for event in events[:-1]])


def forget(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: forget(one) for key, one in value.items() if key not in FORGET}
    return [forget(one) for one in value] if isinstance(value, list) else value


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A stream without the places where it was cut: texts of each choice, and every other value in its last state."""
    found: dict[str, Any] = {"keys": sorted({key for chunk in chunks for key in chunk}), "choices": {}}
    for chunk in chunks:
        found["usage"] = chunk.get("usage") or found.get("usage")
        found["object"] = chunk["object"]
        for choice in chunk["choices"]:
            kept = found["choices"].setdefault(choice["index"], {"text": "", "logprobs": []})
            delta = choice.get("delta", choice)
            kept["text"] += delta.get("content") or delta.get("text") or ""
            kept["finish_reason"] = choice.get("finish_reason") or kept.get("finish_reason")
            kept["role"] = delta.get("role") or kept.get("role")
            kept["logprobs"] += (choice.get("logprobs") or {}).get("content") or ()
            for call in delta.get("tool_calls") or ():
                part = kept.setdefault("calls", {}).setdefault(call["index"], {"name": "", "arguments": ""})
                for key, value in call["function"].items():
                    part[key] += value or ""
    return found


def chat(which: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": f"Say {which}."}], **GREEDY, **more}


def text(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, **GREEDY, **more}


def streamed(asked: tuple[str, dict[str, Any]], **more: Any) -> tuple[str, dict[str, Any]]:
    return asked[0], {**asked[1], "stream": True, **more}


FUNCTION = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"], "additionalProperties": False},
}  # fmt: skip
FORCED = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}  # fmt: skip
PLAIN = [
    chat(1), chat(2, logprobs=True, top_logprobs=2), chat(3, n=2), chat(4, stop=["e"]), chat(5, max_tokens=64, **FORCED),
    chat(6, response_format={"type": "json_object"}), chat(7, logit_bias={"17": 5}), chat(8, min_tokens=8),
    chat(9, max_completion_tokens=5), text("What is 8 times 8?"), text(["One", "Two"]), text([5, 17, 230, 5]),
    text("Logs", logprobs=2), text("Again", repetition_penalty=1.2), text("Stop", stop=["e", "a"], include_stop_str_in_output=True),
]  # fmt: skip
ASKED = [
    *PLAIN,
    *(streamed(one) for one in PLAIN),
    *(streamed(one, stream_options={"include_usage": True}) for one in PLAIN[:10]),
]
REFUSED = [
    (CHAT, {"messages": "hello"}), (CHAT, {}), (CHAT, {"messages": [{"role": "user", "content": "x " * 4000}]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}), (CHAT, {"model": "other", "messages": []}), ("/v1/nowhere", {}),
]  # fmt: skip


def test_equal_answers_but_for_ids_and_times(servers: tuple[str, str, str]) -> None:
    model, bare, ours = servers
    asked = [(path, {"model": model, **body}) for path, body in ASKED]
    for record in map(json.loads, RECORDED.read_text("utf-8").splitlines()):
        if record["path"] != "/v1/embeddings":  # neither serves them with a model of text
            asked.append((record["path"], {**record["body"], "model": model}))
    with ThreadPoolExecutor(8) as threads:
        theirs = list(threads.map(lambda one: ask(bare, *one), asked))
        found = list(threads.map(lambda one: ask(ours, *one), asked))
    differing = [
        {"asked": one, "bare": their, "ours": our}
        for one, their, our in zip(asked, theirs, found, strict=True)
        if their != our
    ]
    assert not differing, f"{len(differing)} of {len(asked)} differ; the first: {json.dumps(differing[0], indent=1)}"


def test_refused_with_the_same_status(servers: tuple[str, str, str]) -> None:
    model, bare, ours = servers
    for path, body in REFUSED:
        body = {"model": model, **body}
        assert ask(ours, path, body)[0] == ask(bare, path, body)[0], (path, body)
