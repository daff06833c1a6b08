"""The server as an ASGI application: OpenAI's addresses, health and metrics."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from rollout.workloads.infer.bodies import CHAT, EMBED, TEXT
from rollout.workloads.json_form import JsonObject
from rollout.workloads.serve.answers import DONE, Head, Stream, Whole, encoded, event
from rollout.workloads.serve.asks import BODY_MAX, Asked, ask_of, read_body
from rollout.workloads.serve.errors import ApiError
from rollout.workloads.serve.exchange import RetiredError
from rollout.workloads.serve.gateway import Gateway, Generation
from rollout.workloads.serve.keys import EVERYBODY

MODEL_HEADER = "x-rollout-model"
"""Response header: which weights answered, where `model` stays the same across a switch."""
_PREFIXES = {CHAT: "chatcmpl", TEXT: "cmpl", EMBED: "embd"}
_LEFT = 499
"""The status nginx logs when a client disconnects; no client receives it."""
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def application(gateway: Gateway) -> Starlette:
    site = _Site(gateway)
    routes: list[BaseRoute] = [
        *(Route(url, _Answering(gateway, url), methods=["POST"]) for url in _PREFIXES),
        Route("/v1/models", site.models),
        Route("/v1/models/{name:path}", site.model),
        Route("/health", site.health),
        Route("/metrics", site.metrics),
    ]
    if base := gateway.config.serve.root_path:
        routes.append(Mount(base, routes=list(routes)))  # a proxy may leave it there or not
    handlers: Any = {HTTPException: _http_fault, ApiError: _api_fault, Exception: _crash}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _api_fault(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_fault(request: Request, error: HTTPException) -> Response:
    fault = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(fault.body(), error.status_code, error.headers)


async def _crash(request: Request, error: Exception) -> Response:
    """Answer an internal error with status 500; the caller logs it."""
    return JSONResponse(ApiError("internal error", status=500).body(), 500)


class _Site:
    """All routes except those that models answer."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        self._gateway.keys.client(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        self._gateway.keys.client(request.headers.get("authorization", ""))
        name = request.path_params["name"]
        if name not in self._names():
            raise ApiError(f"The model `{name}` does not exist.", status=404, param="model")
        return JSONResponse(self._card(name))

    async def health(self, request: Request) -> Response:
        gateway = self._gateway
        if gateway.ready:
            body: JsonObject = {"status": "ready", "engines": len(gateway.current.exchange.router.engines)}
            if (coming := gateway.coming) is not None:
                body["coming"] = {"model": coming.label, "waits_for": coming.waits_for}
            return JSONResponse(body)
        what = "the server is shutting down" if gateway.draining else "no engine is ready"
        if gateway.generations and (why := gateway.generations[-1].waits_for) and not gateway.draining:
            what = f"{what}: {why}"
        raise ApiError(what, status=503, retry_after_s=5)

    async def metrics(self, request: Request) -> Response:
        self._gateway.figures()
        return Response(self._gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _names(self) -> list[str]:
        return [*self._gateway.config.names, *self._gateway.config.model.loras]

    def _card(self, name: str) -> JsonObject:
        config = self._gateway.config
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "rollout",
            "root": config.model.loras.get(name, config.model.uri),
            "parent": config.names[0] if name in config.model.loras else None,
            "max_model_len": config.backend.max_model_len,
        }


class _Answering:
    """A route that models answer, as an ASGI application. It notices when the client disconnects, streaming or not."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self._gateway = gateway
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, began = Request(scope, receive), time.monotonic()
        answer = _Answer(self._gateway, send, f"{_PREFIXES[self._url]}-{_request_id(request)}", began)
        name, status = EVERYBODY, 500
        with self._gateway.counted():
            try:
                client = self._gateway.keys.client(request.headers.get("authorization", ""))
                name = client.name
                asked = ask_of(self._url, read_body(await _body(request)), self._gateway.config)
                client.begin(time.monotonic())
                try:
                    status = await _unless_left(answer.give(asked), receive)
                finally:
                    client.end(sum(answer.tokens))
            except ApiError as error:
                status = error.status
                await answer.fail(error)
            except ClientDisconnect:
                status = _LEFT
            finally:
                self._count(name, status, answer.tokens, time.monotonic() - began)

    def _count(self, name: str, status: int, tokens: tuple[int, int], seconds: float) -> None:
        metrics = self._gateway.metrics
        metrics.requests.labels(self._url, name, str(status)).inc()
        metrics.seconds.observe(seconds)
        for kind, count in zip(("prompt", "completion"), tokens, strict=True):
            metrics.tokens.labels(name, kind).inc(count)
        if status == _LEFT:
            metrics.left.labels(name).inc()


async def _unless_left(work: Coroutine[Any, Any, None], receive: Receive) -> int:
    """Run `work` and return 200. If the client disconnects first, cancel it and return 499."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return _LEFT
        working.result()
        return 200
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Read the body. Raises ApiError 413 if it is too large, ClientDisconnect if the client left."""
    too_large = ApiError(f"the body is larger than {BODY_MAX >> 20} MiB", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > BODY_MAX:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX:
            raise too_large
    return bytes(body)


def _request_id(request: Request) -> str:
    """Return the client's request id, under the header that vLLM's server reads, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


class _Answer:
    """One answer in progress. `tokens` counts those of the prompt and of the answer so far."""

    def __init__(self, gateway: Gateway, send: Send, identity: str, began: float) -> None:
        self._gateway = gateway
        self._send = send
        self._id = identity
        self._began = began
        self._streams = False
        self.tokens = (0, 0)

    async def give(self, asked: Asked) -> None:
        """Send the answer. Raises ApiError if it fails, also halfway."""
        head = Head(self._id, int(time.time()), asked.model)
        while True:
            generation = self._gateway.current
            with suppress(RetiredError):
                return await (self._stream if asked.stream else self._whole)(asked, head, generation)

    async def fail(self, error: ApiError) -> None:
        """Report an error: inside the stream if it has begun, as a response otherwise."""
        if self._streams:
            await self._more(event(error.body()) + DONE, last=True)
            return
        await self._start(error.status, "application/json", error.headers)
        await self._more(encoded(error.body()), last=True)

    async def _whole(self, asked: Asked, head: Head, generation: Generation) -> None:
        whole = Whole(asked)
        async with aclosing(generation.exchange.converse(asked)) as pieces:
            async for piece in pieces:
                whole.add(piece)
                self._note(whole.tokens)
        body = encoded(whole.body(head))
        headers = {MODEL_HEADER: generation.label, "content-length": str(len(body))}
        await self._start(200, "application/json", headers)
        await self._more(body, last=True)

    async def _stream(self, asked: Asked, head: Head, generation: Generation) -> None:
        stream = Stream(asked, head)
        async with aclosing(generation.exchange.converse(asked)) as pieces:
            async for piece in pieces:
                if not self._streams:
                    self._streams = True
                    await self._start(200, "text/event-stream; charset=utf-8", {MODEL_HEADER: generation.label})
                chunks = b"".join(stream.add(piece))
                self._note(stream.tokens)
                if chunks:
                    await self._more(chunks, last=piece.end is not None)

    def _note(self, tokens: tuple[int, int]) -> None:
        if tokens[1] and not self.tokens[1]:
            self._gateway.metrics.first_token.observe(time.monotonic() - self._began)
        self.tokens = tokens

    async def _start(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        found = {"content-type": kind, **headers}
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in found.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _more(self, body: bytes, *, last: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
