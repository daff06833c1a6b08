"""A proxy between a client and an emulator that breaks what it is told to. It knows HTTP, and no provider."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PIECE = 64 << 10
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 503: "Slow Down"}


@dataclass
class Fault:
    """Of requests whose "METHOD /path?query" matches the pattern, and which have the header `having` if that is given:
    not of the first `skip`, and of `times` after those.

    One of: `status` with `body` and `headers` in place of the service's answer; `cut_request` or `cut_answer` after so
    many bytes of the body; `lose`: the service does it, and its answer is lost; `stall` after so many bytes of the
    request's body, for good. Or a change: `flip` a bit of this byte of the answer's body; `bytes_per_s` of both bodies,
    `without` headers of these names.
    """

    pattern: str
    times: int = 1
    skip: int = 0
    status: int = 0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cut_request: int = -1
    cut_answer: int = -1
    lose: bool = False
    stall: int = -1
    bytes_per_s: float = 0.0
    without: tuple[str, ...] = ()
    having: str = ""
    flip: int = -1

    def meets(self, line: str, headers: dict[str, str]) -> bool:
        if self.times <= 0 or not re.search(self.pattern, line) or (self.having and self.having not in headers):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class _Cut(Exception):
    pass


_NO_FAULT = Fault("", times=0)


class FaultProxy:
    """`asked`: every request, as "METHOD /path?query", with its headers in lower case."""

    def __init__(self, upstream: str) -> None:
        at = urlsplit(upstream)
        self._upstream = (at.hostname or "", at.port or 80)
        self._of_upstream = at.netloc.encode()
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.url = ""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, pattern: str, **what: object) -> Fault:
        self.faults.append(Fault(pattern, **what))  # type: ignore[arg-type]
        return self.faults[-1]

    def lines(self, pattern: str) -> list[str]:
        return [line for line, _ in self.asked if re.search(pattern, line)]

    async def reached(self, pattern: str) -> None:
        """Until such a request has come."""
        while not self.lines(pattern):
            self._news.clear()
            await self._news.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (_Cut, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()  # cancelled by `end` only
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer. False: the connection ends."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        first, headers = _parsed(head)
        method, target, _ = first.split(" ", 2)
        line = f"{method} {target}"
        self.asked.append((line, headers))
        self._news.set()
        fault = next((one for one in self.faults if one.meets(line, headers)), _NO_FAULT)
        if headers.pop("expect", ""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.status:
            async for _ in self._body(reader, headers, fault):
                pass
            reason = _REASONS.get(fault.status, "Told")
            more = {"content-length": str(len(fault.body)), "content-type": "application/xml", **fault.headers}
            writer.write(_head(f"HTTP/1.1 {fault.status} {reason}", more))
            writer.write(b"" if method == "HEAD" else fault.body)
            await writer.drain()
            return True
        for name in fault.without:
            headers.pop(name.lower(), None)
        up_reader, up_writer = await asyncio.open_connection(*self._upstream, limit=1 << 20)
        try:
            chunked = headers.get("transfer-encoding", "") == "chunked"
            up_writer.write(_head(first, {**headers, "connection": "close"}))
            async for piece in self._body(reader, headers, fault):
                up_writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
                await up_writer.drain()
            if chunked:
                up_writer.write(b"0\r\n\r\n")
            answer = await up_reader.readuntil(b"\r\n\r\n")
            if fault.lose:
                await up_reader.read()
                raise _Cut
            answer = answer.replace(self._of_upstream, urlsplit(self.url).netloc.encode())
            status, told = _parsed(answer)
            told.pop("connection", None)
            writer.write(_head(status, told))
            passed = 0
            while piece := await up_reader.read(PIECE):
                if 0 <= fault.cut_answer < passed + len(piece):
                    writer.write(piece[: fault.cut_answer - passed])
                    await writer.drain()
                    raise _Cut
                if 0 <= fault.flip - passed < len(piece):
                    at = fault.flip - passed
                    piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
                writer.write(piece)
                await writer.drain()
                passed += len(piece)
                if fault.bytes_per_s:
                    await asyncio.sleep(len(piece) / fault.bytes_per_s)
            return "content-length" in told or method == "HEAD"
        finally:
            up_writer.close()

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str], fault: Fault) -> AsyncIterator[bytes]:
        passed = 0
        async for piece in _pieces(reader, headers):
            if 0 <= fault.cut_request < passed + len(piece):
                raise _Cut
            if 0 <= fault.stall < passed + len(piece):
                await asyncio.Event().wait()
            passed += len(piece)
            if fault.bytes_per_s:
                await asyncio.sleep(len(piece) / fault.bytes_per_s)
            yield piece


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return
    left = int(headers.get("content-length", "0"))
    while left:
        piece = await reader.read(min(PIECE, left))
        if not piece:
            raise _Cut
        left -= len(piece)
        yield piece


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return first, {name.strip().lower(): value.strip() for name, value in pairs}


def _head(first: str, headers: dict[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@asynccontextmanager
async def fault_proxy(upstream: str) -> AsyncIterator[FaultProxy]:
    """It listens at `url`; what answers say of the emulator's own address is changed to that."""
    proxy = FaultProxy(upstream)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=PIECE)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
        await server.wait_closed()
