"""Renders prompts as a model reads them, and counts their tokens.

A worker's code counts in a process of its own, so the client needs none of its libraries.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, Any

from rollout.model.errors import ConfigError
from rollout.processes.child import PIPE
from rollout.processes.command import start
from rollout.processes.interpreter import python_module
from rollout.workloads.infer.prompts import prompts_of
from rollout.workloads.infer.request import RowRequest
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import names_snapshot

_COUNTER = "rollout_worker.backends.preview"
_NO_FILES = ("mock", "openai")
"""Kinds of backend whose `model.uri` does not name files."""


def brings_tokenizer(kind: str, uri: str) -> bool:
    """Return whether the model `uri` of such a backend consists of files, among them a tokenizer."""
    return kind not in _NO_FILES and not names_snapshot(uri)


def require_tokenizer(kind: str, uri: str, tokenizer: str | None) -> None:
    """Raise ConfigError if no tokenizer is named or it cannot be loaded here."""
    if tokenizer is None and not brings_tokenizer(kind, uri):
        what = f'backend.kind = "{kind}"' if kind in _NO_FILES else "a snapshot"
        raise ConfigError(f"model.tokenizer: {what} brings no tokenizer to this host: name one to count tokens with")
    if find_spec("transformers") is None or find_spec("rollout_worker") is None:
        raise ConfigError(
            'this host lacks the Python package transformers, which counts tokens: pip install "rollout-engine'
            '[transformers]"'
        )


def prompts_in(request: RowRequest) -> list[JsonObject]:
    """Return the request's prompts as the counter takes them."""
    asked = request.content  # of a body that is sent as it is: what the server will be asked
    if "messages" in asked:
        return [{"messages": asked["messages"], "template": request.template}]
    prompts = request.embed.inputs if request.embed is not None else request.prompts
    if request.body is not None:
        key = next(iter(asked), "prompt")
        prompts = prompts_of(asked.get(key), key)
    return [{"prompt": one} if isinstance(one, str) else {"ids": list(one)} for one in prompts]


@contextmanager
def counter(asked: JsonObject, rows: Iterable[JsonObject]) -> Generator[Iterator[JsonObject]]:
    """Yield the answers of `rollout_worker.backends.preview`, which loads what `asked` names and counts the prompts of
    `rows`: first the model's context, then each prompt in turn. Raises ConfigError if it cannot count."""
    failed: list[BaseException] = []

    def feed(into: IO[bytes]) -> None:
        try:
            with suppress(BrokenPipeError), into:  # it has ended, which its answers say
                for one in rows:
                    into.write(json.dumps(one).encode() + b"\n")
        except BaseException as error:  # noqa: BLE001 - of the input: it is raised where answers are read
            failed.append(error)

    with tempfile.TemporaryFile() as complaints:
        process = start(python_module(_COUNTER), stdin=PIPE, stdout=PIPE, stderr=complaints)
        assert process.stdin is not None and process.stdout is not None
        feeding = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
            yield _answers(process.stdout, feeding, failed)
            if process.wait():
                complaints.seek(0)
                lines = complaints.read().decode("utf-8", "replace").strip().splitlines()
                last = (lines or ["no reason was given"])[-1]
                raise ConfigError(f"tokens cannot be counted: {last}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            if feeding.ident is not None:
                feeding.join()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _answers(out: IO[bytes], feeding: threading.Thread, failed: list[BaseException]) -> Iterator[JsonObject]:
    first: JsonObject = json.loads(out.readline() or '{"error": "its process ended"}')
    if "error" in first:
        raise ConfigError(f"the tokenizer cannot be loaded: {first['error']}")
    yield first
    feeding.start()
    for line in out:
        answer: Any = json.loads(line)
        yield answer
    feeding.join()
    if failed:
        raise failed[0]
