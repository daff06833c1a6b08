"""An engine that forwards to a server with OpenAI's interface: vLLM, SGLang, llama.cpp, Ollama, or a hosted one.

A row is sent until it has an answer or cannot get one. Faults of others cost it no attempt: an unreachable server is
waited for, and a rejected key or model ends the run with the cause.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from blake3 import blake3
from rollout.config.logging import hide
from rollout.model.errors import AttemptError
from rollout.workloads.infer.bodies import CHAT, EMBED
from rollout.workloads.json_form import dump_line

from rollout_worker.backends.openai_faults import TRIES, FaultError, Whose, pause_of, refusal
from rollout_worker.backends.openai_format import BadAnswerError, completion_of, estimated_tokens, path_and_body
from rollout_worker.backends.openai_stream import STREAMED, StreamedAnswer
from rollout_worker.backends.pacing import Pace, backoff_s
from rollout_worker.backends.port import (
    Backend,
    BackendOptions,
    Completion,
    EngineFaultError,
    Request,
    cannot_continue,
)

CONNECT_S = 30.0
PROBE_S = 20.0
TELL_AFTER_S = 5.0
"""Users are told of longer outages only, since a restart may take less."""
TIMEOUT = "server_timeout"
PAUSE_MAX_S = 86_400.0
SHOWN = 200  # characters of an answer that cannot be read
_NEWER_LIMIT = "max_completion_tokens"


def open_backend(config: BackendOptions) -> Backend:
    if config.trained or not config.options.get("base_url"):
        message = 'backend.kind = "openai" is for `rollout infer batch`, with backend.base_url: name another engine'
        raise AttemptError(message, code="backend_unsuitable", retry=False)
    return OpenAIBackend(config.model, config.options)


class OpenAIBackend:
    """The backend. Options are those of `InferBackend` in workloads/infer/config.py."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._model = model
        self._url = str(options["base_url"]).rstrip("/")
        self._variable = str(options.get("api_key_env") or "")
        self._most = int(options.get("max_in_flight") or 128)
        self._timeout_s = float(options.get("timeout_s") or 600.0)
        self._pace = Pace(self._most, options.get("requests_per_minute"), options.get("tokens_per_minute"))
        self._proxy = _proxy_of(self._url)
        self._session: aiohttp.ClientSession | None = None
        self._limit_key = "max_tokens"
        self._typical = 256.0  # tokens of a completion, smoothed
        self._outage: _Outage | None = None
        self._told_until = float("-inf")  # people know of a pause until then
        self._key = b""
        self._repeats = _Repeats()

    @property
    def concurrency(self) -> int:
        return self._most

    @property
    def device(self) -> str:
        return self._url

    async def start(self) -> None:
        """Query the server once, so that its faults cost no row. Raises AttemptError."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(CONNECT_S, self._timeout_s))
        self._session = aiohttp.ClientSession(
            headers=self._headers(), timeout=timeout, connector=_Connector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        try:
            await self._probe()
        except FaultError as error:
            await self.close()
            raise AttemptError(error.message, code=error.code, retry=error.whose is Whose.AWAY) from None

    def hold(self, on: bool) -> None:
        self._pace.hold(on)

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _headers(self) -> dict[str, str]:
        if not self._variable:
            return {}
        key = os.environ.get(self._variable, "").strip()
        if not key:
            raise AttemptError(
                f"backend.api_key_env names {self._variable}, which is not set on this worker: start it with "
                f"{self._variable}=... in its environment, or with the name in [secrets] allow and "
                f"ROLLOUT_SECRET_{self._variable}=...",
                code="key_not_set",
                retry=False,
            )
        hide(key)
        self._key = key.encode()
        if not key.isascii() or not key.isprintable():
            message = f"the value of {self._variable} is no key: it has characters that no header can hold"
            raise AttemptError(message, code="key_not_set", retry=False)
        return {"Authorization": f"Bearer {key}"}

    async def _probe(self) -> None:
        """Check that a server answers and accepts the key. Without /models, the first rows show other faults."""
        try:
            async with asyncio.timeout(min(PROBE_S, self._timeout_s)):
                status, headers, raw = await self._exchange("GET", "/models", None)
        except FaultError as error:
            if error.whose in (Whose.ENGINE, Whose.AWAY):
                raise
            return
        except TimeoutError:
            message = f"{self._url} takes connections and did not answer within {PROBE_S:g} s: is it a web server?"
            raise FaultError(Whose.AWAY, "server_unreachable", message) from None
        if status in (301, 302, 303, 307, 308, 401, 403):
            raise refusal(status, headers, raw, f"{self._url}/models")

    async def generate(self, request: Request) -> Completion:
        tries: dict[Whose, int] = {}
        if request.so_far:
            raise cannot_continue("servers begin at the beginning")
        while True:
            limit_key = self._limit_key
            streamed = _streamed(request)
            try:
                return await self._once(request, limit_key, streamed)
            except FaultError as error:
                fault = error
            if streamed is not None and streamed.began:  # asked once more, the server might say something else
                again = fault.whose not in (Whose.ROW, Whose.ENGINE)
                raise AttemptError(fault.message, code=fault.code, retry=again) from None
            if request.body is None and limit_key != _NEWER_LIMIT and _NEWER_LIMIT in fault.message:
                self._limit_key = _NEWER_LIMIT  # some models know the limit of tokens by this name only, and say so
                continue
            if fault.whose is Whose.ENGINE:
                raise EngineFaultError(fault.message, code=fault.code, retry=False) from None
            count = tries[fault.whose] = tries.get(fault.whose, 0) + 1
            if fault.whose is Whose.ROW or count >= TRIES.get(fault.whose, count + 1):
                again = fault.whose is not Whose.ROW
                said = f"{fault.message} (asked {count} times)" if again else fault.message
                raise AttemptError(said, code=fault.code, retry=again) from None
            await self._wait(request, fault, count)

    async def _wait(self, request: Request, fault: FaultError, count: int) -> None:
        if fault.whose is Whose.AWAY:
            outage = self._outage = self._outage or _Outage()
            outage.tell(f"{fault.message}; rows wait and go on by themselves when it answers", request.waits)
            self._pace.pause(outage.pause_s())
            return
        if fault.retry_after_s is None:
            await asyncio.sleep(backoff_s(count))
            return
        seconds = min(fault.retry_after_s, PAUSE_MAX_S)
        self._pace.pause(seconds)
        now = time.monotonic()
        if seconds >= TELL_AFTER_S and now >= self._told_until:
            self._told_until = now + seconds
            request.waits(f"{fault.message}; nothing is sent for the {seconds:.0f} s that it asks for")
            await asyncio.sleep(seconds)
            request.waits("")

    async def _once(self, request: Request, limit_key: str, streamed: StreamedAnswer | None) -> Completion:
        path, body = path_and_body(request, self._model, limit_key)
        if streamed is not None:
            body |= STREAMED
        data = dump_line(body)
        estimated = estimated_tokens(body, len(data), self._typical)
        began = await self._pace.enter(estimated)
        try:
            status, headers, raw = await self._exchange("POST", path, data, streamed)
            if self._outage is not None:
                self._outage.over()
                self._outage = None
            used = _Connector.used.get()
            if not 200 <= status < 300:
                used.close()
                raise refusal(status, headers, raw, self._url + path)
            completion = self._completion(raw, path, used)
        except FaultError as error:
            if error.whose is Whose.LOAD or error.code == TIMEOUT:
                self._pace.overloaded(began)
            raise
        finally:
            self._pace.leave()
        self._answered(completion, estimated, headers)
        if completion.choices and all(choice.finish_reason == "content_filter" for choice in completion.choices):
            raise AttemptError(
                f"{self._url}{path} stopped the completion with its content filter",
                code="content_filter",
                retry=False,
                units_in=completion.prompt_tokens,
                units_out=sum(choice.tokens for choice in completion.choices),
            )
        return completion

    def _answered(self, completion: Completion, estimated: float, headers: Any) -> None:
        self._pace.answered()
        if (pause := pause_of(headers)) is not None:
            self._pace.pause(min(pause, PAUSE_MAX_S))
        tokens = sum(choice.tokens for choice in completion.choices)
        if completion.prompt_tokens or tokens:
            self._pace.used(estimated, completion.prompt_tokens + tokens)
            self._typical += (tokens - self._typical) / 16

    def _completion(self, raw: bytes, path: str, used: ResponseHandler) -> Completion:
        what = f"{self._url}{path}"
        try:
            answer: Any = json.loads(raw)
            if not isinstance(answer, dict):
                raise BadAnswerError("it is no JSON object")
            fields = cast("dict[str, Any]", answer)
            if self._repeats.repeats(used, raw, fields):
                used.close()
                raise BadAnswerError("it is that of the request before, once more")
            if fields.get("error"):  # some gateways answer 200 with an error inside
                error: Any = fields["error"]
                code = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else None
                status = code if isinstance(code, int) and 400 <= code < 600 else 500
                raise refusal(status, {}, raw, what)
            return completion_of(fields, path)
        except (ValueError, RecursionError) as error:  # BadAnswerError is a ValueError
            shown = raw[:SHOWN].decode(errors="replace")
            message = f"{what}: the answer cannot be used: {error}: {shown!r}"
            raise FaultError(Whose.BROKEN, "bad_answer", message) from None

    async def _exchange(
        self, method: str, path: str, data: bytes | None, streamed: StreamedAnswer | None = None
    ) -> tuple[int, Any, bytes]:
        """Return status, headers and body, also of a streamed answer. Raises FaultError if the answer is incomplete."""
        assert self._session is not None
        url = self._url + path
        sent = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._session.request(
                method, url, data=data, headers=sent, proxy=self._proxy, allow_redirects=False
            ) as response:
                if streamed is not None and response.ok and response.content_type == "text/event-stream":
                    async for part in response.content.iter_any():
                        streamed.feed(part)
                    return response.status, response.headers, dump_line(streamed.whole())
                raw = await response.read()
                # Some servers quote a key that they refuse.
                return response.status, response.headers, raw.replace(self._key, b"***") if self._key else raw
        except BadAnswerError as error:
            message = f"{url}: the streamed answer cannot be used: {error}"
            raise FaultError(Whose.BROKEN, "bad_answer", message) from None
        except aiohttp.ClientConnectorCertificateError as error:
            message = (
                f"{url}: its certificate is not trusted: {error.certificate_error}. Set SSL_CERT_FILE on the worker to "
                "a file with the certificate of its authority"
            )
            raise FaultError(Whose.ENGINE, "certificate_untrusted", message) from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise FaultError(Whose.ENGINE, "bad_url", f"backend.base_url {url!r}: {error}") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            message = f"{url} cannot be reached: {_why(error)}. Start the server, or correct backend.base_url"
            raise FaultError(Whose.AWAY, "server_unreachable", message) from None
        except TimeoutError:
            message = f"{url}: no whole answer within {self._timeout_s:g} s (backend.timeout_s)"
            raise FaultError(Whose.BROKEN, TIMEOUT, message) from None
        except (aiohttp.ClientError, OSError) as error:
            message = f"{url}: the connection broke before the whole answer was there: {_why(error)}"
            raise FaultError(Whose.BROKEN, "connection_lost", message) from None


def _streamed(request: Request) -> StreamedAnswer | None:
    if request.on_delta is None or request.embed is not None or request.url == EMBED:
        return None
    return StreamedAnswer(request.on_delta, chat=request.messages is not None or request.url == CHAT)


class _Outage:
    """An outage of the server. One of the waiting rows reports it."""

    def __init__(self) -> None:
        self._since = self._until = time.monotonic()
        self._tries = 0
        self._teller: Callable[[str], None] | None = None

    def pause_s(self) -> float:
        """Return the time until the next try; requests that failed together wait for the same one."""
        now = time.monotonic()
        if now >= self._until:
            self._tries += 1
            self._until = now + backoff_s(self._tries)
        return self._until - now

    def tell(self, message: str, waits: Callable[[str], None]) -> None:
        if self._teller is None and time.monotonic() - self._since >= TELL_AFTER_S:
            self._teller = waits
            waits(message)

    def over(self) -> None:
        if self._teller is not None:
            self._teller("")


class _Connector(aiohttp.TCPConnector):
    """Remembers the connection of each request, and closes idle ones on which unexpected data arrived: it would be
    taken for the answer to the next row (aiohttp closes only those where it arrived with the answer)."""

    used: ClassVar[ContextVar[ResponseHandler]] = ContextVar("used")

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            if connection.protocol is not None and not connection.protocol.should_close:
                self.used.set(connection.protocol)
                return connection
            connection.close()


class _Repeats:
    """Recognises an answer that repeats the previous one on its connection: it arrived late for one row and would be
    taken for the answer to the next. Servers give each answer an id; if a server reuses ids, nothing is recognised."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[ResponseHandler, bytes] = WeakKeyDictionary()
        self._found: set[bytes] = set()
        self._unique = True

    def repeats(self, used: ResponseHandler, raw: bytes, answer: dict[str, Any]) -> bool:
        if not self._unique or not answer.get("id"):
            return False
        digest = blake3(raw).digest()
        if self._last.get(used) != digest:
            self._last[used] = digest
            if digest not in self._found:
                return False
            self._unique = False  # asked again elsewhere, it says the same
            return False
        self._found.add(digest)
        return True


def _proxy_of(url: str) -> str | None:
    """Return the proxy of HTTP_PROXY, HTTPS_PROXY and NO_PROXY; aiohttp would also read .netrc."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0  # that of a name which is not known is negative
        return os.strerror(number) if number > 0 else error.strerror or str(error)
    return str(error) or type(error).__name__
