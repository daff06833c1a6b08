"""The few calls to a Kubernetes API server that sandboxes need. Requires `kubernetes_asyncio`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client import ApiException
from kubernetes_asyncio.stream import WsApiClient
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from rollout_worker.sandboxes.errors import SandboxCreateError, SandboxError, SandboxRefusedError
from rollout_worker.sandboxes.kubernetes_pod import CONTAINER

_RETRY_S = 60.0
_CALL_S = 30.0
_FRAME = 1 << 16
_INPUT, _OUTPUT, _ERRORS, _END = 0, 1, 2, 3  # channels of v4.channel.k8s.io

T = TypeVar("T")


class StreamError(Exception):
    """An exec connection could not be made, or broke. `answered`: the API server said why nothing was run."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class Api:
    """A client. `namespace` None is that of the kubeconfig's context, or of the pod that this runs in."""

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str | None) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self.namespace: str = namespace or "default"
        self._named = namespace is not None
        self._client: client.ApiClient | None = None
        self._stream: WsApiClient | None = None

    async def open(self) -> None:
        """Connect. Raises SandboxRefusedError if there is no configuration of a cluster, or it cannot be read."""
        settings = client.Configuration()
        try:
            if self._kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                cast(Any, config).load_incluster_config(client_configuration=settings)
                own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
                if not self._named and await asyncio.to_thread(own.is_file):
                    self.namespace = (await asyncio.to_thread(own.read_text)).strip()
            else:
                loader: Any = await cast(Any, config).load_kube_config(
                    config_file=self._kubeconfig or os.environ.get("KUBECONFIG"),
                    context=self._context,
                    client_configuration=settings,
                    persist_config=False,
                )
                if not self._named:
                    context = cast("dict[str, dict[str, str]]", loader.current_context)
                    self.namespace = context.get("context", {}).get("namespace") or "default"
        except (config.ConfigException, OSError, ValueError) as error:
            why = f"there is no usable configuration of a Kubernetes cluster: {error}"
            raise SandboxRefusedError(why, reasons=[why]) from error
        self._client = client.ApiClient(settings)
        self._stream = WsApiClient(settings)

    async def close(self) -> None:
        for one in (self._client, self._stream):
            if one is not None:
                await one.close()
        self._client = self._stream = None

    async def ask(self, method: str, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        """Return the JSON of an answer; retry while the server is busy or away. Raises ApiException if it refuses."""

        async def once() -> dict[str, Any]:
            assert self._client is not None, "the provider is not open"
            answer: Any = await cast(Any, self._client).call_api(
                path,
                method,
                {},
                list(query.items()),
                {"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                response_types_map={200: "object", 201: "object", 202: "object"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _request_timeout=_CALL_S,
            )
            return cast("dict[str, Any]", answer or {})

        return await _again(once)

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def policies(self) -> str:
        return f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"

    async def create(self, path: str, body: Mapping[str, Any]) -> None:
        """Create an object; one that exists is from an earlier try of ours, because names are never reused."""
        with _unless(409, "AlreadyExists"):
            await self.ask("POST", path, dict(body))

    async def delete(self, path: str, name: str) -> None:
        with _unless(404):
            await self.ask("DELETE", f"{path}/{name}", {"gracePeriodSeconds": 0, "propagationPolicy": "Background"})

    async def get(self, path: str, name: str) -> dict[str, Any] | None:
        with _unless(404):
            return await self.ask("GET", f"{path}/{name}")
        return None

    async def list(self, path: str, selector: str) -> list[dict[str, Any]]:
        with _unless(0):
            found: list[dict[str, Any]] = (await self.ask("GET", path, labelSelector=selector)).get("items") or []
            return found
        return []

    async def exec(self, pod: str, script: str, data: bytes, timeout_s: float) -> bytes:
        """Run `sh -c SCRIPT` in the pod; return its output until it ends or the connection breaks. Raises StreamError.

        The script is sent as input, because a URL has little room. The pod confirms it before the data is sent, because
        some versions of `head` read ahead.
        """
        assert self._stream is not None, "the provider is not open"
        text = script.encode(errors="surrogateescape")
        words = ["/bin/sh", "-c", f's=$(head -c {len(text)}); printf "R"; eval "$s"']
        api = client.CoreV1Api(self._stream)
        out = bytearray()
        said = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                connecting = await cast(Any, api).connect_get_namespaced_pod_exec(
                    pod,
                    self.namespace,
                    container=CONTAINER,
                    command=words,
                    stdin=True,
                    stdout=True,
                    stderr=True,
                    tty=False,
                    _preload_content=False,
                )
                async with connecting as socket:
                    await _send(socket, text)
                    waits = bool(data)
                    async for message in socket:
                        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                            continue
                        channel, piece = message.data[0], message.data[1:]
                        if channel == _OUTPUT:
                            out += piece
                            if waits and out:
                                waits = False
                                await _send(socket, data)
                        elif channel == _ERRORS:
                            said += piece[: 1000 - len(said)]
                        elif channel == _END:
                            break
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise StreamError(f"{type(error).__name__}: {error}") from error
        if not out:
            why = said.decode(errors="replace").strip()
            raise StreamError(why or "the connection was closed", answered=bool(why))
        return bytes(out[1:])


async def _send(socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    with contextlib.suppress(
        aiohttp.ClientConnectionResetError, ConnectionResetError
    ):  # what was read before is an answer too
        for start in range(0, len(data), _FRAME):
            await socket.send_bytes(bytes([_INPUT]) + data[start : start + _FRAME])


async def _again(work: Callable[[], Awaitable[T]]) -> T:
    retrying = AsyncRetrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_delay(_RETRY_S),
        wait=wait_random_exponential(multiplier=0.2, max=5.0),
        reraise=True,
    )
    try:
        return await retrying(work)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise SandboxCreateError(
            f"the Kubernetes API server does not answer: {type(error).__name__}: {error}"
        ) from error


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, ApiException):
        return error.status in (429, 500, 502, 503, 504)
    return isinstance(error, aiohttp.ClientError | TimeoutError | OSError)


@contextlib.contextmanager
def _unless(status: int, reason: str = "") -> Generator[None]:
    """Ignore a refusal with this status; convert others to errors of sandboxes."""
    try:
        yield
    except ApiException as error:
        if error.status != status or reason not in str(error.body):
            raise api_error(error) from error


def api_error(error: ApiException) -> SandboxError:
    """Convert a refusal of the server to an error of sandboxes."""
    why = f"the Kubernetes API server refused: {error.status} {error.reason}: {str(error.body or '')[:500]}"
    if error.status in (401, 403) and "exceeded quota" not in why:
        return SandboxRefusedError(why, reasons=[why])
    return SandboxCreateError(why)
