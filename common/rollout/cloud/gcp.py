"""Google Cloud for its adapters: one HTTP session, a token of the default chain, retries, errors with remedies.

Emulators are named by `endpoint_url`, or as for Google's own clients by STORAGE_EMULATOR_HOST and PUBSUB_EMULATOR_HOST.
A token is sent only to Google's own hosts, and so never to an emulator.
"""

from __future__ import annotations

import asyncio
import json as json_codec
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies

from rollout.cloud.gcp_errors import PLAIN, Access, Refused, classify, refused
from rollout.cloud.gcp_token import GcpToken
from rollout.cloud.missing import need
from rollout.cloud.retry import retrying
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, RolloutError, StorageUnavailableError

Service = Literal["storage", "pubsub", "secretmanager"]
CONNECT_S = 10.0
SILENT_S = 60.0
"""Seconds without a byte after which a connection is abandoned.

A whole body has no limit, because a large one takes long. The head of an answer must come this long after the last byte
of the request.
"""
ANSWER_S = 120.0
"""Seconds for the body of an answer that is read at once."""
PIECE = 512 * 1024
T = TypeVar("T")
_EMULATOR = {"storage": "STORAGE_EMULATOR_HOST", "pubsub": "PUBSUB_EMULATOR_HOST"}


class Sent(TypedDict, total=False):
    """Parameters of a request. `expect` lists the statuses of an answer. `silent_s` replaces 60 s for a slow answer."""

    params: Mapping[str, str] | None
    headers: Mapping[str, str]
    data: bytes | memoryview | None
    expect: Collection[int]
    silent_s: float


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_json(self) -> bool:
        """Whether the body is JSON or empty."""
        try:
            found: Any = json_codec.loads(self.body or b"{}")
        except ValueError:
            return False
        return isinstance(found, dict)

    def json(self) -> dict[str, Any]:
        """Return the body as JSON; empty if there is none."""
        return json_codec.loads(self.body) if self.body else {}


