"""Join tokens: `rj1.<role letter>.<secret>.<hash of the CA>.<checksum>`.

The hash lets a host check the CA before it shows the secret; the checksum tells a typo from a wrong token. The store
keeps a hash of the secret only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from rollout.model.errors import AuthError, ConfigError, UnavailableError
from rollout.security.roles import Role
from rollout.storage.port import Storage, Transaction

NAMESPACE = "security"
PREFIX = "token/"
SECRET_BYTES = 20
CAS_TRIES = 50
TTL_MAX_S = 30 * 86400
USES_MAX = 10_000
"""Maximum number of uses, all of which are kept in the token's single row."""

_LETTERS = {"c": Role.COORDINATOR, "w": Role.WORKER, "o": Role.OPERATOR}


@dataclass(frozen=True, slots=True)
class Token:
    role: Role
    secret: str
    ca_hash: bytes


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _unbase32(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))


def _checksum(body: str) -> str:
    return _base32(hashlib.sha256(body.encode()).digest()[:5])


def format_token(token: Token) -> str:
    letter = next(letter for letter, role in _LETTERS.items() if role is token.role)
    body = f"rj1.{letter}.{token.secret}.{_base32(token.ca_hash)}"
    return f"{body}.{_checksum(body)}"


def check_role(text: str, role: Role) -> None:
    """Raise ConfigError if the token is of another role, before it is sent: a token used up by mistake is lost."""
    found = parse_token(text).role
    if found is not role:
        program = "rollout" if role is Role.OPERATOR else f"rollout-{role}"
        other = "rollout" if found is Role.OPERATOR else f"rollout-{found}"
        raise ConfigError(
            f"this token enrols a host as {found}, and `{program} join` enrols it as {role}: make one with "
            f"`rollout-coordinator token create --role {role}`, or use this one with `{other} join`"
        )


def parse_token(text: str) -> Token:
    """Parse a token. Raises ConfigError that says whether it is not a token, truncated, or mistyped."""
    text = "".join(text.split()).lower()
    parts = text.split(".")
    whole = "copy the whole line that `rollout-coordinator token create` printed"
    if parts[0] != "rj1":
        raise ConfigError(f"this is not a join token, which begins with rj1. and has five parts: {whole}")
    if len(parts) != 5:
        what = "is cut off" if len(parts) < 5 else "has something behind it"
        raise ConfigError(f"the join token {what}: it has {len(parts)} parts, not 5 with periods between them; {whole}")
    body, checksum = text.rsplit(".", 1)
    if checksum != _checksum(body) or parts[1] not in _LETTERS:
        raise ConfigError(f"the join token was mistyped or cut off: its checksum does not match; {whole}")
    return Token(_LETTERS[parts[1]], parts[2], _unbase32(parts[3]))


def _key(secret: str) -> str:
    return PREFIX + hashlib.sha256(secret.encode()).hexdigest()


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def check_bounds(ttl_s: float, uses: int) -> None:
    """Raise ConfigError if the lifetime or the number of hosts is out of range."""
    if not 1 <= ttl_s <= TTL_MAX_S:
        raise ConfigError(
            f"--ttl: a token lives 1 second to {TTL_MAX_S // 86400} days, not {_span(ttl_s)}: who needs one later "
            "makes a new one"
        )
    if not 1 <= uses <= USES_MAX:
        raise ConfigError(
            f"--uses: a token lets 1 to {USES_MAX} hosts in, not {_brief(uses)}: make several for more of them"
        )


def _span(seconds: float) -> str:
    return f"{seconds:g} seconds" if seconds < 86400 else f"{seconds / 86400:g} days"


def _brief(number: int) -> str:
    text = str(number)
    return text if len(text) <= 24 else f"a number of {len(text)} digits"


async def create_token(
    storage: Transaction,
    role: Role,
    *,
    ca_hash: bytes,
    ttl_s: float = 600.0,
    uses: int = 1,
    clock: Callable[[], float] = time.time,
) -> str:
    """Return a new token, which is shown once and never stored. Tokens that expired long ago are removed."""
    check_bounds(ttl_s, uses)
    now_ms = int(clock() * 1000)
    for key, value in await storage.scan(NAMESPACE, PREFIX):
        if json.loads(value)["expires_ms"] < now_ms - 86_400_000:
            await storage.cas(NAMESPACE, key, value, None)
    secret = _base32(secrets.token_bytes(SECRET_BYTES))
    record: dict[str, Any] = {"role": role.value, "expires_ms": now_ms + int(ttl_s * 1000), "uses": uses, "used_by": []}
    await storage.put(NAMESPACE, _key(secret), _encode(record))
    return format_token(Token(role, secret, ca_hash))


async def consume_token(
    storage: Storage, secret: str, key_fingerprint: str, clock: Callable[[], float] = time.time
) -> Role:
    """Use the token once, in one compare-and-swap, and return its role; the same key counts only once.

    Raises AuthError if the token is unknown, expired or used up.
    """
    key = _key(secret)
    for _ in range(CAS_TRIES):
        stored = await storage.get(NAMESPACE, key)
        if stored is None:
            raise AuthError(
                "the join token is not known to this cluster; make one with `rollout-coordinator token create`"
            )
        record = cast("dict[str, Any]", json.loads(stored))
        if record["expires_ms"] <= clock() * 1000:
            raise AuthError("the join token has expired; make a new one with `rollout-coordinator token create`")
        used_by = cast("list[str]", record["used_by"])
        role = Role(record["role"])
        if key_fingerprint in used_by:
            return role
        if len(used_by) >= record["uses"]:
            raise AuthError(
                f"the join token is used up ({record['uses']} of {record['uses']} hosts joined); make a new one with "
                "`rollout-coordinator token create`, with --uses N for several hosts"
            )
        if await storage.cas(NAMESPACE, key, stored, _encode({**record, "used_by": [*used_by, key_fingerprint]})):
            return role
    raise UnavailableError("Too many hosts join with this token at once; try again in a moment.")
