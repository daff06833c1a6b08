"""API keys: their owners and their limits.

The variable that `serve.api_keys_env` names holds the keys, `sk-one,sk-two` or `alice=sk-one,bob=sk-two`, or the path
of a file, TOML or JSON, with limits:

    [alice]
    key = "sk-one"
    requests_per_minute = 60
    tokens_per_minute = 100_000
    max_in_flight = 8
"""

from __future__ import annotations

import difflib
import json
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from rollout.config.section import Section
from rollout.model.errors import ConfigError
from rollout.model.problems import problems
from rollout.workloads.serve.errors import ApiError

EVERYBODY = "-"
"""The client's name if no key is required."""
_MINUTE_S = 60.0


class KeySection(Section):
    key: str = Field(min_length=1, description="What clients send as `Authorization: Bearer KEY`.")
    requests_per_minute: int = Field(default=0, ge=0, description="0: any number.")
    tokens_per_minute: int = Field(default=0, ge=0, description="Tokens of prompts and answers; 0: any number.")
    max_in_flight: int = Field(default=0, ge=0, description="Requests at once; 0: any number.")


@dataclass(slots=True)
class Bucket:
    """A token bucket for a limit per minute; it holds one minute's worth. Tokens are charged once they are known, so
    the balance may become negative."""

    limit: int
    left: float = 0.0
    at: float = float("-inf")

    def wait_s(self, now: float) -> float:
        """Seconds until the next request is allowed; 0 if it is now."""
        if not self.limit:
            return 0.0
        a_second = self.limit / _MINUTE_S
        self.left = min(float(self.limit), self.left + (now - self.at) * a_second)
        self.at = now
        return 0.0 if self.left >= 1 else (1 - self.left) / a_second

    def take(self, count: int) -> None:
        if self.limit:
            self.left -= count


@dataclass(slots=True)
class Client:
    """The owner of a key and the state of its limits."""

    name: str
    max_in_flight: int = 0
    requests: Bucket = field(default_factory=lambda: Bucket(0))
    tokens: Bucket = field(default_factory=lambda: Bucket(0))
    in_flight: int = 0

    def begin(self, now: float) -> None:
        """Count a request in. Each call that returns is followed by `end`. Raises ApiError 429 if a limit is
        reached."""
        if self.max_in_flight and self.in_flight >= self.max_in_flight:
            raise ApiError(
                f"{self.in_flight} requests of key {self.name!r} run, which is its limit", status=429, retry_after_s=1
            )
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if wait_s := bucket.wait_s(now):
                message = f"key {self.name!r} has used its {bucket.limit} {what} a minute"
                raise ApiError(message, status=429, retry_after_s=wait_s)
        self.requests.take(1)
        self.in_flight += 1

    def end(self, tokens: int) -> None:
        self.tokens.take(tokens)
        self.in_flight -= 1


@dataclass(slots=True)
class Keys:
    """All keys. If `names` is empty, no key is required. `notes` are remarks for the user."""

    _clients: dict[bytes, Client] = field(default_factory=dict[bytes, Client])
    notes: tuple[str, ...] = ()
    _everybody: Client = field(default_factory=lambda: Client(EVERYBODY))

    @property
    def names(self) -> list[str]:
        return [client.name for client in self._clients.values()]

    def client(self, authorization: str) -> Client:
        """Return the client of an Authorization header. Raises ApiError 401."""
        if not self._clients:
            return self._everybody
        scheme, _, key = authorization.partition(" ")
        # By its hash: how long a look-up takes tells nothing of the key.
        found = self._clients.get(_hashed(key.strip())) if scheme.lower() == "bearer" else None
        if found is None:
            what = "this API key is not known" if authorization else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(what, status=401)
        return found

    def succeed(self, before: Keys) -> None:
        """Take over running requests, and the use of limits that did not change, from the keys before."""
        known = {client.name: client for client in before._clients.values()}
        for hashed, client in self._clients.items():
            old = known.get(client.name)
            if old is None:
                continue
            old.max_in_flight = client.max_in_flight
            old.requests = old.requests if old.requests.limit == client.requests.limit else client.requests
            old.tokens = old.tokens if old.tokens.limit == client.tokens.limit else client.tokens
            self._clients[hashed] = old
        self._everybody = before._everybody


def read_keys(variable: str, environ: Mapping[str, str]) -> Keys:
    """Read the keys from an environment variable or the file it names; an empty `variable` means no keys. Raises
    ConfigError with every fault, which never quotes a key."""
    if not variable:
        return Keys()
    place = f"serve.api_keys_env: {variable}"
    text = environ.get(variable, "").strip()
    if not text:
        raise ConfigError(f"{place} is not set: export {variable}=KEY, or the path of a file with keys")
    path = Path(text).expanduser()
    if "," in text or "=" in text or not (path.suffix in (".toml", ".json") or "/" in text):
        return _keys(_listed(text, place), place)
    try:
        mode, raw = path.stat().st_mode, path.read_text("utf-8")
    except FileNotFoundError:  # not quoted: it may be a key
        raise ConfigError(f"{place} names no file that exists; a key with a slash needs a name: NAME=KEY") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{place} names a file that cannot be read: {why}") from None
    try:
        tables: Any = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper() or 'TOML'}: {error}") from None
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f'{path}: has no keys: write a table for each, as [alice] with key = "..."')
    open_to = "everybody on this machine" if mode & stat.S_IROTH else "its group" if mode & stat.S_IRGRP else ""
    note = f"warning: {path} holds API keys, and {open_to} can read it: chmod 600 {path}" if open_to else ""
    found = _keys(cast("dict[str, Any]", tables), str(path))
    found.notes = (note,) if note else ()
    return found


def _listed(text: str, place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    faults: list[str] = []
    for number, one in enumerate((one.strip() for one in text.split(",")), 1):
        name, equals, key = one.partition("=")
        if not equals:
            name, key = f"key-{number}", one
        if not name or not key.strip("="):  # a key in base64 may end so: it must become no name
            faults.append(f"{place}: key {number} is empty, or ends with = and has no name: write NAME=KEY")
        elif name in found:
            faults.append(f"{place}: key {number} has the name of another one")
        found[name] = {"key": key}
    if faults:
        raise ConfigError(problems(faults))
    return found


def _keys(tables: Mapping[str, Any], place: str) -> Keys:
    faults: list[str] = []
    clients: dict[bytes, Client] = {}
    for name, given in tables.items():
        try:
            one = KeySection.model_validate({"key": given} if isinstance(given, str) else given, strict=True)
        except ValidationError as error:
            faults += [f"{place}: {name}{_where(entry['loc'])}: {_what(entry)}" for entry in error.errors()]
            continue
        hashed = _hashed(one.key)
        if hashed in clients:
            faults.append(f"{place}: {clients[hashed].name} and {name} have the same key")
        requests, tokens = Bucket(one.requests_per_minute), Bucket(one.tokens_per_minute)
        clients[hashed] = Client(name, one.max_in_flight, requests, tokens)
    if faults:
        raise ConfigError(problems(faults))
    return Keys(clients)


def _what(entry: ErrorDetails) -> str:
    """Describe a fault without quoting its value, which may be a key."""
    if entry["type"] != "extra_forbidden":
        return entry["msg"]
    valid = list(KeySection.model_fields)
    near = difflib.get_close_matches(str(entry["loc"][-1]), valid, n=1)
    return f'unknown key; did you mean "{near[0]}"?' if near else f"unknown key; valid keys are {', '.join(valid)}"


def _where(loc: tuple[int | str, ...]) -> str:
    return "".join(f".{part}" for part in loc)


def _hashed(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
