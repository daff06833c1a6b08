"""A place of a trial over a real sandbox, and a model's service that answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.port import TASK_DIRECTORIES, Finished, Limits, Network, Sandbox, Spec
from rollout_worker.sandboxes.process import open_process
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.port import Reply, UsageCount


@dataclass
class TestPlace:
    """`said`: the notes of the agent; `ran`: its commands. `answers`: of the cluster's engines."""

    __test__ = False

    sandbox: Sandbox
    usage: UsageCount = field(default_factory=UsageCount)
    instruction_path: str = "/tmp/instruction.md"
    workdir: str = "/app"
    user: str | int | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    model_name: str | None = None
    base_url: str | None = None
    image_key: str = "image"
    deadline: float | None = None
    contract: Contracted | None = None
    said: list[str] = field(default_factory=list[str])
    steps: list[str] = field(default_factory=list[str])
    ran: list[Any] = field(default_factory=list[Any])
    answers: list[Reply] = field(default_factory=list[Reply])
    asked: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = field(default_factory=list[Any])

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        quiet: bool = False,
    ) -> Finished:
        self.ran.append(command)
        environment = {**self.env, **(env or {})}
        return await self.sandbox.exec(
            command, env=environment, cwd=cwd or self.workdir, timeout_s=timeout_s, stdin=stdin
        )

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        self.asked.append((list(messages), sampling))
        reply = self.answers.pop(0)
        self.usage.input_tokens += reply.input_tokens
        self.usage.output_tokens += reply.output_tokens
        return reply

    async def tree(self, checksum: str) -> Path:
        raise NotImplementedError

    def progress(self, text: str) -> None:
        self.steps.append(text)

    def note(self, text: str) -> None:
        self.said.append(text)

    async def trajectory(self) -> dict[str, Any]:
        return json.loads(await self.sandbox.read_file("/logs/agent/trajectory.json"))


@asynccontextmanager
async def place(tmp_path: Path, **fields: Any) -> AsyncGenerator[TestPlace]:
    spec = Spec(directories=TASK_DIRECTORIES, network=Network("host"), workdir="/app", limits=Limits(memory_mb=256))
    async with open_process(tmp_path / "state") as provider, await provider.create(spec) as sandbox:
        yield TestPlace(sandbox, **fields)


def completion(text: str, finish_reason: str = "stop", usage: dict[str, Any] | None = None) -> dict[str, Any]:
    counted = {"prompt_tokens": 10, "completion_tokens": 5} if usage is None else usage
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": counted}


@dataclass
class Answered:
    """How the service answers a request: with a body, or never."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    never: bool = False


class Service:
    """An OpenAI-compatible service. `requests`: (headers, body) of each."""

    def __init__(self, answers: Sequence[Answered | dict[str, Any] | str]) -> None:
        self._answers = [
            one if isinstance(one, Answered) else Answered(completion(one) if isinstance(one, str) else one)
            for one in answers
        ]
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.asked = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            while True:
                await self._one(reader, writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append((headers, body))
        self.asked.set()
        answer = self._answers.pop(0)
        if answer.never:
            await asyncio.Event().wait()
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        lines = [f"HTTP/1.1 {answer.status} X", f"content-length: {len(data)}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()


@asynccontextmanager
async def service(*answers: Answered | dict[str, Any] | str) -> AsyncGenerator[Service]:
    """With these answers, in order."""
    serving = Service(answers)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):
            await serving.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    serving.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield serving
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
