"""The HTTP server of the live page and of `rollout serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rollout.model.address import Address
from rollout.wire import http_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

SILENT_S = 0.2


async def slow(_: Request) -> PlainTextResponse:
    """Answers after several times the patience of the server with those who say nothing."""
    await asyncio.sleep(5 * SILENT_S)
    return PlainTextResponse("answer")


@asynccontextmanager
async def connection(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    monkeypatch.setattr(http_server, "SILENT_S", SILENT_S)
    page = http_server.server(Starlette(routes=[Route("/", slow)]), Address("127.0.0.1", 0), "listen")
    serving = asyncio.create_task(page.run_until_cancelled())
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        serving.cancel()
        await asyncio.wait([serving])


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nhost: a\r\nx: "])
async def test_a_connection_without_a_whole_request_is_ended(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    async with connection(monkeypatch) as (reader, writer), asyncio.timeout(60):
        writer.write(head)
        assert await reader.read() == b""


async def test_an_answer_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connection(monkeypatch) as (reader, writer), asyncio.timeout(60):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert b"answer" in await reader.read()
