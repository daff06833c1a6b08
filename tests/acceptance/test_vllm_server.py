"""`[backend] kind = "openai"` on vLLM's own server gives what the backend `vllm` gives (make test-vllm)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from rollout_worker.backends.environment import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

VLLM = {"kind": "vllm", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16}
ROWS = 200


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


def rows(count: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for n in range(count):
        chat = [{"role": "user", "content": f"Say {n}."}]
        if n % 3 == 0:
            out.append(
                {
                    "custom_id": f"r-{n}",
                    "url": "/v1/chat/completions",
                    "body": {"messages": chat, "max_tokens": 16, "temperature": 0},
                }
            )
        elif n % 3 == 1:
            out.append({"id": f"r-{n}", "messages": chat})
        else:
            out.append({"id": f"r-{n}", "prompt": f"What is {n} times 8?", "sampling": {"logprobs": 1}})
    return out


def test_the_same_texts_and_counts(cli: Cli, tiny: Path, server: str) -> None:
    inputs = [*rows(ROWS), {"id": "long", "prompt": "far too long " * 500}]
    (cli.directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inputs))
    found: list[list[tuple[Any, ...]]] = []
    for name, backend in (("engine", VLLM), ("server", {"kind": "openai", "base_url": server})):
        path = cli.config(
            f"{name}.toml", model={"uri": str(tiny)}, backend=backend, output={"dir": name}, sampling={"temperature": 0, "max_tokens": 16}
        )  # fmt: skip
        done = cli.run("infer", "batch", "--config", str(path), timeout=400)
        assert done.code == 0, done
        (error,) = map(json.loads, (cli.directory / name / "errors.jsonl").read_text().splitlines())
        assert (error["id"], error["code"]) == ("long", "prompt_too_long")
        found.append(
            [(row["id"], row["completion"], row["finish_reason"], row["usage"]) for row in cli.completions(name)]
        )
    assert len(found[0]) == ROWS and found[0] == found[1]
