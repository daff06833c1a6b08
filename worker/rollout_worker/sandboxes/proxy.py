"""The egress proxy of a sandbox whose network is an allowlist: an HTTP proxy that connects to listed hosts only.

It accepts on a socket made inside the sandbox's network namespace, which has nothing else, and connects in the host's:
none of it runs in the sandbox, and what does not use it reaches nothing. Names are resolved here, and the proxy
connects to the very address it checked. It takes CONNECT (RFC 9110, 9.3.6) for everything encrypted, and absolute-form
requests (RFC 9112, 3.2.2) for plain HTTP, whose Host is that of the URL, whatever the sandbox sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from urllib.parse import urlsplit

import structlog

from rollout_worker.sandboxes.allowlist import Address, Allowlist, as_address, is_public

log = structlog.get_logger()

_HEAD_BYTES = 1 << 16
_HEAD_S = 30.0
_CONNECT_S = 20.0
_CHUNK = 1 << 16
# RFC 9112, 3 and 5: no line that a server could read as two, no folded line, no space before the colon.
_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VERSION = re.compile(r"HTTP/1\.[01]")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
_NOT_SENT_ON = re.compile(rb"(?:proxy-[^:]*|connection|keep-alive|te|upgrade|host):", re.IGNORECASE)


_LIST_IT = ", and a name does not give it, since it is not public: list the address too"


class _Refused(Exception):
    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class Proxy:
    """An HTTP proxy for one sandbox."""

    def __init__(self, allowlist: Allowlist) -> None:
        self._allowlist = allowlist
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_HEAD_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(list(self._serving))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):  # one of the two ends disconnected
            pass
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, host, port, onward = _understand(head)
            out_reader, out_writer = await self._connect(host, port)
        except TimeoutError:
            return
        except asyncio.LimitOverrunError:
            await _refuse(writer, _Refused("431 Request Header Fields Too Large", "the head is too long"))
            return
        except _Refused as refused:
            log.info("sandbox_connection_refused", reason=str(refused))
            await _refuse(writer, refused)
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                out_writer.write(onward)
            await asyncio.gather(_relay(reader, out_writer), _relay(out_reader, writer))
        finally:
            out_writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if as_address(host) is None and not self._allowlist.allows_name(host):
            raise _Refused("403 Forbidden", f"{host} is not in the sandbox's allowlist")
        fault = "it has no address"
        for address in await _resolve(host, port):
            if not self._allowlist.may_connect(host, address):
                by_name = as_address(host) is None and not is_public(address)
                fault = f"{address} is not in the sandbox's allowlist" + (_LIST_IT if by_name else "")
                continue
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(str(address), port, limit=_CHUNK)
            except (OSError, TimeoutError) as error:
                fault = f"{address}: {error or 'no answer'}"
        refused = "allowlist" in fault
        raise _Refused("403 Forbidden" if refused else "502 Bad Gateway", f"{host}:{port}: {fault}")


async def _resolve(host: str, port: int) -> list[Address]:
    if (address := as_address(host)) is not None:
        return [address]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _Refused("502 Bad Gateway", f"{host} cannot be resolved: {error}") from error
    return [ipaddress.ip_address(entry[4][0].partition("%")[0]) for entry in found if isinstance(entry[4][0], str)]


def _understand(head: bytes) -> tuple[str, str, int, bytes]:
    """Return (method, host, port, the request to forward). Raises _Refused."""
    bad = _Refused("400 Bad Request", "this is a proxy: send CONNECT host:port, or a request with a whole http:// URL")
    line, _, fields = head.partition(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise bad from None
    if method == "CONNECT":
        if not host or port is None:
            raise bad
        return method, host, port, b""
    if parts.scheme != "http" or not host or not _METHOD.fullmatch(method) or not _VERSION.fullmatch(version):
        raise bad
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    given = [field for field in fields.split(b"\r\n") if field]
    if not all(_FIELD.fullmatch(field) for field in given):
        raise _Refused("400 Bad Request", "a header field is malformed")
    kept = [field for field in given if not _NOT_SENT_ON.match(field)]
    authority = parts.netloc.rpartition("@")[2]
    # One request per connection, because the next may be for another host, which would have to be checked.
    onward = [f"{method} {path} {version}", f"Host: {authority}"]
    return method, host, port or 80, b"\r\n".join([*map(str.encode, onward), *kept, b"Connection: close", b"", b""])


async def _refuse(writer: asyncio.StreamWriter, refused: _Refused) -> None:
    text = f"{refused}\n".encode()
    head = f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + text)
    await writer.drain()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()
