"""AWS: one session, one long-lived client per service, credentials by the default chain."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, TypeVar

import structlog

from rollout.cloud.aws_errors import EXPIRED, NotAnsweredError, check_answer, classify, code_of
from rollout.cloud.missing import need
from rollout.cloud.retry import Failure, retrying
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, StorageUnavailableError, UnavailableError

log = structlog.get_logger()

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 60.0
"""Maximum seconds between two pieces of an answer, not for the whole."""
CREDENTIALS_S = 30.0
"""Seconds for the chain of credentials; a metadata service that answers too slowly is abandoned."""
CONNECTIONS = 64
_WHY = 'AWS ([cloud] provider = "aws", s3:// URLs)'
OLDER_MAX = 2
"""Number of client sets with expired credentials that are kept for calls in progress."""
EMULATED_REGION = "us-east-1"
"""Region for a service with an endpoint_url, where it only enters the signature; emulators accept this one."""


@cache
def _loader(data_path: str | None) -> Any:
    """Return the loader of service models, which take half a second to read."""
    return need("botocore.loaders", "aws", _WHY).create_loader(data_path)


class Aws:
    """Calls of all AWS services.

    botocore refreshes credentials; those that have expired for good are looked up again in the chain, once per failure.
    Calls raise ConfigError, NotFoundError, ConflictError and InputError with remedies; after the retry budget, S3
    raises StorageUnavailableError and other services UnavailableError.
    """

    def __init__(self, cloud: CloudSection) -> None:
        self.cloud = cloud
        self._lock = asyncio.Lock()
        self._clients: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        self._older: deque[AsyncExitStack] = deque()
        self._session: Any = None
        self._renewed = 0

    def endpoint(self, service: str) -> str:
        """Return the endpoint of an emulator or a compatible store; empty for AWS's own."""
        own = {
            "s3": self.cloud.s3.endpoint_url,
            "sqs": self.cloud.sqs.endpoint_url,
            "secretsmanager": self.cloud.secrets.endpoint_url,
        }.get(service, "")
        variable = f"AWS_ENDPOINT_URL_{service.upper().replace('SECRETSMANAGER', 'SECRETS_MANAGER')}"
        environment = os.environ.get(variable) or os.environ.get("AWS_ENDPOINT_URL", "")
        return own or self.cloud.endpoint_url or environment

    def region(self, service: str = "s3") -> str:
        """Return the region. Raises ConfigError if none is set anywhere."""
        region = self.cloud.region or os.environ.get("AWS_REGION", "")
        region = region or self._get_session().get_config_variable("region") or ""
        if not region and self.endpoint(service):
            region = EMULATED_REGION
        if not region:
            raise ConfigError("no AWS region is set: set [cloud] region, or AWS_REGION in the environment")
        return region

    def _get_session(self) -> Any:
        if self._session is None:
            self._session = need("aiobotocore.session", "aws", _WHY).get_session()
            self._session.register_component("data_loader", _loader(self._session.get_config_variable("data_path")))
        return self._session

    async def client(self, service: str) -> Any:
        """Return aiobotocore's client, for streaming bodies. It lives as long as this object; do not close it."""
        async with self._lock:
            found = self._clients.get(service)
            if found is None:
                try:
                    context = self._get_session().create_client(
                        service,
                        region_name=self.region(service),
                        endpoint_url=self.endpoint(service) or None,
                        config=self._config(service),
                    )
                    async with asyncio.timeout(CREDENTIALS_S):
                        found = await self._stack.enter_async_context(context)
                except Exception as e:
                    failure = classify(e, service, "create_client", {})
                    if failure is None:
                        raise
                    raise failure.error(f"cannot use {service}", UnavailableError) from e
                self._clients[service] = found
            return found

    def _config(self, service: str) -> Any:
        config = need("aiobotocore.config", "aws", _WHY).AioConfig
        elsewhere = bool(self.endpoint(service))
        s3 = self.cloud.s3
        addressing = s3.addressing
        if addressing == "auto":
            addressing = "path" if elsewhere else "auto"
        checksums = s3.checksums
        if checksums == "auto":  # the default of botocore is refused by several compatible stores
            checksums = "when_required" if elsewhere else "when_supported"
        return config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=SILENCE_TIMEOUT_S,
            max_pool_connections=CONNECTIONS,
            retries={"total_max_attempts": 1},  # ours alone: two layers multiply
            s3={"addressing_style": addressing},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            user_agent_extra="rollout",
        )

    def _named_by(self, service: str, parameters: Mapping[str, Any] | None) -> str:
        """Return the URL of a bucket that no configuration key names; empty if the service's key does."""
        bucket = (parameters or {}).get("Bucket", "") if service == "s3" else ""
        return f"the URL s3://{bucket}/" if bucket and bucket != self.cloud.s3.bucket else ""

    async def call(
        self, service: str, operation: str, *, what: str, budget_s: float = 60.0, **parameters: Any
    ) -> dict[str, Any]:
        """Call `operation`, named as botocore's method: "put_object". `what` begins the message of an error."""

        async def attempt(client: Any) -> dict[str, Any]:
            return await getattr(client, operation)(**parameters)

        return await self.run(service, operation, attempt, what=what, budget_s=budget_s, parameters=parameters)

    async def run(
        self,
        service: str,
        operation: str,
        attempt: Callable[[Any], Awaitable[T]],
        *,
        what: str,
        budget_s: float = 60.0,
        parameters: Mapping[str, Any] | None = None,
    ) -> T:
        """Call `attempt(client)` with retries. The last attempt may use a client with newer credentials."""
        known = self._renewed

        async def checked(client: Any) -> T:
            try:
                answer = await attempt(client)
            except KeyError as e:
                raise NotAnsweredError(f"an answer without {e}: a captive portal or a proxy answers") from e
            check_answer(operation, answer)
            return answer

        async def once() -> T:
            nonlocal known
            client = await self.client(service)
            try:
                return await checked(client)
            except Exception as e:
                if code_of(e) not in EXPIRED or known < 0:
                    raise
                await self._renew(known)
                known = -1  # once
            return await checked(await self.client(service))

        def kind(error: BaseException) -> Failure | None:
            return classify(error, service, operation, parameters or {}, named_by=self._named_by(service, parameters))

        unavailable = StorageUnavailableError if service == "s3" else UnavailableError
        return await retrying(once, kind, what=what, budget_s=budget_s, unavailable=unavailable)

    async def _renew(self, known: int) -> None:
        """Ask the chain again in a new session; calls in progress keep the old clients."""
        async with self._lock:
            if self._renewed == known:
                self._renewed += 1
                self._session = None
                self._clients.clear()
                self._older.append(self._stack)
                self._stack = AsyncExitStack()
                while len(self._older) > OLDER_MAX:
                    await self._older.popleft().aclose()
                log.info("cloud_credentials_renewed")

    async def close(self) -> None:
        async with self._lock:
            self._clients.clear()
            while self._older:
                await self._older.popleft().aclose()
            stack, self._stack = self._stack, AsyncExitStack()
            await stack.aclose()
