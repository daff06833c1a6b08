"""An OpenAI-compatible address inside a sandbox, at which its commands query the policy in training, or a model.

It serves `POST /v1/chat/completions`, also with `stream`, and `GET /v1/models`. The socket is on the loopback of the
sandbox; this process answers. Each answer ends its connection.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from rollout_worker.sandboxes.port import Sandbox
from rollout_worker.trials.agents.policy_engine import CONTEXT
from rollout_worker.trials.port import Reply, TrialFault

MODEL = "policy"
BODY_MAX = 16 << 20
_HEAD_MAX = 64 << 10
_HEAD_S = 30.0
_WORDS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


class Answering(Protocol):
    """`broken` is why an answer could not be generated, if the request was not at fault."""

    @property
    def broken(self) -> TrialFault | None: ...

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        """Return an answer. `sampling` has the other keys of the request. Raises TrialFault."""
        ...


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": code, "param": None, "code": code}}


class PolicyAddress:
    """`env` has the variables by which commands of the sandbox find it. Only they have the `key`."""

    def __init__(self, engine: Answering) -> None:
        self.key = secrets.token_hex(24)
        self.env: dict[str, str] = {}
        self._engine = engine
        self._server: asyncio.Server | None = None
        self._answers = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self, sandbox: Sandbox) -> None:
        """Open the address. Raises SandboxError."""
        listener = await sandbox.listen()
        port: int = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=_HEAD_MAX)
        url = f"http://127.0.0.1:{port}/v1"
        hosts = "127.0.0.1,localhost"
        self.env = {
            "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": self.key, "OPENAI_MODEL": MODEL,
            "NO_PROXY": hosts, "no_proxy": hosts,
        }  # fmt: skip

    async def close(self) -> None:
        """Close the address, and abandon answers in progress."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._serving.add(task)
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                status, kind, body = await self._answer(reader, writer)
                writer.write(
                    f"HTTP/1.1 {status} {_WORDS.get(status, 'Service Unavailable')}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        except asyncio.CancelledError:
            if self._server is not None:
                raise
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str, bytes]:
        try:
            method, path, body = await self._request(reader, writer)
            if method == "GET" and path == "/v1/models":
                model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rollout"}
                return 200, "application/json", _json({"object": "list", "data": [model]})
            if method != "POST" or path != "/v1/chat/completions":
                raise _RefusedError(404, f"there is no {method} {path} here, but POST /v1/chat/completions")
            return await self._completion(body)
        except _RefusedError as refused:
            return refused.status, "application/json", _json(refused.body)

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, str, bytes]:
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)).decode("latin-1").split("\r\n")
        method, path = [*head[0].split(" "), "", ""][:2]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if not secrets.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.key}".encode()):
            raise _RefusedError(401, "the key is not that of OPENAI_API_KEY", "invalid_api_key")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdigit():
            raise _RefusedError(400, "a body needs a Content-Length")
        if int(length) > BODY_MAX:
            raise _RefusedError(413, f"the body is larger than {BODY_MAX >> 20} MiB")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return method, path.partition("?")[0], await reader.readexactly(int(length))

    async def _completion(self, body: bytes) -> tuple[int, str, bytes]:
        try:
            asked: Any = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _RefusedError(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(asked, dict) or not isinstance(cast("dict[str, Any]", asked).get("messages"), list):
            raise _RefusedError(400, "messages: is missing, or is no list")
        sampling = {str(key): value for key, value in cast("dict[Any, Any]", asked).items()}
        messages, streams = sampling.pop("messages"), bool(sampling.pop("stream", False))
        try:
            reply = await self._engine.ask(messages, **sampling)
        except TrialFault as fault:
            code = {CONTEXT: "context_length_exceeded", "api_bad_request": "invalid_request_error"}.get(fault.type)
            raise _RefusedError(503 if code is None else 400, fault.message, code or fault.type) from fault
        self._answers += 1
        if streams:
            return 200, "text/event-stream", self._stream(reply)
        return 200, "application/json", self._whole(reply)

    def _whole(self, reply: Reply) -> bytes:
        message = {"role": "assistant", "content": reply.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
        return _json({**self._head("chat.completion"), "choices": [choice], "usage": _usage(reply)})

    def _stream(self, reply: Reply) -> bytes:
        """Return the stream in one piece: nothing is sent before the answer is in the ledger."""
        delta = {"role": "assistant", "content": reply.text}
        said = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        end: dict[str, Any] = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.finish_reason}
        head = self._head("chat.completion.chunk")
        pieces = [{**head, "choices": [said]}, {**head, "choices": [end], "usage": _usage(reply)}]
        return b"".join(b"data: " + _json(piece) + b"\n\n" for piece in pieces) + b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self._answers}", "object": kind, "created": 0, "model": MODEL}


def _usage(reply: Reply) -> dict[str, int]:
    read, said = reply.input_tokens, reply.output_tokens
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
