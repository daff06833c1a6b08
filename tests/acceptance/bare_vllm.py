"""vLLM's own server, asked without Rollout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_worker.backends.environment import engine_environment


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def bare_vllm(model: Path, log_path: Path, backend: dict[str, Any], extra: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server of `model` by the name of its path, with the tool calls in JSON, as ours reads them."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", str(model), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(backend["max_model_len"]), "--fingerprint-mode", "none", *extra]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "xlam"]
    command += ["--structured-outputs-config", json.dumps({"backend": "guidance", "disable_any_whitespace": True})]
    env = os.environ | engine_environment({**backend, "device": "cpu"}, local_model=True)
    url = f"http://127.0.0.1:{port}/v1"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            deadline = time.monotonic() + 300
            while not answers(f"{url}/models"):
                assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()[-3000:]
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def answers(url: str) -> bool:
    """Whether a GET of it is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
