"""Secrets of a provider: by allowlist, cached in memory for a while, each read once however many callers ask.

While the service is away or this machine's credentials have expired, a value that was read before is returned for up to
`STALE_S` beyond its time, so a worker survives an outage. A value that was deleted or forbidden is not returned.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import structlog

from rollout.config.logging import hide
from rollout.config.secret_names import value_faults, variable_fault, variable_of
from rollout.model.errors import ConfigError, RolloutError, UnavailableError

log = structlog.get_logger()

STALE_S = 3600.0
JITTER = 0.1
"""Maximum share by which a value's lifetime is shortened, so that workers that started together do not ask together."""
RETRY_S = 5.0
"""Minimum seconds between reads while the service is away."""

Read = Callable[[str], Awaitable[bytes]]
"""Function that returns the bytes of a secret's current version. Raises RolloutError, retryable if a later read may
work."""


@dataclass(slots=True)
class _Kept:
    value: bytes = field(repr=False)
    read_at: float
    fresh_until: float


class CloudSecretStore:
    """Store of a provider. `accepts` tests whether the provider allows a name; `naming` describes the rule for
    people."""

    def __init__(
        self,
        read: Read,
        close: Callable[[], Awaitable[None]],
        names: Iterable[str],
        ttl_s: float,
        *,
        accepts: Callable[[str], bool],
        naming: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._close = close
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._reading: dict[str, asyncio.Task[bytes]] = {}
        self._allowed = _allowed(list(dict.fromkeys(names)), accepts, naming)

    def __repr__(self) -> str:
        return f"CloudSecretStore({', '.join(sorted(self._allowed.values()))})"

    @property
    def allowed(self) -> Mapping[str, str]:
        return self._allowed

    async def get(self, name: str) -> str:
        if name not in self._allowed.values():
            raise ConfigError(f"secret {name!r} is not in the allowlist; add it to [cloud.secrets] allowlist")
        base, _, key = name.partition("#")
        text = _text(name, key, await self._value(base))
        hide(text)
        return text

    async def _value(self, base: str) -> bytes:
        kept = self._kept.get(base)
        if kept is not None and self._clock() < kept.fresh_until:
            return kept.value
        reading = self._reading.get(base)
        if reading is None:
            reading = self._reading[base] = asyncio.create_task(self._read_anew(base))
            reading.add_done_callback(lambda _: self._reading.pop(base, None))
        return await asyncio.shield(reading)  # one that gives up does not end it for the others

    async def _read_anew(self, base: str) -> bytes:
        try:
            value = await self._read(base)
        except RolloutError as error:
            kept, now = self._kept.get(base), self._clock()
            if kept is None or _is_gone(error) or now - kept.read_at > self._ttl_s + STALE_S:
                self._kept.pop(base, None)
                raise
            kept.fresh_until = now + RETRY_S
            log.warning("secret_is_stale", name=base, age_s=round(now - kept.read_at), error=error.message)
            return kept.value
        now = self._clock()
        self._kept[base] = _Kept(value, now, now + self._ttl_s * (1 - random.uniform(0, JITTER)))
        return value

    async def close(self) -> None:
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        self._kept.clear()
        await self._close()


def _is_gone(error: RolloutError) -> bool:
    """Return whether the service denies this secret, rather than being busy or rejecting the caller's credentials."""
    return error.context.get("failure", "" if error.retryable else "denied") in ("denied", "missing")


def _allowed(names: list[str], accepts: Callable[[str], bool], naming: str) -> dict[str, str]:
    if fault := value_faults(names):
        raise ConfigError(f"[cloud.secrets] allowlist: {fault}")
    allowed: dict[str, str] = {}
    for name in names:
        base, mark, key = name.partition("#")
        variable = variable_of(name)
        if not accepts(base) or (mark and not key) or not variable:
            raise ConfigError(f"[cloud.secrets] allowlist: {name!r} cannot be the name of a secret: {naming}")
        if fault := variable_fault(name):
            raise ConfigError(f"[cloud.secrets] allowlist: {fault}")
        if variable in allowed:
            raise ConfigError(
                f"[cloud.secrets] allowlist: {allowed[variable]!r} and {name!r} would both be the variable {variable} "
                "of executors' processes: name one of them otherwise"
            )
        allowed[variable] = name
    return allowed


def _text(name: str, key: str, value: bytes) -> str:
    """Return the value of `key` in a JSON object, or the whole value without the newline that `echo` appends."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise _unusable(name, "is binary: store text, such as its base64 form") from None
    if key:
        text = _member(name, key, text)
    text = text[:-1].removesuffix("\r") if text.endswith("\n") else text
    if "\0" in text:
        raise _unusable(name, "has a NUL in it, which no environment variable can hold")
    if not text:
        raise UnavailableError(f"secret {name!r} is empty: put a value in it")
    return text


def _member(name: str, key: str, text: str) -> str:
    try:
        found: Any = json.loads(text)
    except ValueError:
        raise _unusable(name, f"is not JSON: without #{key} the whole of it is read") from None
    if not isinstance(found, dict) or key not in found:
        raise _unusable(name, f"has no key {key!r}: a JSON object with that key is expected")
    value = cast("dict[str, Any]", found)[key]
    return value if isinstance(value, str) else json.dumps(value)


def _unusable(name: str, what: str) -> ConfigError:
    return ConfigError(f"secret {name!r} of [cloud.secrets] allowlist {what}")