class Gcp:
    def __init__(self, cloud: CloudSection) -> None:
        self.cloud = cloud
        self._session: Any = None
        self._token: GcpToken | None = None

    async def close(self) -> None:
        session, self._session, self._token = self._session, None, None
        if session is not None:
            await session.close()

    async def log_in(self) -> str:
        """Return the origin of the token, for people. Raises ConfigError, which says how to log in."""
        credentials = self._credentials()
        await credentials.get()
        return credentials.origin

    def endpoint(self, service: Service) -> str:
        """Return the endpoint without a trailing slash."""
        own = {
            "storage": self.cloud.gcs.endpoint_url,
            "pubsub": self.cloud.pubsub.endpoint_url,
            "secretmanager": self.cloud.secrets.endpoint_url,
        }[service]
        common = "" if self.cloud.provider == "aws" else self.cloud.endpoint_url  # gs:// URLs beside a run on AWS
        emulator = os.environ.get(_EMULATOR.get(service, ""), "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        return (own or common or emulator or f"https://{service}.googleapis.com").rstrip("/")

    async def project(self) -> str:
        """Return the project of `[cloud] project`, the environment or the credentials. Raises ConfigError if none names
        one."""
        named = self.cloud.project or os.environ.get("GOOGLE_CLOUD_PROJECT") or os.environ.get("PUBSUB_PROJECT_ID")
        if not named:
            named = await self._credentials().project()
        if not named:
            raise ConfigError("no Google project is named; set [cloud] project, or GOOGLE_CLOUD_PROJECT")
        return named

    async def request(
        self,
        method: str,
        url: str,
        *,
        what: str,
        budget_s: float = 60.0,
        json: Any = None,
        access: Access = PLAIN,
        unavailable: type[RolloutError] = StorageUnavailableError,
        **sent: Unpack[Sent],
    ) -> Response:
        """Return the answer if its status is in `expect`.

        Throttled and broken requests are repeated within `budget_s`; the caller ensures that a repetition does no harm.
        Raises `unavailable` after that budget, ConfigError for credentials and permissions, and NotFoundError,
        ConflictError or InputError as the service says.
        """
        if json is not None:
            sent["data"] = json_codec.dumps(json).encode()
            sent["headers"] = {**sent.get("headers", {}), "Content-Type": "application/json"}

        async def attempt() -> Response:
            return await self.once(method, url, **sent)

        return await self.retried(attempt, what=what, budget_s=budget_s, access=access, unavailable=unavailable)

    async def retried(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        what: str,
        budget_s: float = 60.0,
        access: Access = PLAIN,
        unavailable: type[RolloutError] = StorageUnavailableError,
    ) -> T:
        """Retry an attempt that takes more than one request. Raises the errors of `request`."""
        return await retrying(
            attempt, lambda e: classify(e, access), what=what, budget_s=budget_s, unavailable=unavailable
        )

    async def once(self, method: str, url: str, **sent: Unpack[Sent]) -> Response:
        """Send a request once; its answer is JSON. Raises Refused, aiohttp.ClientError, OSError (which includes
        TimeoutError)."""
        sent["headers"] = {"Accept-Encoding": "identity", **sent.get("headers", {})}
        async with self.stream(method, url, **sent) as answer:
            found = Response(answer.status, answer.headers, await _read(answer))
        if found.status in (200, 201) and not found.is_json:
            raise Refused(502, "", f"no JSON, but {found.body[:80]!r}: a captive portal or a proxy answers")
        return found

    @asynccontextmanager
    async def stream(self, method: str, url: str, **sent: Unpack[Sent]) -> AsyncGenerator[Any]:
        """Send a request as `once` does, and yield an aiohttp.ClientResponse whose body is not read yet."""
        for last in (False, True):
            token = await self._credentials().get() if _is_google(url) else ""
            own = {"Authorization": f"Bearer {token}"} if token else {}
            async with self._sent(method, url, {**sent.get("headers", {}), **own}, sent) as answer:
                if answer.status in sent.get("expect", (200,)):
                    yield answer
                    return
                failed = refused(answer.status, answer.headers, await _read(answer))
            if failed.status != 401 or last or not token:
                raise failed
            # Revoked, or its end came while the request was on its way.
            self._credentials().forget(token)

    @asynccontextmanager
    async def _sent(self, method: str, url: str, headers: dict[str, str], sent: Sent) -> AsyncGenerator[Any]:
        params, data, silent_s = sent.get("params"), sent.get("data"), sent.get("silent_s", SILENT_S)
        session, aiohttp, yarl = self._opened(), need("aiohttp", "gcp", _WHY), need("yarl", "gcp", _WHY)
        # As it is written: keys with %, // or .. are not tidied.
        target = yarl.URL(f"{url}?{urlencode(params)}" if params else url, encoded=True)
        options: dict[str, Any] = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silent_s),
            "allow_redirects": False,
            "read_bufsize": PIECE,
        }
        async with AsyncExitStack() as stack:
            # aiohttp's limit is of silence: the head of an answer may drip.
            async with asyncio.timeout(CONNECT_S + silent_s) as limit:
                body: Any = data
                if data is not None and len(data) > PIECE:
                    headers["Content-Length"] = str(len(data))
                    body = _watched(data, limit, silent_s)
                request = session.request(method, target, headers=headers, data=body, **options)
                answer = await stack.enter_async_context(request)
            yield answer

    def _opened(self) -> Any:
        if self._session is None:
            aiohttp = need("aiohttp", "gcp", _WHY)
            # Bytes as they are stored: a body that aiohttp unpacks has another length than its range. With `trust_env`
            # it reads ~/.netrc at each request.
            self._session = aiohttp.ClientSession(auto_decompress=False, trust_env=bool(getproxies()))
        return self._session

    def _credentials(self) -> GcpToken:
        if self._token is None:
            self._token = GcpToken(self._opened())
        return self._token


_WHY = 'Google Cloud ([cloud] provider = "gcp", gs:// URLs)'


async def _read(answer: Any) -> bytes:
    async with asyncio.timeout(ANSWER_S):
        return await answer.read()


async def _watched(data: bytes | memoryview, limit: asyncio.Timeout, silent_s: float) -> AsyncGenerator[memoryview]:
    """Yield the body, and abandon a server that accepts nothing for `silent_s`: aiohttp's own limits cover only
    reads."""
    view, loop = memoryview(data), asyncio.get_running_loop()
    for at in range(0, len(view), PIECE):
        limit.reschedule(loop.time() + silent_s)
        yield view[at : at + PIECE]
    limit.reschedule(loop.time() + silent_s)


def _is_google(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and (parts.hostname or "").endswith(".googleapis.com")
