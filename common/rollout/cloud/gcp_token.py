"""Token of Google's default chain, through gcloud-aio-auth.

The chain is GOOGLE_APPLICATION_CREDENTIALS (the key file of a service account, or workload identity), gcloud's user
credentials, the metadata server. The library's own `get` is not used: it hides why a token is unavailable behind five
attempts of up to a minute each.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from rollout.cloud.gcp_errors import CLOCK, LOG_IN, classify
from rollout.cloud.missing import need
from rollout.cloud.retry import Failure, retrying
from rollout.model.errors import ConfigError, StorageUnavailableError

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TIMEOUT_S = 10
BUDGET_S = 30.0
EARLY_S = 300.0
"""Seconds before its expiry at which a token is renewed; a shorter-lived one is renewed after half its life."""
AGAIN_S = 30.0
"""Seconds between attempts to renew while the old token is valid."""
_KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS"


class GcpToken:
    """Token. Every call raises ConfigError for missing or invalid credentials, and says how to log in."""

    def __init__(self, session: Any) -> None:
        """Use `session`, an aiohttp.ClientSession, which the caller closes."""
        auth = need("gcloud.aio.auth", "gcp", '[cloud] provider = "gcp"')
        _check_key_file()
        try:
            self._source: Any = auth.Token(session=session, scopes=[SCOPE])
        except (ValueError, KeyError) as e:
            raise ConfigError(f"Google's credentials cannot be used: {e}; {LOG_IN}", failure="credentials") from e
        self._lock = asyncio.Lock()
        self._value = ""
        self._renew_at = 0.0
        self._ends_at = 0.0

    @property
    def origin(self) -> str:
        """Origin for people: a service account, gcloud's log-in, or the metadata server."""
        kind = getattr(self._source.token_type, "value", "") or "unknown credentials"
        service: dict[str, Any] = getattr(self._source, "service_data", None) or {}
        account = str(service.get("client_email", ""))
        return f"{kind.replace('_', ' ')} {account}".strip()

    async def get(self) -> str:
        async with self._lock:
            now = time.monotonic()
            if not self._value or now >= self._renew_at:
                try:
                    await self._renew()
                except StorageUnavailableError:
                    if not self._value or now >= self._ends_at:
                        raise
                    self._renew_at = now + AGAIN_S
            return self._value

    def forget(self, value: str) -> None:
        """Discard `value`, which was refused: the next call asks for another."""
        if value == self._value:
            self._value = ""

    async def project(self) -> str:
        """Return the project of the credentials, or an empty string."""

        async def ask() -> Any:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._source.get_project()

        found = await retrying(ask, _classify, what="the project of Google's credentials")
        return str(found or "")

    async def _renew(self) -> None:
        asked = time.monotonic()
        answer = await retrying(self._refresh, _classify, what="a token of Google", budget_s=BUDGET_S)
        self._value = str(answer.value)
        life = float(answer.expires_in)
        self._ends_at = asked + life
        self._renew_at = asked + max(life - EARLY_S, life / 2)

    async def _refresh(self) -> Any:
        return await self._source.refresh(timeout=TIMEOUT_S)


def _check_key_file() -> None:
    """Check the key file: gcloud-aio-auth ignores one that is not JSON and goes on to the metadata server."""
    name = os.environ.get(_KEY_FILE)
    if not name:
        return
    try:
        json.loads(Path(name).read_text("utf-8"))
    except OSError as e:
        raise ConfigError(
            f"{_KEY_FILE} is {name}, which cannot be read: {e.strerror}; {LOG_IN}", failure="credentials"
        ) from e
    except ValueError as e:
        raise ConfigError(
            f"{_KEY_FILE} is {name}, which is not the JSON of a key: {e}; {LOG_IN}", failure="credentials"
        ) from e


def _classify(e: BaseException) -> Failure | None:
    said = str(getattr(e, "message", "") or e)[:600] or type(e).__name__
    if _unresolved(e):
        said = "there are no Google credentials (no key file, no log-in of gcloud, and no metadata server here)"
        return Failure("credentials", said, LOG_IN)
    if any(kind.__name__ == "ClientResponseError" for kind in type(e).__mro__):
        status = int(getattr(e, "status", 0))
        if status in (200, 429) or status >= 500:  # 200: the page of a proxy
            return Failure("throttled" if status in (429, 503) else "transient", said)
        clock = f". If they are fresh, {CLOCK}" if "JWT" in said or "iat" in said else ""
        return Failure("credentials", said, f"{LOG_IN}{clock}")
    if isinstance(e, (KeyError, ValueError)):
        return Failure("credentials", f"Google's credentials cannot be used: {said}", LOG_IN)
    return classify(e)


def _unresolved(e: BaseException | None) -> bool:
    """Return whether the metadata server's name is unknown, as everywhere but on Google's machines."""
    return e is not None and (type(e).__name__ == "ClientConnectorDNSError" or _unresolved(e.__cause__))
