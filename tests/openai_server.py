"""A server with OpenAI's interface whose faults a test chooses by row and try."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
_ids = count()


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float


def refused(status: int, message: str = "no", code: str = "", **headers: str) -> Answer:
    error = {"error": {"message": message, "code": code or None}}
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(error).encode()


@dataclass
class OpenAIServer:
    """`fault(text, nth)`: what happens to the nth request (from 1) for that text; an `Answer`, or a word:
    cut, half, garbage, twice, late (a second answer somewhat later), slow (loris); empty: it is answered with `echo of TEXT`.
    """

    fault: Callable[[str, int], str | Answer] = lambda text, nth: ""
    models: Answer | None = None
    delay_s: float = 0.0
    port: int = 0
    asked: list[Asked] = field(default_factory=list[Asked])
    counts: Counter[str] = field(default_factory=Counter[str])
    open_requests: int = 0
    most_open: int = 0
    now: Callable[[Coroutine[Any, Any, None]], None] = lambda work: work.close()
    left: int = 0  # requests whose client closed before the answer
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[Any])
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                self.open_requests += 1
                self.most_open = max(self.most_open, self.open_requests)
                try:
                    if not await self._answer(first.split(" ")[1], headers, raw, reader, writer):
                        return
                finally:
                    self.open_requests -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            with suppress(Exception):
                writer.close()

    async def _answer(
        self, path: str, headers: dict[str, str], raw: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if path.endswith("/models"):
            listed = json.dumps({"data": [{"id": "m"}]}).encode()
            writer.write(message(*(self.models or (200, {}, listed))))
            await writer.drain()
            return True
        body = json.loads(raw)
        self.asked.append(Asked(path, headers, body, time.monotonic()))
        text = text_of(body)
        self.counts[text] += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
            if reader.at_eof():
                self.left += 1
                return False
        what = self.fault(text, self.counts[text])
        whole = message(200, {}, json.dumps(answer(path, body, text)).encode())
        if isinstance(what, tuple):
            whole = message(*what)
        elif what == "cut":
            return False
        elif what == "half":
            writer.write(whole[: len(whole) - 20])
            await writer.drain()
            return False
        elif what == "garbage":
            whole = message(200, {}, b'{"choices": [{"mess')
        elif what == "slow":
            for byte in whole:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.write(whole * 2 if what == "twice" else whole)
        if what == "late":
            await asyncio.sleep(0.02)
            writer.write(whole)
        await writer.drain()
        return True


def message(status: int, headers: dict[str, str], body: bytes) -> bytes:
    given = {"content-type": "application/json", **headers, "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body


def text_of(body: dict[str, Any]) -> str:
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt", body.get("input")))


def answer(path: str, body: dict[str, Any], text: str) -> dict[str, Any]:
    usage = {"prompt_tokens": len(text.split()), "completion_tokens": 3, "total_tokens": len(text.split()) + 3}
    if path.endswith("/embeddings"):
        return {"data": [{"index": 0, "embedding": [0.5, -1.0]}], "usage": {"prompt_tokens": 2}}
    said = f"echo of {text}"
    choices = [
        {
            "index": n,
            "finish_reason": "stop",
            **({"message": {"role": "assistant", "content": said}} if "messages" in body else {"text": said}),
        }
        for n in range(body.get("n") or 1)
    ]
    return {"id": f"cmpl-{next(_ids)}", "choices": choices, "usage": usage}


@contextmanager
def serving(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """In a thread of its own, for tests that wait for other processes. `now` of it does something in that thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server.now = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(10)
    try:
        server.now(server.start())
        yield server
        server.now(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
