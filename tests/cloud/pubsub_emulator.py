"""Google's own emulator of Pub/Sub, a Java program that the Cloud SDK brings (`gcloud components install
pubsub-emulator`)."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config.cloud import CloudSection

PROJECT = "rollout-tests"
SDKS = (Path("/usr/lib/google-cloud-sdk"), Path("/usr/share/google-cloud-sdk"), Path.home() / "google-cloud-sdk")
START_S = 60.0


@dataclass
class Pubsub:
    endpoint: str
    names: int = 0

    def cloud(self, **pubsub: Any) -> CloudSection:
        given = {"provider": "gcp", "project": PROJECT, "pubsub": {"endpoint_url": self.endpoint, **pubsub}}
        return CloudSection.model_validate(given)

    def pair(self, **subscription: Any) -> tuple[str, str]:
        """A new topic and a subscription on it, by their names. Fields as in REST: `ackDeadlineSeconds=10`."""
        self.names += 1
        topic, name = f"topic-{self.names}", f"subscription-{self.names}"
        self.call("PUT", f"topics/{topic}", {})
        body = {"topic": f"projects/{PROJECT}/topics/{topic}", **subscription}
        self.call("PUT", f"subscriptions/{name}", body)
        return topic, name

    def call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(self.endpoint.removeprefix("http://"), timeout=30)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, f"/v1/projects/{PROJECT}/{path}", data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text
            return json.loads(text or b"{}")
        finally:
            connection.close()


def jars() -> list[Path]:
    return [jar for sdk in SDKS for jar in sdk.glob("platform/pubsub-emulator/lib/cloud-pubsub-emulator*.jar")]


def why_not() -> str:
    """Empty: the emulator can be started here."""
    if not jars():
        return "no emulator of Pub/Sub here: gcloud components install pubsub-emulator"
    return "" if shutil.which("java") else "the emulator of Pub/Sub needs java"


@contextmanager
def pubsub_emulator() -> Iterator[Pubsub]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [
                "java",
                "-XX:TieredStopAtLevel=1",
                "-Xmx256m",
                "-jar",
                str(max(jars())),
                "--host=127.0.0.1",
                f"--port={port}",
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_until_it_answers(process, port)
            yield Pubsub(f"http://127.0.0.1:{port}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    raise RuntimeError("the emulator of Pub/Sub did not start")
